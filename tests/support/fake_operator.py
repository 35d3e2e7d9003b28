"""The view that an operator has of a service with one replica that only notes what it is asked for."""

from typing import Any

from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import Outcome, WeightsRef
from serve_app.errors import UpdateRefused
from serve_app.http.access.access import Caller, Scope


async def replicas(*_: object) -> list[dict[str, Any]]:
    """Who decides about speculation there, whatever was ordered."""
    return [{"replica": "r1", "mode": "auto"}]


async def exposition() -> tuple[bytes, str]:
    return b"truespec_x 1\n", "text/plain"


async def well() -> None:
    return None


async def status() -> dict[str, Any]:
    return {}


class FakeKeys:
    """Keys that open what a user may do, each with its own id; all begin with "key"."""

    def __init__(self, max_concurrent: int | None = None) -> None:
        self._max_concurrent = max_concurrent

    def find(self, key: str) -> Caller | None:
        return Caller(key, frozenset({Scope.USER}), self._max_concurrent) if key.startswith("key") else None


class FakeWeights:
    """Takes every order, or refuses all with `refuses`; not every replica gets there with `complete = False`."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.refuses = False
        self.complete = True

    async def statuses(self) -> list[dict[str, Any]]:
        paused = bool(self.asked) and self.asked[-1] != ("resume",)
        return [{"replica": "r1", "weight_version": "default", "fingerprint": "f", "paused": paused}]

    async def update(self, ref: WeightsRef, mode: PauseMode = PauseMode.WAIT, timeout_s: float = 600.0) -> Outcome:
        return await self._take("update", ref, mode, timeout_s)

    async def pause(self, mode: PauseMode, timeout_s: float = 600.0) -> Outcome:
        return await self._take("pause", mode, timeout_s)

    async def resume(self) -> Outcome:
        return await self._take("resume")

    async def stage(self, ref: WeightsRef | None) -> None:
        self.asked.append(("stage", ref))

    async def finish(self, version: str) -> Outcome:
        return await self._take("finish", version)

    async def reset_caches(self) -> Outcome:
        return await self._take("reset_caches")

    async def _take(self, *asked: Any) -> Outcome:
        self.asked.append(asked)
        if self.refuses:
            raise UpdateRefused("Nothing changed; the weights are still 'default': r1: no such folder.")
        return Outcome(self.complete, await self.statuses())
