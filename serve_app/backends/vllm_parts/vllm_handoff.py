"""A handoff of the vLLM engine as one byte string: a manifest, then a part from each rank of the model.

That part is what the rank copied out; or, if the other side reads from memory, what it should find there.
"""

import asyncio
import itertools
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from serve_app.backends.base import Handoff
from serve_app.backends.vllm_parts.settings import TERMS
from speculative.errors import HandoffRefused

_MAGIC = b"TSVLLM02"
_MOST_READINGS = 4096  # remembered; an older one that is read again is reported as gone


@dataclass(frozen=True, slots=True)
class VllmManifest:
    """The settings that two engines must agree on for one to continue from what the other computed."""

    fingerprint: str  # of the model
    drafter: str  # its kind and the fingerprint of its weights
    vllm: str  # version
    layout: str  # dtype of the cache, size of its blocks, how they lie
    num_ranks: int
    way: str = "copy"  # or "nixl"
    adapter: str = ""  # of the request, its name and the fingerprint of its files; "" = the model itself


@dataclass(frozen=True, slots=True)
class Sent:
    """A handoff that arrived intact; whether it fits is checked separately."""

    manifest: VllmManifest
    prompt: int  # its digest
    num_computed: int  # tokens
    parts: list[memoryview]  # of each rank
    source: dict[str, Any]  # where the blocks are to be read, in vLLM's terms; empty if they were sent along

    def check(self, manifest: VllmManifest, prompt: Sequence[int]) -> None:
        """Check that an engine with this manifest may continue from it with this prompt. Raises HandoffRefused: it is
        for another prompt, model, adapter, drafter or build."""
        for name, value in asdict(manifest).items():
            if getattr(self.manifest, name) != value:
                raise HandoffRefused(
                    "manifest",
                    f"The handoff was computed with other settings ({name}: {getattr(self.manifest, name)}, not "
                    f"{value}).",
                )
        if (self.prompt, self.num_computed) != (_digest(prompt), len(prompt) - 1):
            raise HandoffRefused("request", "The handoff belongs to another prompt.")


def pack(
    manifest: VllmManifest, prompt: Sequence[int], parts: Sequence[bytes], source: dict[str, Any] | None = None
) -> Handoff:
    """The handoff of a prompt: all its tokens but the last are computed."""
    header = json.dumps(
        {
            "manifest": asdict(manifest),
            "prompt": _digest(prompt),
            "num_computed": len(prompt) - 1,
            "sizes": [len(part) for part in parts],
            "source": source or {},
        }
    ).encode()
    content = header + b"".join(parts)
    numbers = len(header).to_bytes(8, "little") + zlib.crc32(content).to_bytes(8, "little")
    return np.frombuffer(_MAGIC + numbers + content, dtype=np.uint8)


def unpack(handoff: Handoff) -> Sent:
    """Parse a received handoff. Raises HandoffRefused: it is damaged, or from another engine."""
    raw = np.ascontiguousarray(handoff).data
    middle, start = len(_MAGIC) + 8, len(_MAGIC) + 16
    if bytes(raw[: len(_MAGIC)]) != _MAGIC:
        raise HandoffRefused("damaged", "This is not a vLLM handoff. Use the same engine.kind in all pools.")
    length, checksum = (int.from_bytes(raw[begin : begin + 8], "little") for begin in (len(_MAGIC), middle))
    if zlib.crc32(raw[start:]) != checksum:
        raise HandoffRefused("damaged", "The handoff's checksum does not match. Prefill again.")
    try:
        header = json.loads(bytes(raw[start : start + length]))
        ends = np.cumsum([start + length, *header["sizes"]]).tolist()
        parts = [raw[begin:end] for begin, end in itertools.pairwise(ends)]
        return Sent(
            VllmManifest(**header["manifest"]), header["prompt"], header["num_computed"], parts, header["source"]
        )
    except (ValueError, KeyError, TypeError) as error:
        raise HandoffRefused("damaged", "The handoff's manifest cannot be read. Prefill again.") from error


def source_of(output: Any) -> dict[str, Any]:
    """Return where to read a prompt that vLLM has computed, in its terms; empty before it is computed."""
    reported = {name: value for name, value in (output.kv_transfer_params or {}).items() if name != TERMS}
    return reported if "remote_request_id" in reported else {}


class Readings:
    """The handoffs that this replica has read: vLLM frees one once it is read, so it cannot be read again."""

    def __init__(self) -> None:
        self._readings: dict[tuple[str, str], asyncio.Future[bool]] = {}

    def begin(self, source: Mapping[str, Any]) -> asyncio.Future[bool] | None:
        """Start reading a handoff. None = it is being or was read; else the future to set to whether it was read."""
        if _name(source) in self._readings:
            return None
        if len(self._readings) == _MOST_READINGS:
            del self._readings[next(iter(self._readings))]
        reading = asyncio.get_running_loop().create_future()
        self._readings[_name(source)] = reading
        return reading

    async def end(self, source: Mapping[str, Any]) -> bool:
        """Wait until it is known whether it was read."""
        return await asyncio.shield(self._readings[_name(source)])


def _name(source: Mapping[str, Any]) -> tuple[str, str]:
    return source["remote_engine_id"], source["remote_request_id"]


def _digest(prompt: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes())
