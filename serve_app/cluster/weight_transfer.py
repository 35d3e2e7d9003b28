"""Carries weights to a replica, shard by shard, and checks them."""

import asyncio
import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.backends.base import ModelInfo, PauseMode, Shard
from serve_app.cluster.desired_state import Outcome, WeightsRef
from serve_app.errors import UpdateRefused
from speculative.model.end_tokens import END_TOKEN_FILES

Pull = Callable[[Any], Awaitable[Any]]
"""Gets a shard's content, a buffer of bytes, from where it lies."""

Update = Callable[[WeightsRef, PauseMode, float], Awaitable[Outcome]]
"""Brings weights to every replica, or to none: `WeightCoordinator.update`."""


def digest_of(content: bytes | memoryview) -> str:
    """The checksum of a shard: BLAKE2b-128, 32 hex digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


@dataclass(slots=True)
class Transfers:
    """Weights that come over the wire, shard by shard. One transfer at a time: a new one gives up the last."""

    keep: Callable[[Any], Any]  # puts a shard's content where replicas can get it, and says where
    update: Update  # gets the weights that a transfer brought
    _number: int = 0
    _shards: dict[tuple[bool, int], Shard] = field(default_factory=dict)

    def begin(self) -> int:
        """A new transfer's number."""
        self._number += 1
        self._shards.clear()
        return self._number

    def put(self, transfer: int, index: int, content: Any, digest: str, *, drafter: bool = False) -> None:
        """Take in a shard; again with the same index takes the place of the first. Raises UpdateRefused: it was damaged
        on its way, or another transfer has begun since."""
        self._check(transfer)
        data = memoryview(content)
        if digest_of(data) != digest:
            raise UpdateRefused(f"Shard {index} was damaged on its way; send it again.")
        self._shards[drafter, index] = Shard(self.keep(content), digest, data.nbytes)

    async def end(
        self,
        transfer: int,
        version: str,
        num_shards: int,
        num_drafter_shards: int = 0,
        mode: PauseMode = PauseMode.WAIT,
        timeout_s: float = 600.0,
    ) -> Outcome:
        """All is there, so many shards of the target and of the drafter: bring them to every replica. Raises
        UpdateRefused: a shard is missing, another transfer has begun since, or as the coordinator raises it."""
        self._check(transfer)
        wanted = [(False, index) for index in range(num_shards)]
        wanted += [(True, index) for index in range(num_drafter_shards)]
        if num_shards < 1 or sorted(self._shards) != wanted:
            raise UpdateRefused(f"{len(self._shards)} of {len(wanted)} shards came; send those that are missing.")
        shards = [self._shards[key] for key in wanted]
        self._shards.clear()
        target, drafter = tuple(shards[:num_shards]), tuple(shards[num_shards:])
        ref = WeightsRef(0, version, shards=target, drafter_shards=drafter)
        return await self.update(ref, mode, timeout_s)

    def _check(self, transfer: int) -> None:
        if transfer != self._number:
            raise UpdateRefused(f"Transfer {transfer} has ended; another one has begun.")


@contextlib.asynccontextmanager
async def fetched(ref: WeightsRef, info: ModelInfo, pull: Pull) -> AsyncIterator[tuple[str, str | None]]:
    """The folders of some weights, for as long as they are read. Shards are written beside the configuration that is
    served, into a folder that goes again. Raises UpdateRefused: a shard was damaged on its way, or brings a tensor that
    another has brought."""
    if ref.path is not None:
        yield ref.path, ref.drafter_path
        return
    with tempfile.TemporaryDirectory(prefix="truespec-weights-") as scratch:
        target = await lay_out(ref.shards, Path(info.folder), Path(scratch) / "model", pull)
        drafter = None
        if ref.drafter_shards:
            drafter = await lay_out(ref.drafter_shards, Path(info.drafter_folder), Path(scratch) / "drafter", pull)
        yield str(target), None if drafter is None else str(drafter)


async def lay_out(shards: Sequence[Shard], like: Path, folder: Path, pull: Pull) -> Path:
    """Write a checkpoint folder of shards, with the configuration of another. Raises UpdateRefused: as `fetched` raises
    it."""
    folder.mkdir()
    for name in END_TOKEN_FILES:
        if (like / name).is_file():
            shutil.copy(like / name, folder / name)
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        content = memoryview(await pull(shard.content))
        names = await asyncio.to_thread(_write_shard, content, shard.digest, folder / name)
        if twice := sorted(weight_map.keys() & names):
            raise UpdateRefused(
                f"shard {name} contains {twice[0]}, which is also in {weight_map[twice[0]]}; send each tensor once."
            )
        weight_map |= dict.fromkeys(names, name)
    index_of_all = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_of_all, encoding="utf-8")
    return folder


def _write_shard(content: memoryview, digest: str, file: Path) -> list[str]:
    """Check a shard and write it; the names of its tensors."""
    if digest_of(content) != digest:
        raise UpdateRefused(f"shard {file.name} was damaged on its way: its checksum is not {digest}")
    file.write_bytes(content)
    length = int.from_bytes(content[:8], "little")
    return [name for name in json.loads(bytes(content[8 : 8 + length])) if name != "__metadata__"]
