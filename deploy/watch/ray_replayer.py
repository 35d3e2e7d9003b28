"""Several engines on Ray that compute watched answers again."""

import asyncio
import logging
import time
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError

from deploy.run.cluster import connected, own_connection
from deploy.run.replayers import ReplayerOptions, make_replayer
from serve_app.backends.base import ModelInfo, Replayed
from serve_app.deployments.gpus import ONLY_GIVEN_GPUS, given_device
from serve_app.deployments.remote_errors import answered
from speculative.request import Request

_logger = logging.getLogger("truespec.referee")

_IDLE_S = 60.0


class RayReplayer:
    """Engines on a Ray cluster, between one and so many, as the backlog demands.

    An engine is added when all have as much as they can do, and ends when it has had nothing to do for a minute.
    """

    def __init__(self, options: ReplayerOptions) -> None:
        self._options = options
        self.at_once = options.at_once * options.max_replicas
        self._actors: list[_Actor] = []
        self._starting: set[asyncio.Task[None]] = set()
        self._stack = ExitStack()

    async def start(self) -> ModelInfo:
        """Join or start the cluster, and load the first engine."""
        if self._options.address is None:
            self._stack.enter_context(own_connection())
            ray.init("local", log_to_driver=False, logging_level="ERROR")
        else:
            self._stack.enter_context(connected(self._options.address))
        first = self._new_actor()
        info: ModelInfo = await first.handle.info.remote()
        self._actors.append(first)
        return info

    async def replay(self, request: Request) -> Replayed:
        """Compute a request on the engine that has the least to do."""
        self._resize()
        actor = min(self._actors, key=lambda one: one.running)
        actor.running += 1
        try:
            return await answered(actor.handle.replay.remote(request))
        except RayActorError:
            self._actors = [one for one in self._actors if one is not actor] or [self._new_actor()]
            raise
        finally:
            actor.running -= 1
            actor.used_at = time.monotonic()

    async def stop(self) -> None:
        """End the engines, and the cluster if it was started here."""
        for task in self._starting:
            task.cancel()
        for actor in self._actors:
            ray.kill(actor.handle)
        self._stack.close()

    def _resize(self) -> None:
        now = time.monotonic()
        idle = [one for one in self._actors if not one.running and now - one.used_at > _IDLE_S]
        for actor in idle[: len(self._actors) - 1]:
            self._actors.remove(actor)
            ray.kill(actor.handle)
        busy = all(one.running >= self._options.at_once for one in self._actors)
        if busy and len(self._actors) + len(self._starting) < self._options.max_replicas:
            task = asyncio.create_task(self._add())
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _add(self) -> None:
        actor = self._new_actor()
        try:
            await actor.handle.info.remote()
        except RayError as error:
            _logger.warning("an engine could not be started: %s", error)
            return
        self._actors.append(actor)

    def _new_actor(self) -> "_Actor":
        actor = ray.remote(_RemoteEngine).options(
            num_cpus=self._options.threads or 1,
            num_gpus=self._options.gpus,
            runtime_env={"env_vars": ONLY_GIVEN_GPUS},
        )
        own = replace(self._options, threads=self._options.threads or 1, max_replicas=0)
        return _Actor(actor.remote(own), used_at=time.monotonic())


@dataclass(slots=True, eq=False)
class _Actor:
    """One engine on Ray.

    running: requests under way.
    used_at: when it had the last one, in seconds.
    """

    handle: Any
    running: int = 0
    used_at: float = 0.0


class _RemoteEngine:
    """The actor."""

    def __init__(self, options: ReplayerOptions) -> None:
        device = given_device() if options.device == "auto" else options.device
        self._replayer = make_replayer(replace(options, device=device))
        self._loading: asyncio.Task[ModelInfo] | None = None

    async def info(self) -> ModelInfo:
        """The model, once it is loaded."""
        if self._loading is None:
            self._loading = asyncio.create_task(self._replayer.start())
        return await self._loading

    async def replay(self, request: Request) -> Replayed:
        """Compute a request."""
        await self.info()
        return await self._replayer.replay(request)
