"""The handoff: a sequence between two steps, on its way from one engine to another.

Wire format, little-endian, one contiguous run of bytes:

    magic "TSPC" | version u16 | zero u16 | header length u64 | zeros to 64 | keys and values | header (JSON)
    | xxh3-64 of everything between the first 64 bytes and this, and then of those

Keys and values are [num_computed, num_layers, 2, num_kv_heads, head_dim] in the engine's dtype: only computed positions
travel, and neither side's block size nor the chunks of the prompt change a byte. They are written and hashed from front
to back while later positions are still being computed; the header, which has all tokens, is therefore last. The
drafter's sections follow the keys and values in the same dtype, with their shapes in the header. The header is the
manifest: what the state is, and what it was computed with. An engine takes in nothing whose manifest differs from its
own; nothing is guessed.
"""

import dataclasses
import json
import math
import struct
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from speculative.errors import EngineFault, HandoffRefused

Blob = np.ndarray[Any, np.dtype[np.uint8]]

VERSION = 2
_MAGIC = b"TSPC"
_PREFIX = struct.Struct("<4sHHQ")
_CHECKSUM = struct.Struct("<Q")
_START = 64  # of the keys and values
_HEADER_ROOM = 2**20  # bytes, with sections of a single position; and for each token:
_TOKEN_ROOM = 12
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
        return (num_computed, self.num_layers, 2, self.num_kv_heads, self.head_dim)


@dataclass(frozen=True, slots=True)
class ComputedTokenState:
    """All tokens but the last are computed; the last one is pending."""

    manifest: Manifest  # what it was computed with
    token_ids: tuple[int, ...]
    num_prompt: int
    num_cached: int  # prompt tokens that were found in a prefix cache
    kv: Tensor  # [len(token_ids) - 1, num_layers, 2, num_kv_heads, head_dim]
    extra: Mapping[str, Tensor] = field(default_factory=dict)  # what the drafter needs to go on, by name

    @property
    def num_computed(self) -> int:
        """Tokens whose keys and values are here."""
        return len(self.token_ids) - 1


class Arrival(Protocol):
    """A handoff whose keys and values are being copied into the blocks of its sequence."""

    is_lost: bool  # they cannot be copied

    def proceed(self) -> bool:
        """Copy on; return whether all of it lies there."""

    def cancel(self) -> None:
        """Write nothing more into the blocks than what the device's next step waits for."""


class Export:
    """A handoff on its way out of an engine, written from front to back.

    Args:
        manifest: of the engine.
        num_tokens: of the sequence, at most.
        num_bytes: of keys, values and sections, at most.
    """

    def __init__(self, manifest: Manifest, num_tokens: int, num_bytes: int) -> None:
        import xxhash  # nothing else of an engine needs it

        self._manifest = manifest
        room = _START + num_bytes + _HEADER_ROOM + _TOKEN_ROOM * num_tokens + _CHECKSUM.size
        self._blob: Blob = np.empty(room, np.uint8)  # of which the system gives what is written to
        self._digest = xxhash.xxh3_64()
        self._end = _START
        self._is_finite = True
        self._header: dict[str, Any] = {}
        self.left: list[Callable[[Export], object]] = []  # to be done before it is whole; holding it would be a cycle
        self.on_device: Tensor | None = None  # bytes that stay there; what is `finish`ed has their checksum instead
        self.block_names: Sequence[bytes] = ()  # of its full blocks in the engine's prefix cache

    def place(self, shape: Sequence[int]) -> Tensor:
        """The next values, to be filled and then given to `take`."""
        dtype: torch.dtype = getattr(torch, self._manifest.dtype)
        begin, self._end = self._end, self._end + math.prod(shape) * dtype.itemsize
        return torch.from_numpy(self._blob[begin : self._end]).view(dtype).view(*shape)

    def take(self, values: Tensor, *, of_target: bool) -> None:
        """Hash what was placed, in that order; look for numbers that are none among the target's.

        One of them spoils every later position in the layers above: a run's last position shows all layers but the last
        one, whose keys and values nothing has read.
        """
        self._digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
        if of_target and len(values):
            self._is_finite &= bool(values[-1].isfinite().all() and values[:, -1].isfinite().all())

    def describe(
        self, token_ids: Sequence[int], num_prompt: int, num_cached: int, extra: Mapping[str, Sequence[int]]
    ) -> None:
        """Say what the values are of; `extra`: shapes of the sections."""
        self._header = {
            "manifest": dataclasses.asdict(self._manifest),
            "token_ids": list(token_ids),
            "num_prompt": num_prompt,
            "num_cached": num_cached,
            "extra": {name: list(shape) for name, shape in extra.items()},
        }

    def finish(self) -> Blob:
        """Wait for its copies, and seal it: once, and on any thread but the engine's. Raises EngineFault: the keys and
        values contain NaN or infinity; `EngineCore.withdraw` then keeps others from finding them."""
        for do in self.left:
            do(self)
        if not self._is_finite:
            raise EngineFault("The computed keys and values are not finite; nothing was handed off.")
        header = json.dumps(self._header).encode()
        prefix = _PREFIX.pack(_MAGIC, VERSION, 0, len(header)).ljust(_START, b"\0")
        self._digest.update(header)
        self._digest.update(prefix)
        behind = np.frombuffer(header + _CHECKSUM.pack(self._digest.intdigest()), np.uint8)
        end = self._end + len(behind)
        blob = self._blob if end <= self._blob.size else np.concatenate((self._blob[: self._end], behind))
        blob[:_START], blob[self._end : end] = np.frombuffer(prefix, np.uint8), behind
        return blob[:end]


def decode_state(
    blob: Blob, manifest: Manifest, read: Callable[[Blob], Tensor] = torch.from_numpy
) -> ComputedTokenState:
    """Unpack a state; its `kv` is a view of the blob.

    Args:
        blob: as it arrived.
        manifest: the taking engine's own.
        read: gives the values' bytes for what lies in their place.

    Raises:
        HandoffRefused: reason `damaged`, `version`, or `manifest`; the message names both sides.
    """
    values, header = _read_header(blob)
    check_manifest(header.get("manifest"), manifest)
    token_ids, num_prompt, num_cached = _read_counts(header)
    shapes = {"": manifest.kv_shape(len(token_ids) - 1), **_read_extra(header)}
    sizes = [math.prod(one) for one in shapes.values()]
    dtype = getattr(torch, manifest.dtype)
    if values.size % dtype.itemsize:
        raise HandoffRefused("damaged", f"The handoff's {values.size} bytes are no whole number of {dtype} values.")
    with warnings.catch_warnings():  # arrays out of shared memory are read-only, and so is our use of them
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        numbers = read(values).view(dtype)
    if numbers.numel() != sum(sizes):
        raise HandoffRefused("damaged", f"The handoff holds {numbers.numel()} values, its header promises {shapes}.")
    parts = [part.view(one) for part, one in zip(numbers.split(sizes), shapes.values(), strict=True)]
    extra = dict(zip([*shapes][1:], parts[1:], strict=True))
    return ComputedTokenState(manifest, token_ids, num_prompt, num_cached, parts[0], extra)


def check_manifest(theirs: Any, manifest: Manifest) -> None:
    """Compare what a state was computed with, as its header has it, with an engine's own. Raises HandoffRefused: they
    differ."""
    ours = dataclasses.asdict(manifest)
    if theirs != ours:
        named = theirs if isinstance(theirs, dict) else {}
        differing = sorted(key for key in ours if named.get(key) != ours[key])
        detail = ", ".join(f"{key}: theirs {named.get(key)!r}, ours {ours[key]!r}" for key in differing)
        raise HandoffRefused("manifest", f"The handoff was computed with other settings ({detail or 'extra fields'}).")


def _read_header(blob: Blob) -> tuple[Blob, dict[str, Any]]:
    """The values of a blob that is whole, and its header."""
    import xxhash

    data = np.ascontiguousarray(blob).reshape(-1)
    if data.dtype != np.uint8 or data.size < _START + _CHECKSUM.size:
        raise HandoffRefused("damaged", f"The handoff is no run of bytes of a possible length ({data.size}).")
    magic, version, _, length = _PREFIX.unpack(data[: _PREFIX.size].tobytes())
    if magic == _MAGIC and version != VERSION:
        raise HandoffRefused("version", f"The handoff has wire version {version}, this engine speaks {VERSION}.")
    prefix, body, checksum = np.split(data, (_START, -_CHECKSUM.size))
    digest = xxhash.xxh3_64(body.data)
    digest.update(prefix.data)
    if magic != _MAGIC or _CHECKSUM.pack(digest.intdigest()) != checksum.tobytes():
        raise HandoffRefused("damaged", "The handoff's checksum does not match: it was cut or altered on its way.")
    if not 0 < length <= min(_MAX_HEADER_BYTES, body.size):
        raise HandoffRefused("damaged", f"The handoff's header claims {length} bytes.")
    values, written = np.split(body, (body.size - length,))
    try:
        header = json.loads(written.tobytes())
    except (ValueError, RecursionError) as error:
        raise HandoffRefused("damaged", f"The handoff's header is not readable: {error}.") from error
    if not isinstance(header, dict):
        raise HandoffRefused("damaged", "The handoff's header is no object.")
    return values, header


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
