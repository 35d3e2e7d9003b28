"""Weights of a service that has one replica and does nothing but note what it is asked for."""

from typing import Any

from serve_app.errors import UpdateRefused
from serve_app.http.admin import WeightsAdmin
from serve_app.weights.desired_state import Outcome


class FakeWeights:
    """Takes every order, or refuses all with `refuses`; not every replica gets there with `complete = False`."""

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.refuses = False
        self.complete = True

    @property
    def admin(self) -> WeightsAdmin:
        """What the routes ask."""

        async def resume() -> Outcome:
            return await self._take("resume")

        async def reset_caches() -> Outcome:
            return await self._take("reset_caches")

        async def stage(order: Any) -> None:
            self.asked.append(("stage", order))

        async def finish(version: str) -> Outcome:
            return await self._take(("finish", version))

        return WeightsAdmin(self.statuses, self._take, self._take, resume, stage, finish, reset_caches)

    async def statuses(self) -> list[dict[str, Any]]:
        paused = bool(self.asked) and self.asked[-1] != "resume"
        return [{"replica": "r1", "weight_version": "default", "fingerprint": "f", "paused": paused}]

    async def _take(self, asked: Any) -> Outcome:
        self.asked.append(asked)
        if self.refuses:
            raise UpdateRefused("Nothing has changed, the weights are 'default': r1: no such folder.")
        return Outcome(self.complete, await self.statuses())
