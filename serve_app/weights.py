"""New weights for a service that runs: every replica of every pool gets them, or none does.

The desk, one for the app, says in its answer to each report which weights a replica is to load beside those it serves,
and which it is to serve. When all replicas have loaded the same, they are served from then on; before that, one failure
calls the update off. What is wanted is a state and not a message, so nothing depends on a message that was lost, and a
replica that starts later comes to the same weights. The keeper, one for each replica, brings it there.
"""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.backends.base import Backend, ModelInfo, PauseMode
from serve_app.errors import UpdateRefused
from serve_app.metrics import Metrics
from speculative.errors import EngineFault
from speculative.request import DEFAULT_VERSION

_logger = logging.getLogger("truespec.weights")

_SILENT_AFTER_S = 15.0  # a replica that is not heard of for so long is gone
_FIRST_REPORTS_S = 3.0  # by then every replica that lives has reported to a new desk
_LOOK_EVERY_S = 0.1
_CONFIGURATION = ("config.json", "generation_config.json")


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a checkpoint that came over the wire: a whole safetensors file, and its checksum."""

    content: Any  # where it lies; opaque here
    digest: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """Which weights: of a folder that every replica can read, or of shards."""

    number: int  # grows with each update; 0 = those of the configuration
    version: str
    path: str | None = None
    drafter_path: str | None = None
    shards: tuple[Shard, ...] = ()
    drafter_shards: tuple[Shard, ...] = ()


CONFIGURED = WeightsRef(0, DEFAULT_VERSION)


@dataclass(frozen=True, slots=True)
class Wanted:
    """The desk to a replica: what it is to come to."""

    serve: WeightsRef
    load: WeightsRef | None = None  # beside those it serves
    mode: PauseMode = PauseMode.WAIT  # what becomes of running requests when `serve` changes
    paused: PauseMode | None = None


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """A replica to the desk: where it stands."""

    serving: WeightsRef
    fingerprint: str  # of what it serves
    loaded: int | None = None  # number of what lies beside it
    loaded_fingerprint: str = ""
    failed: int | None = None  # number of what could not be loaded
    reason: str = ""  # why not
    paused: PauseMode | None = None  # how it stands still


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of an update or a pause."""

    complete: bool  # False: decided, and some replica still has requests to finish
    replicas: list[dict[str, Any]]


@dataclass(slots=True)
class _Member:
    status: WeightsStatus
    heard_at: float


@dataclass(slots=True)
class _Update:
    ref: WeightsRef
    mode: PauseMode
    refusal: str = ""  # set when it is called off


class WeightsDesk:
    """Decides for the whole app. Bound to one asyncio loop.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began_at = clock()
        self._serve = CONFIGURED
        self._mode = PauseMode.WAIT
        self._paused: PauseMode | None = None
        self._update: _Update | None = None
        self._last_number = 0
        self._members: dict[str, _Member] = {}

    def hear(self, name: str, status: WeightsStatus) -> Wanted:
        """Take in where a replica stands, and say what it is to come to."""
        self._members[name] = _Member(status, self._clock())
        update = self._update
        if status.serving.number > self._serve.number and (update is None or not self._decided(update)):
            self._serve = status.serving  # this desk is new, and the replica knows what the last one decided
            if update is not None:  # its number may be too low
                update.refusal = f"{name} says only now that they are what is served; ask again"
        self._decide()
        return self.wanted

    @property
    def wanted(self) -> Wanted:
        """What every replica is to come to."""
        load = None if self._update is None else self._update.ref
        return Wanted(self._serve, load, self._mode, self._paused)

    async def update(
        self,
        ref: WeightsRef,
        *,
        mode: PauseMode = PauseMode.WAIT,
        timeout_s: float = 600.0,
    ) -> Outcome:
        """Bring new weights to every replica; the number of `ref` is given here.

        Args:
            ref: which.
            mode: what becomes of the requests that run when a replica switches.
            timeout_s: for the loading, and then again for the switching.

        Raises:
            UpdateRefused: another update is under way, or some replica could not load them; nothing has changed.
        """
        await self._first_reports()
        if self._update is not None:
            raise UpdateRefused(f"The update to {self._update.ref.version!r} is under way; wait for its end.")
        if ref.version in (self._serve.version, ""):
            raise UpdateRefused(f"weight_version {ref.version!r} is what is served; give new weights a new name.")
        stands = (one.status for one in self._members.values())
        seen = (number for one in stands for number in (one.serving.number, one.loaded or 0, one.failed or 0))
        self._last_number = 1 + max(self._serve.number, self._last_number, *seen)
        numbered = dataclasses.replace(ref, number=self._last_number)
        update = self._update = _Update(numbered, mode)
        try:
            if not await self._until(lambda: self._decided(update), timeout_s):
                update.refusal = f"{self._behind(numbered)} did not load them within {timeout_s:g} s"
            if update.refusal:
                raise UpdateRefused(f"Nothing has changed, the weights are {self._serve.version!r}: {update.refusal}.")
        finally:
            self._update = None
        complete = await self._until(lambda: all(self._serves(one, numbered) for one in self._live()), timeout_s)
        return Outcome(complete, self.statuses())

    async def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> Outcome:
        """Have every replica begin nothing new; returns when all stand still so, or something else is wanted."""
        self._paused = mode

        def ended() -> bool:
            return self._paused is not mode or all(one.status.paused is mode for one in self._live())

        complete = await self._until(ended, timeout_s)
        return Outcome(complete and self._paused is mode, self.statuses())

    async def resume(self, timeout_s: float = 60.0) -> Outcome:
        """Have every replica go on."""
        self._paused = None
        complete = await self._until(lambda: not any(one.status.paused for one in self._live()), timeout_s)
        return Outcome(complete, self.statuses())

    def statuses(self) -> list[dict[str, Any]]:
        """Where every replica stands."""
        return [
            {
                "replica": name,
                "weight_version": one.status.serving.version,
                "fingerprint": one.status.fingerprint,
                "paused": one.status.paused is not None,
            }
            for name, one in sorted(self._members.items())
        ]

    def _decide(self) -> None:
        """Call the update off, or have its weights served: the one moment after which there is no way back."""
        self._members = {name: one for name, one in self._members.items() if self._heard(one)}
        update = self._update
        if update is None or self._decided(update):
            return
        number = update.ref.number
        failed = [f"{name}: {one.status.reason}" for name, one in self._members.items() if one.status.failed == number]
        prints = {one.status.loaded_fingerprint for one in self._members.values()}
        if failed:
            update.refusal = "; ".join(failed)
        elif self._members and all(one.status.loaded == number for one in self._members.values()):
            if len(prints) == 1:
                self._serve, self._mode = update.ref, update.mode
            else:
                update.refusal = f"the replicas read different weights there (fingerprints {', '.join(sorted(prints))})"

    def _decided(self, update: _Update) -> bool:
        return bool(update.refusal) or self._serve is update.ref

    async def _first_reports(self) -> None:
        """Wait until the replicas have said what the last desk decided."""
        while self._clock() < self._began_at + _FIRST_REPORTS_S:
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Whether it came to hold in time. What members say changes between two looks."""
        deadline = self._clock() + timeout_s
        while True:
            self._decide()
            if self._members and holds():
                return True
            if self._clock() >= deadline:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)

    def _behind(self, ref: WeightsRef) -> str:
        late = [name for name, one in sorted(self._members.items()) if one.status.loaded != ref.number]
        return ", ".join(late) or "no replica"

    def _live(self) -> list[_Member]:
        return [one for one in self._members.values() if self._heard(one)]

    def _heard(self, member: _Member) -> bool:
        return member.heard_at > self._clock() - _SILENT_AFTER_S

    @staticmethod
    def _serves(member: _Member, ref: WeightsRef) -> bool:
        return member.status.serving.number >= ref.number


Fetch = Callable[[WeightsRef], contextlib.AbstractAsyncContextManager[tuple[str, str | None]]]
"""Where weights lie while they are loaded: the target's folder and the drafter's, None = the configured one."""


class WeightsKeeper:
    """Brings one replica to what the desk wants.

    Args:
        backend: its engine.
        info: what it serves at first.
        fetch: makes a folder of what came over the wire.
        switched: told what is served, each time it changes.
        metrics: counts updates.
    """

    def __init__(
        self,
        backend: Backend,
        info: ModelInfo,
        fetch: Fetch,
        switched: Callable[[ModelInfo], None],
        metrics: Metrics,
    ) -> None:
        self._backend = backend
        self._fetch = fetch
        self._switched = switched
        self._metrics = metrics
        self.info = info  # what is served
        self._serving = CONFIGURED
        self._loaded: WeightsRef | None = None
        self._loaded_fingerprint = ""
        self._failed: tuple[int, str] | None = None
        self._paused: PauseMode | None = None
        self._wanted = Wanted(CONFIGURED)
        self._work: asyncio.Task[None] | None = None  # on the weights
        self._pause_work: asyncio.Task[None] | None = None  # apart: a pause may take as long as the longest request
        self._pausing = False  # for an operator, so that it may be called off
        self._stilling = asyncio.Lock()  # held by who pauses or unpauses the engine
        for result in ("ok", "failed"):
            metrics.count("truespec_weight_updates_total", 0, result=result)

    @property
    def status(self) -> WeightsStatus:
        """Where the replica stands."""
        number, reason = self._failed or (None, "")
        return WeightsStatus(
            self._serving,
            self.info.fingerprint,
            None if self._loaded is None else self._loaded.number,
            self._loaded_fingerprint,
            number,
            reason,
            self._paused,
        )

    @property
    def behind(self) -> bool:
        """Whether something is under way, so that the desk should hear of it soon."""
        wanted = self._wanted
        return wanted.load is not None or wanted.serve.number != self._serving.number or wanted.paused != self._paused

    def obey(self, wanted: Wanted) -> None:
        """Begin to come to what is wanted; returns at once."""
        self._wanted = wanted
        if self._pausing and wanted.paused is None and self._pause_work is not None:
            self._pause_work.cancel()
            self._pause_work = None
        self._work = self._under_way(self._work, self._converge)
        self._pause_work = self._under_way(self._pause_work, self._pause)

    async def settle(self) -> None:
        """Wait until the replica has come to what was wanted last."""
        tasks = [task for task in (self._work, self._pause_work) if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def check_health(self) -> None:
        """Raises:
        EngineFault: the others serve weights that this replica cannot load.
        """
        if self._failed is not None and self._failed[0] == self._wanted.serve.number != self._serving.number:
            raise EngineFault(f"The service's weights could not be loaded here: {self._failed[1]}")

    def _under_way(self, task: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """The task that does some work; a new one, where the last is done."""
        if task is not None and not task.done():
            return task
        return asyncio.get_running_loop().create_task(self._tried(work))

    async def _tried(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            _logger.exception("what the desk wants could not be brought about")

    async def _converge(self) -> None:
        self._drop_what_nobody_wants()
        await self._load()
        await self._switch()

    def _drop_what_nobody_wants(self) -> None:
        wanted = self._wanted
        numbers = {wanted.serve.number} | ({wanted.load.number} if wanted.load is not None else set())
        if self._loaded is not None and self._loaded.number not in numbers:
            self._backend.drop_weights()
            self._loaded, self._loaded_fingerprint = None, ""
            _logger.warning("the weights that were loaded last are dropped: they are not to be served")

    async def _load(self) -> None:
        target = self._wanted.load or self._wanted.serve
        known = (self._serving.number, self._loaded.number if self._loaded else None, (self._failed or (None,))[0])
        if target.number in known:
            return
        self._loaded, self._loaded_fingerprint = None, ""
        try:
            with self._timed("load"):
                async with self._fetch(target) as (folder, drafter):
                    self._loaded_fingerprint = await self._backend.load_weights(folder, drafter)
            self._loaded = target
            _logger.info("weights %r are loaded beside %r", target.version, self._serving.version)
        except Exception as error:  # what it was: tried again with every report, it would fail again
            self._give_up(target, error)

    async def _switch(self) -> None:
        wanted = self._wanted
        if self._loaded is None or self._loaded.number != wanted.serve.number:
            return
        async with self._stilling:
            with self._timed("switch"):
                await self._switch_while_still(wanted)
        self._metrics.count("truespec_weight_updates_total", result="ok")
        _logger.warning("weights %r are served now", wanted.serve.version)

    async def _switch_while_still(self, wanted: Wanted) -> None:
        if self._paused is None:
            await self._backend.pause(wanted.mode)
        try:
            self.info = await self._backend.switch_weights(wanted.serve.version)
            self._serving, self._loaded, self._loaded_fingerprint = wanted.serve, None, ""
            self._switched(self.info)
        except Exception as error:
            self._give_up(wanted.serve, error)
            raise
        finally:
            if self._paused is None:
                await self._backend.unpause()

    def _give_up(self, ref: WeightsRef, error: Exception) -> None:
        """Not to try these again: what a failed switch left behind is neither the old weights nor the new."""
        self._loaded, self._loaded_fingerprint = None, ""
        self._failed = (ref.number, str(error) or type(error).__name__)
        self._metrics.count("truespec_weight_updates_total", result="failed")
        _logger.error("weights %r could not be taken: %s", ref.version, error)

    async def _pause(self) -> None:
        if self._wanted.paused is self._paused:
            return
        async with self._stilling:
            wanted = self._wanted.paused
            if wanted is None:
                await self._backend.unpause()
            else:
                self._paused = None  # not as wanted before, and not yet as wanted now
                self._pausing = True
                try:
                    await self._backend.pause(wanted)
                finally:
                    self._pausing = False
            self._paused = wanted

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self._metrics.count("truespec_weight_update_seconds_total", time.monotonic() - began, phase=phase)


Pull = Callable[[Any], Awaitable[Any]]
"""Gets a shard's content, a buffer of bytes, from where it lies."""


def digest_of(content: bytes | memoryview) -> str:
    """The checksum of a shard: BLAKE2b-128, 32 hex digits."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Transfers:
    """Weights that come over the wire, shard by shard. One transfer at a time: a new one gives up the last.

    Args:
        keep: puts a shard's content where replicas can get it, and says where.
    """

    def __init__(self, keep: Callable[[Any], Any]) -> None:
        self._keep = keep
        self._number = 0
        self._shards: dict[tuple[bool, int], Shard] = {}

    def begin(self) -> int:
        """A new transfer's number."""
        self._number += 1
        self._shards.clear()
        return self._number

    def put(self, transfer: int, index: int, content: Any, digest: str, *, drafter: bool = False) -> None:
        """Take in a shard; again with the same index takes the place of the first.

        Raises:
            UpdateRefused: it was damaged on its way, or another transfer has begun since.
        """
        self._check(transfer)
        data = memoryview(content)
        if digest_of(data) != digest:
            raise UpdateRefused(f"Shard {index} was damaged on its way; send it again.")
        self._shards[drafter, index] = Shard(self._keep(content), digest, data.nbytes)

    def end(self, transfer: int, version: str, num_shards: int, num_drafter_shards: int = 0) -> WeightsRef:
        """All is there: the weights it makes.

        Raises:
            UpdateRefused: a shard is missing, or another transfer has begun since.
        """
        self._check(transfer)
        wanted = [(False, index) for index in range(num_shards)]
        wanted += [(True, index) for index in range(num_drafter_shards)]
        if num_shards < 1 or sorted(self._shards) != wanted:
            raise UpdateRefused(f"{len(self._shards)} of {len(wanted)} shards came; send those that are missing.")
        shards = [self._shards[key] for key in wanted]
        self._shards.clear()
        return WeightsRef(0, version, shards=tuple(shards[:num_shards]), drafter_shards=tuple(shards[num_shards:]))

    def _check(self, transfer: int) -> None:
        if transfer != self._number:
            raise UpdateRefused(f"Transfer {transfer} is over; another one has begun since.")


@contextlib.asynccontextmanager
async def fetched(ref: WeightsRef, info: ModelInfo, pull: Pull) -> AsyncIterator[tuple[str, str | None]]:
    """The folders of some weights, for as long as they are read. Shards are written beside the configuration that is
    served, into a folder that goes again.

    Raises:
        UpdateRefused: a shard was damaged on its way.
    """
    if ref.path is not None:
        yield ref.path, ref.drafter_path
        return
    with tempfile.TemporaryDirectory(prefix="truespec-weights-") as scratch:
        target = await _lay_out(ref.shards, Path(info.folder), Path(scratch) / "model", pull)
        drafter = None
        if ref.drafter_shards:
            drafter = await _lay_out(ref.drafter_shards, Path(info.drafter_folder), Path(scratch) / "drafter", pull)
        yield str(target), None if drafter is None else str(drafter)


async def _lay_out(shards: Sequence[Shard], like: Path, folder: Path, pull: Pull) -> Path:
    """A checkpoint folder of shards, with the configuration of another."""
    folder.mkdir()
    for name in _CONFIGURATION:
        if (like / name).is_file():
            shutil.copy(like / name, folder / name)
    weight_map: dict[str, str] = {}
    for index, shard in enumerate(shards):
        name = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        content = memoryview(await pull(shard.content))
        names = await asyncio.to_thread(_write_shard, content, shard.digest, folder / name)
        weight_map |= dict.fromkeys(names, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}), encoding="utf-8")
    return folder


def _write_shard(content: memoryview, digest: str, file: Path) -> list[str]:
    """Check a shard and write it; the names of its tensors."""
    if digest_of(content) != digest:
        raise UpdateRefused(f"shard {file.name} was damaged on its way: its checksum is not {digest}")
    file.write_bytes(content)
    length = int.from_bytes(content[:8], "little")
    return [name for name in json.loads(bytes(content[8 : 8 + length])) if name != "__metadata__"]
