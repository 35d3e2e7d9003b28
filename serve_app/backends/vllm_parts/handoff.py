"""A handoff of the vLLM engine as one run of bytes: a manifest, then what each rank of the model has copied out."""

import itertools
import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from serve_app.backends.base import Handoff
from speculative.errors import HandoffRefused

_MAGIC = b"TSVLLM01"


@dataclass(frozen=True, slots=True)
class Manifest:
    """What two engines must agree on for one to go on from what the other computed."""

    fingerprint: str  # of the model
    drafter: str  # its kind and the fingerprint of its weights
    vllm: str  # version
    layout: str  # dtype of the cache and size of its blocks
    num_ranks: int


def pack(manifest: Manifest, prompt: Sequence[int], parts: Sequence[bytes]) -> Handoff:
    """The handoff of a prompt: all its tokens but the last are computed."""
    body = b"".join(parts)
    header = json.dumps(
        {
            "manifest": asdict(manifest),
            "prompt": _digest(prompt),
            "num_computed": len(prompt) - 1,
            "sizes": [len(part) for part in parts],
            "checksum": zlib.crc32(body),
        }
    ).encode()
    return np.frombuffer(_MAGIC + len(header).to_bytes(8, "little") + header + body, dtype=np.uint8)


def unpack(handoff: Handoff, manifest: Manifest, prompt: Sequence[int]) -> tuple[int, list[memoryview]]:
    """How many tokens are computed, and the part of each rank.

    Raises:
        HandoffRefused: it is damaged, or not of this prompt, model, drafter or build.
    """
    raw = np.ascontiguousarray(handoff).data
    start = len(_MAGIC) + 8
    if bytes(raw[: len(_MAGIC)]) != _MAGIC:
        raise HandoffRefused("damaged", "This is no handoff of the vLLM engine. Use the same engine.kind in all pools.")
    length = int.from_bytes(raw[len(_MAGIC) : start], "little")
    try:
        header = json.loads(bytes(raw[start : start + length]))
        theirs, told = Manifest(**header["manifest"]), (header["prompt"], header["num_computed"])
        sizes, checksum = [int(size) for size in header["sizes"]], header["checksum"]
    except (ValueError, KeyError, TypeError) as error:
        raise HandoffRefused("damaged", "The handoff's manifest cannot be read. Prefill again.") from error
    _refuse_others(theirs, manifest)
    if told != (_digest(prompt), len(prompt) - 1):
        raise HandoffRefused("request", "The handoff is of another prompt.")
    body = raw[start + length :]
    if len(body) != sum(sizes) or zlib.crc32(body) != checksum:
        raise HandoffRefused("damaged", "The handoff's checksum does not fit. Prefill again.")
    ends = np.cumsum([0, *sizes]).tolist()
    return len(prompt) - 1, [body[begin:end] for begin, end in itertools.pairwise(ends)]


def _refuse_others(theirs: Manifest, ours: Manifest) -> None:
    for name, value in asdict(ours).items():
        if getattr(theirs, name) != value:
            raise HandoffRefused(
                "manifest",
                f"The handoff was computed with something else ({name}: {getattr(theirs, name)}, not {value}).",
            )


def _digest(prompt: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes())
