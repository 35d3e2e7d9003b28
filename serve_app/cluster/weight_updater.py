"""Brings one replica to the wanted weights."""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from serve_app.backends.base import Backend, ModelInfo, PauseMode, ServedWeights
from serve_app.cluster.desired_state import CONFIGURED, DesiredState, WeightsRef, WeightsStatus
from serve_app.telemetry.metrics import Metrics
from speculative.errors import EngineFault

_logger = logging.getLogger("truespec.weights")


Fetch = Callable[[WeightsRef], contextlib.AbstractAsyncContextManager[tuple[str, str | None]]]
"""Folders of weights while they are loaded: the target's, and the drafter's (None = the configured one)."""


@dataclass(slots=True)
class WeightUpdater:
    """Brings one replica to the state that the coordinator asks for."""

    backend: Backend
    info: ModelInfo  # what is served
    fetch: Fetch
    switched: Callable[[ModelInfo], None]  # called with what is served, each time it changes
    metrics: Metrics  # counts updates
    _serving: WeightsRef = CONFIGURED
    _loaded: WeightsRef | None = None
    _loaded_fingerprint: str = ""
    _failed: tuple[int, str] | None = None
    _paused: PauseMode | None = None
    _cache_resets: int = 0
    _wanted: DesiredState = field(default_factory=lambda: DesiredState(CONFIGURED))
    _work: asyncio.Task[None] | None = None  # on the weights
    _pause_work: asyncio.Task[None] | None = None  # separate: a pause may take as long as the longest request
    _pausing: bool = False  # for an operator, so that it can be cancelled
    _stilling: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while the engine is being paused or unpaused

    def __post_init__(self) -> None:
        self.metrics.begin("truespec_weight_updates_total")

    @property
    def status(self) -> WeightsStatus:
        """The replica's status."""
        number, reason = self._failed or (None, "")
        return WeightsStatus(
            self._serving,
            self.info.fingerprint,
            None if self._loaded is None else self._loaded.number,
            self._loaded_fingerprint,
            number,
            reason,
            self._paused,
            self._cache_resets,
        )

    @property
    def served(self) -> ServedWeights:
        """Return what is served, and where it lies."""
        info, ref = self.info, self._serving
        source = info.folder if ref == CONFIGURED else ref.path
        return ServedWeights(source, info.folder, info.computing.weights, info.fingerprint, ref.version, ref.shards)

    @property
    def behind(self) -> bool:
        """Return whether work is under way, so that the coordinator should be updated soon."""
        wanted = self._wanted
        return wanted.load is not None or wanted.serve.number != self._serving.number or wanted.paused != self._paused

    def apply(self, wanted: DesiredState) -> None:
        """Start converging to the desired state; returns at once."""
        self._wanted = wanted
        if wanted.cache_resets > self._cache_resets:
            self.backend.reset_prefix_cache()
            self._cache_resets = wanted.cache_resets
        if self._pausing and wanted.paused is None and self._pause_work is not None:
            self._pause_work.cancel()
            self._pause_work = None
        self._work = self._under_way(self._work, self._load_and_switch)
        self._pause_work = self._under_way(self._pause_work, self._pause)

    async def wait_converged(self) -> None:
        """Wait until the replica has reached the last desired state."""
        tasks = [task for task in (self._work, self._pause_work) if task is not None]
        if tasks:
            await asyncio.wait(tasks)

    def check_health(self) -> None:
        """Raises:
        EngineFault: the other replicas serve weights that this one cannot load.
        """
        if self._failed is not None and self._failed[0] == self._wanted.serve.number != self._serving.number:
            raise EngineFault(f"The service's weights could not be loaded here: {self._failed[1]}")

    def _under_way(self, task: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """The task that does this work; a new one if the last is done."""
        if task is not None and not task.done():
            return task
        return asyncio.get_running_loop().create_task(self._tried(work))

    async def _tried(self, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception:
            _logger.exception("the wanted weights could not be loaded")

    async def _load_and_switch(self) -> None:
        wanted = self._wanted
        numbers = {wanted.serve.number} | ({wanted.load.number} if wanted.load is not None else set())
        if self._loaded is not None and self._loaded.number not in numbers:
            self.backend.drop_weights()
            self._loaded, self._loaded_fingerprint = None, ""
            _logger.warning("dropping the weights loaded last: they are no longer wanted")
        await self._load()
        await self._switch()

    async def _load(self) -> None:
        target = self._wanted.load or self._wanted.serve
        known = (self._serving.number, self._loaded.number if self._loaded else None, (self._failed or (None,))[0])
        if target.number in known:
            return
        self._loaded, self._loaded_fingerprint = None, ""
        try:
            async with self.fetch(target) as (folder, drafter):
                self._loaded_fingerprint = await self.backend.load_weights(folder, drafter)
            self._loaded = target
            _logger.info("weights %r are loaded beside %r", target.version, self._serving.version)
        except Exception as error:  # whatever it was: retried with every report, it would fail again
            self._give_up(target, error)

    async def _switch(self) -> None:
        wanted = self._wanted
        if self._loaded is None or self._loaded.number != wanted.serve.number:
            return
        async with self._stilling:
            if self._paused is None:
                await self.backend.pause(wanted.mode)
            try:
                self.info = await self.backend.switch_weights(wanted.serve.version)
                self._serving, self._loaded, self._loaded_fingerprint = wanted.serve, None, ""
                self.switched(self.info)
            except Exception as error:
                self._give_up(wanted.serve, error)
                raise
            finally:
                if self._paused is None:
                    await self.backend.unpause()
        self.metrics.count("truespec_weight_updates_total", result="ok")
        _logger.warning("now serving weights %r", wanted.serve.version)

    def _give_up(self, ref: WeightsRef, error: Exception) -> None:
        """Do not try these again: a failed switch leaves neither the old weights nor the new."""
        self._loaded, self._loaded_fingerprint = None, ""
        self._failed = (ref.number, str(error) or type(error).__name__)
        self.metrics.count("truespec_weight_updates_total", result="failed")
        _logger.error("weights %r could not be loaded: %s", ref.version, error)

    async def _pause(self) -> None:
        if self._wanted.paused is self._paused:
            return
        async with self._stilling:
            wanted = self._wanted.paused
            if wanted is None:
                await self.backend.unpause()
            else:
                self._paused = None  # not as wanted before, and not yet as wanted now
                self._pausing = True
                try:
                    await self.backend.pause(wanted)
                finally:
                    self._pausing = False
            self._paused = wanted
