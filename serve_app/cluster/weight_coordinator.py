"""New weights for a service that runs: every replica of every pool gets them, or none does.

The coordinator, one for the app, says in its answer to each report which weights a replica is to load beside those it
serves, and which it is to serve. When all replicas have loaded the same, they are served from then on; before that, one
failure calls the update off. What is wanted is a state and not a message, so nothing depends on a message that was
lost, and a replica that starts later comes to the same weights. The updater, one for each replica, brings it there.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import CONFIGURED, DesiredState, Outcome, WeightsRef, WeightsStatus
from serve_app.errors import UpdateRefused

_logger = logging.getLogger("truespec.weights")
_SILENT_AFTER_S = 15.0  # a replica that is not heard of for so long is gone
_FIRST_REPORTS_S = 3.0  # by then every replica that lives has reported to a new coordinator
_LOOK_EVERY_S = 0.1


@dataclass(slots=True)
class _Member:
    status: WeightsStatus
    reported_at: float


@dataclass(slots=True)
class _Update:
    ref: WeightsRef
    mode: PauseMode
    refusal: str = ""  # set when it is called off


@dataclass(eq=False)
class WeightCoordinator:
    """Decides for the whole app. Bound to one asyncio loop."""

    clock: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        self._began_at = self.clock()
        self._serve = CONFIGURED
        self._mode = PauseMode.WAIT
        self._paused: PauseMode | None = None
        self._pause_decided = False  # whether this coordinator was asked for a pause or its end; else the last one was
        self._update: _Update | None = None
        self._last_number = 0
        self._staged: WeightsRef | None = None
        self._cache_resets = 0
        self._members: dict[str, _Member] = {}

    def on_heartbeat(self, name: str, status: WeightsStatus) -> DesiredState:
        """Take in where a replica stands, and say what it is to come to."""
        self._members[name] = _Member(status, self.clock())
        update = self._update
        if status.serving.number > self._serve.number and (update is None or not self._decided(update)):
            self._serve = status.serving  # this coordinator is new; the replica knows what the last one decided
            if update is not None:  # its number may be too low
                update.refusal = f"{name} says only now that they are what is served; ask again"
        self._cache_resets = max(self._cache_resets, status.cache_resets)  # this coordinator may be new
        if not self._pause_decided and status.paused is not None:
            self._paused = status.paused
        self._decide()
        return self.wanted

    @property
    def wanted(self) -> DesiredState:
        """Return what every replica is to come to."""
        load = None if self._update is None else self._update.ref
        return DesiredState(self._serve, load, self._mode, self._paused, self._cache_resets)

    async def update(self, ref: WeightsRef, mode: PauseMode = PauseMode.WAIT, timeout_s: float = 600.0) -> Outcome:
        """Bring new weights to every replica; the number of `ref` is given here.

        Args:
            ref: which; without a version they are called `update-` and their number.
            mode: what becomes of the requests that run when a replica switches.
            timeout_s: for the loading, and then again for the switching.

        Raises:
            UpdateRefused: another update is under way, or some replica could not load them, and nothing has changed; or
                one could not switch to them, and serves nothing.
        """
        await self._first_reports()
        if self._update is not None:
            raise UpdateRefused(f"The update to {self._update.ref.version!r} is in progress; wait until it ends.")
        if ref.version == self._serve.version:
            raise UpdateRefused(f"weight_version {ref.version!r} is already served; give new weights a new name.")
        stands = (one.status for one in self._members.values())
        seen = (number for one in stands for number in (one.serving.number, one.loaded or 0, one.failed or 0))
        self._last_number = 1 + max(self._serve.number, self._last_number, *seen)
        version = ref.version or f"update-{self._last_number}"
        numbered = dataclasses.replace(ref, number=self._last_number, version=version)
        update = self._update = _Update(numbered, mode)
        try:
            if not await self._until(lambda: self._decided(update), timeout_s):
                late = [name for name, one in sorted(self._members.items()) if one.status.loaded != numbered.number]
                update.refusal = f"{', '.join(late) or 'no replica'} did not load them within {timeout_s:g} s"
            if update.refusal:
                why = update.refusal.rstrip(".")
                raise UpdateRefused(f"Nothing changed; the weights are still {self._serve.version!r}: {why}.")
        finally:
            self._update = None
        complete = await self._until(
            lambda: (
                all(one.status.serving.number >= numbered.number for one in self._live())
                or bool(self._failed(numbered))
            ),
            timeout_s,
        )
        if failed := self._failed(numbered):
            raise UpdateRefused(
                f"The weights {version!r} are served from now on, and not everywhere: {failed.rstrip('.')}. Whoever "
                "failed serves nothing, and is replaced; send weights again."
            )
        return Outcome(complete, self.statuses())

    def stage(self, ref: WeightsRef | None) -> None:
        """Keep what the next `finish` is to bring to every replica; None = nothing."""
        self._staged = ref

    async def finish(self, version: str, timeout_s: float = 600.0) -> Outcome:
        """Bring the staged weights to every replica, by this version if it is not empty. Raises UpdateRefused: nothing
        is staged, or as `update` does."""
        if self._staged is None:
            raise UpdateRefused("No weights were named; POST /update_weights before /finish_weight_update.")
        ref = self._staged
        outcome = await self.update(dataclasses.replace(ref, version=version or ref.version), timeout_s=timeout_s)
        if self._staged is ref:  # after a refusal it may be tried again
            self._staged = None
        return outcome

    async def reset_caches(self, timeout_s: float = 60.0) -> Outcome:
        """Empty the prefix cache of every replica."""
        await self._first_reports()
        self._cache_resets += 1
        wanted = self._cache_resets
        complete = await self._until(lambda: all(one.status.cache_resets >= wanted for one in self._live()), timeout_s)
        return Outcome(complete, self.statuses())

    async def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> Outcome:
        """Have every replica begin nothing new; returns when all stand still so, or something else is wanted."""
        self._paused, self._pause_decided = mode, True

        def ended() -> bool:
            return self._paused is not mode or all(one.status.paused is mode for one in self._live())

        complete = await self._until(ended, timeout_s)
        return Outcome(complete and self._paused is mode, self.statuses())

    async def resume(self, timeout_s: float = 60.0) -> Outcome:
        """Have every replica go on."""
        self._paused, self._pause_decided = None, True
        complete = await self._until(lambda: not any(one.status.paused for one in self._live()), timeout_s)
        return Outcome(complete, self.statuses())

    def statuses(self) -> list[dict[str, Any]]:
        """Return where every replica stands."""
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
        prints = {one.status.loaded_fingerprint for one in self._members.values()}
        if failed := self._failed(update.ref):
            update.refusal = failed
        elif self._members and all(one.status.loaded == number for one in self._members.values()):
            if len(prints) == 1:
                self._serve, self._mode = update.ref, update.mode
            else:
                update.refusal = f"the replicas read different weights there (fingerprints {', '.join(sorted(prints))})"

    def _failed(self, ref: WeightsRef) -> str:
        """Return which replicas could not take these weights, and why; "" = none."""
        members = self._members.items()
        return "; ".join(f"{name}: {one.status.reason}" for name, one in members if one.status.failed == ref.number)

    def _decided(self, update: _Update) -> bool:
        return bool(update.refusal) or self._serve is update.ref

    async def _first_reports(self) -> None:
        """Wait until the replicas have reported what the last coordinator decided."""
        while self.clock() < self._began_at + _FIRST_REPORTS_S:
            await asyncio.sleep(_LOOK_EVERY_S)

    async def _until(self, holds: Callable[[], bool], timeout_s: float) -> bool:
        """Return whether it came to hold in time. What members say changes between two looks."""
        deadline = self.clock() + timeout_s
        while True:
            self._decide()
            if self._members and holds():
                return True
            if self.clock() >= deadline:
                return False
            await asyncio.sleep(_LOOK_EVERY_S)

    def _live(self) -> list[_Member]:
        return [one for one in self._members.values() if self._heard(one)]

    def _heard(self, member: _Member) -> bool:
        return member.reported_at > self.clock() - _SILENT_AFTER_S
