"""The handoff: a sequence between two steps, on its way from one engine to another.

Wire format, little-endian, one contiguous run of bytes:

    magic "TSPC" | version u16 | zero u16 | header length u64 | header (JSON) | zero padding to 64 | keys and values
    | xxh3-64 of everything before

Keys and values are [num_layers, 2, num_computed, num_kv_heads, head_dim] in the engine's dtype: only computed positions
travel, and their order does not depend on the block size of either side. The drafter's sections follow in the same
dtype, with their shapes in the header. The header is the manifest: what the state is, and what it was computed with. An
engine takes in nothing whose manifest differs from its own; nothing is guessed.
"""

import dataclasses
import json
import math
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculative.errors import HandoffRefused

Blob = np.ndarray[Any, np.dtype[np.uint8]]

VERSION = 1
_MAGIC = b"TSPC"
_PREFIX = struct.Struct("<4sHHQ")
_CHECKSUM = struct.Struct("<Q")
_ALIGNMENT = 64
_MAX_HEADER_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Manifest:
    """The settings that a state was computed with; both sides must agree on all of them."""

    fingerprint: str  # of the model's configuration and weights
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    logprobs_mode: str  # the pending token's logprobs were reported in it
    drafter_state: str  # which drafter's state travels along: "none" for drafters that rebuild theirs from the tokens

    def kv_shape(self, num_computed: int) -> tuple[int, ...]:
        """Return the shape of the keys and values of so many positions."""
        return (self.num_layers, 2, num_computed, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class ComputedTokenState:
    """All tokens but the last are computed; the last one is pending.

    kv: [num_layers, 2, len(token_ids) - 1, num_kv_heads, head_dim].
    extra: what the drafter needs to go on, by name.
    """

    token_ids: tuple[int, ...]
    num_prompt: int
    num_cached: int  # prompt tokens that were found in a prefix cache
    kv: Tensor
    extra: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are here."""
        return len(self.token_ids) - 1


def allocate_blob(state: ComputedTokenState, manifest: Manifest) -> tuple[Blob, Tensor]:
    """A blob with its header written, and a view of the place for its keys and values; `seal` it when they are there.

    `state.kv` is not read, so the cache may be copied straight into the blob.
    """
    header = json.dumps(
        {
            "manifest": dataclasses.asdict(manifest),
            "token_ids": state.token_ids,
            "num_prompt": state.num_prompt,
            "num_cached": state.num_cached,
            "extra": {name: list(section.shape) for name, section in state.extra.items()},
        }
    ).encode()
    start = _aligned(_PREFIX.size + len(header))
    shape = manifest.kv_shape(state.num_computed)
    dtype = getattr(torch, manifest.dtype)
    num_kv = math.prod(shape)
    size = (num_kv + sum(section.numel() for section in state.extra.values())) * dtype.itemsize
    blob = np.empty(start + size + _CHECKSUM.size, np.uint8)
    blob[:start] = 0
    blob[: _PREFIX.size + len(header)] = np.frombuffer(_PREFIX.pack(_MAGIC, VERSION, 0, len(header)) + header, np.uint8)
    values = torch.from_numpy(blob[start : start + size]).view(dtype)
    if state.extra:
        torch.cat([section.reshape(-1).to("cpu", dtype) for section in state.extra.values()], out=values[num_kv:])
    return blob, values[:num_kv].view(shape)


def seal(blob: Blob) -> Blob:
    """Write the checksum."""
    body, checksum = blob[: -_CHECKSUM.size], blob[-_CHECKSUM.size :]
    checksum[:] = np.frombuffer(_CHECKSUM.pack(_digest(body)), np.uint8)
    return blob


def decode_state(blob: Blob, manifest: Manifest) -> ComputedTokenState:
    """Unpack a state; its `kv` is a view of the blob.

    Args:
        manifest: the taking engine's own.

    Raises:
        HandoffRefused: reason `damaged`, `version`, or `manifest`; the message names both sides.
    """
    data, header, start = _read_header(blob)
    ours, theirs = dataclasses.asdict(manifest), header.get("manifest")
    if theirs != ours:
        named = theirs if isinstance(theirs, dict) else {}
        differing = sorted(key for key in ours if named.get(key) != ours[key])
        detail = ", ".join(f"{key}: theirs {named.get(key)!r}, ours {ours[key]!r}" for key in differing)
        raise HandoffRefused("manifest", f"The handoff was computed with other settings ({detail or 'extra fields'}).")
    token_ids, num_prompt, num_cached = _read_counts(header)
    shapes = {"": manifest.kv_shape(len(token_ids) - 1), **_read_extra(header)}
    sizes = [math.prod(one) for one in shapes.values()]
    body, dtype = data[start : -_CHECKSUM.size], getattr(torch, manifest.dtype)
    if body.size % dtype.itemsize:
        raise HandoffRefused("damaged", f"The handoff's {body.size} bytes are no whole number of {dtype} values.")
    with warnings.catch_warnings():  # arrays out of shared memory are read-only, and so is our use of them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        values = torch.from_numpy(body).view(dtype)
    if values.numel() != sum(sizes):
        raise HandoffRefused("damaged", f"The handoff holds {values.numel()} values, its header promises {shapes}.")
    parts = [part.view(one) for part, one in zip(values.split(sizes), shapes.values(), strict=True)]
    extra = dict(zip([*shapes][1:], parts[1:], strict=True))
    return ComputedTokenState(token_ids, num_prompt, num_cached, parts[0], extra)


def _read_header(blob: Blob) -> tuple[Blob, dict[str, Any], int]:
    """The bytes of a blob that is whole, its header, and where its values begin."""
    data = np.ascontiguousarray(blob).reshape(-1)
    if data.dtype != np.uint8 or data.size < _PREFIX.size + _CHECKSUM.size:
        raise HandoffRefused("damaged", f"The handoff is no run of bytes of a possible length ({data.size}).")
    magic, version, _, length = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic == _MAGIC and version != VERSION:
        raise HandoffRefused("version", f"The handoff has wire version {version}, this engine speaks {VERSION}.")
    (promised,) = _CHECKSUM.unpack(data[-_CHECKSUM.size :].tobytes())
    if magic != _MAGIC or _digest(data[: -_CHECKSUM.size]) != promised:
        raise HandoffRefused("damaged", "The handoff's checksum does not match: it was cut or altered on its way.")
    start = _aligned(_PREFIX.size + length)
    if length > _MAX_HEADER_BYTES or start > data.size - _CHECKSUM.size:
        raise HandoffRefused("damaged", f"The handoff's header claims {length} bytes.")
    try:
        header = json.loads(data[_PREFIX.size : _PREFIX.size + length].tobytes())
    except (ValueError, RecursionError) as error:
        raise HandoffRefused("damaged", f"The handoff's header is not readable: {error}.") from error
    if not isinstance(header, dict):
        raise HandoffRefused("damaged", "The handoff's header is no object.")
    return data, header, start


def _read_counts(header: dict[str, Any]) -> tuple[tuple[int, ...], int, int]:
    token_ids, num_prompt, num_cached = (header.get(key) for key in ("token_ids", "num_prompt", "num_cached"))
    sound = (
        isinstance(token_ids, list)
        and all(type(token) is int and token >= 0 for token in token_ids)
        and type(num_prompt) is int
        and type(num_cached) is int
        and 0 <= num_cached <= num_prompt
        and 1 <= num_prompt <= len(token_ids)
    )
    if not sound:
        raise HandoffRefused("damaged", "The handoff's tokens and counts contradict each other.")
    return tuple(token_ids), num_prompt, num_cached  # type: ignore[arg-type, return-value]


def _read_extra(header: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    extra = header.get("extra")
    if not isinstance(extra, dict) or not all(
        name and isinstance(shape, list) and len(shape) <= 8 and all(type(n) is int and 0 <= n < 2**40 for n in shape)
        for name, shape in extra.items()
    ):
        raise HandoffRefused("damaged", "The handoff's sections have no sound shapes.")
    return {name: tuple(shape) for name, shape in extra.items()}


def _digest(data: Blob) -> int:
    import xxhash  # nothing else of an engine needs it

    return xxhash.xxh3_64_intdigest(data.data)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
