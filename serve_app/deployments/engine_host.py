"""An engine in a replica: its backend, the breaker over it, its weights, and the records of what it serves."""

import asyncio
import contextlib
import dataclasses
import gc
import logging
import os
import socket
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import accumulate
from operator import mul
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from serve_app.backends.base import Backend, ModelInfo, Replayed, ReplayFailed, ServedWeights
from serve_app.backends.rehearsed_fault import load_rehearsing
from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.cluster.autoscaling import PrefillBacklog
from serve_app.cluster.desired_state import WeightsRef
from serve_app.cluster.replica_router import MOST_REPORTED, reported_blocks
from serve_app.cluster.weight_transfer import fetched
from serve_app.cluster.weight_updater import WeightUpdater
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.deployments.gpus import given_device
from serve_app.deployments.rank_nodes import RankNodes
from serve_app.deployments.runtime import REPORT_EVERY_S, ReplicaRuntime, Reporter, keeping_start, naming_node
from serve_app.guard.breaker import Breaker
from serve_app.guard.breaker_control import BreakerController
from serve_app.guard.canary import Canary
from serve_app.guard.heartbeat import Placed, Report
from serve_app.guard.rehearsal import Rehearsing
from serve_app.referee.judge.verdicts import Finished
from serve_app.referee.records.records import Records
from serve_app.streams import spans
from serve_app.streams.pooled import PooledTokenSource
from serve_app.streams.resuming import own_name
from serve_app.telemetry.tracing import Carried, adopt
from serve_app.versions import version_of
from speculative.config import EngineConfig
from speculative.errors import EngineFault
from speculative.request import Request

_logger = logging.getLogger("truespec.serve")
_HURRIED_REPORT_S = 0.1  # while weights are on their way
_JOIN_TIMEOUT_S = 60.0
_FIRST_REPORT_S = 5.0
_CANARY_DRAFTS = 32  # draft tokens without which a canary has shown nothing
_MOST_UNREPORTED = 10_000  # finished requests that are kept while the controller does not answer

MakeSource = Callable[["EngineHost"], PooledTokenSource]
"""Maker of a replica's token source, called once its engine is loaded."""


def make_backend(config: AppConfig, pool: PoolName) -> Backend:
    """The engine of a pool's replica, in which this is called, not yet loaded."""
    source, name = config.model.source, config.model.served_name
    if config.engine.kind == "torch":
        load = load_rehearsing if config.guard.rehearsal else load_engine
        return TorchBackend(source, name, _with_device(config.engine_config(pool)), load, config.pace())
    replayer = None
    if config.may_replay_vllm(pool):
        replayer = TorchBackend(source, name, _with_device(config.replay_config(pool)))
    return VllmBackend(source, name, config.vllm_settings(pool), replayer, only_known=config.vllm.replays is None)


def _with_device(config: EngineConfig) -> EngineConfig:
    return dataclasses.replace(config, device=given_device()) if config.device == "auto" else config


@dataclasses.dataclass
class EngineHost:
    """Loads an engine, watches over it, and reports to the controller."""

    runtime: ReplicaRuntime
    pool: PoolName
    backend: Backend  # not yet loaded
    weights_switched: Callable[[ModelInfo], None] = lambda info: None  # called with what is served, when it changes

    def __post_init__(self) -> None:
        self.reporter = Reporter(self.runtime, self._send_report)
        self.updater: WeightUpdater | None = None
        self.backlog = PrefillBacklog()
        self.finished: deque[Finished] = deque(maxlen=_MOST_UNREPORTED)
        self._breaker_controller: BreakerController | None = None
        self._rank_nodes: RankNodes | None = None  # where Ray places ranks
        self._referee: ActorHandle | None = None

    async def start(self, make_source: MakeSource) -> ModelInfo:
        """Load the engine, and report to the controller from then on; what is served. Raises ConfigError: this node
        lacks something; the message names both."""
        runtime, config = self.runtime, self.runtime.config
        if config.ranks.by_ray:
            self._rank_nodes = RankNodes()
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address  # else vLLM's process starts a cluster
        with naming_node(), keeping_start(runtime.app_name, runtime.name):
            info = await self.backend.start()
        self._build = {
            "version": version_of("truespec"),
            "fingerprint": info.fingerprint,
            "drafter": config.drafter.kind,
        }
        node_id = ray.get_runtime_context().get_node_id()
        self._placed = Placed(self._build["version"], socket.gethostname(), node_id, runtime.started_at)
        self._computing, self._held_out_acceptance = info.computing, info.held_out_acceptance
        if info.computing.kernels_off:
            slow = "%s computes without its kernels, which is slow: %s"
            _logger.warning(slow, runtime.name, info.computing.kernels_off)
        info = await self._join(info)
        most_drafts = config.engine_config(self.pool).drafter.max_drafts
        self.records = Records(
            runtime.name, info.max_model_len, most_drafts, info.eos_token_ids, info.computing.numerics
        )
        self.source = make_source(self)
        comparable = config.engine.logprobs_mode == "raw_logprobs"
        drafts = self.pool != "prefill" and config.drafter.kind != "none"
        trial = config.breaker.canary_requests, _CANARY_DRAFTS if drafts else 0
        self.canary = Canary(self.source, self.records, runtime.check if comparable else None, *trial)
        self._breaker_controller = BreakerController(
            (runtime.name, self.pool),
            self.backend,
            Breaker(config.breaker, time.time),
            runtime.metrics,
            self.canary.try_out,
        )
        with contextlib.suppress(Exception):  # the next report may get through
            async with asyncio.timeout(_FIRST_REPORT_S):  # what is wrong from the start is known when the service is
                await self.reporter.report()
        runtime.spawn(self.reporter.report_forever())
        gc.collect()
        gc.freeze()  # a collection that walked all that was loaded would halt every stream for half a second
        return info

    def remember(
        self, request: Request, began_at: float, prefilled_by: str, num_tokens: int = 0, *, failed: bool = False
    ) -> None:
        """Keep what is to be known here of a request that came to its end, and began at that time (unix seconds)."""
        if not failed:  # its own parameters may be why: tried again, it would fail again
            self.canary.remember(request)
        self.finished.append(Finished(own_name(request.request_id), began_at, time.time(), prefilled_by, num_tokens))

    async def replay(self, request: Request, reported: Carried) -> Replayed:
        """Compute a teacher-forced request, for the referee. Raises ReplayFailed: it was refused, or the engine failed
        on it."""
        adopt(reported)
        name = self.runtime.name
        try:
            return dataclasses.replace(await spans.replay(self.runtime.tracing, self.backend, request), replica=name)
        except Exception as error:
            raise ReplayFailed(name, error) from error

    def independent_referee(self) -> tuple[ActorHandle, ServedWeights]:
        """The app's one referee that is not our engine, started on this node if there is none; and what it must load.

        It has a process of its own, since it must not delay a step of the engine. Raises EngineFault: the engine is not
        loaded yet."""
        from serve_app.referee.book.transformers_model import TransformersReferee  # only where it is asked for

        if self.updater is None:
            raise EngineFault("The replica is not started.")
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        actor = ray.remote(TransformersReferee).options(
            num_cpus=0,
            scheduling_strategy=here,  # where the weights can be read
            name=f"{self.runtime.app_name}-independent-referee",
            get_if_exists=True,
        )
        referee = actor.remote(ray.get, background=True)
        if referee != self._referee:  # it ends with the handle that began it; one that was found by name keeps nothing
            self._referee = referee
        return self._referee, self.updater.served

    def load(self) -> dict[str, float]:
        """This replica's load, by the names of `AutoscalingSection.targets`."""
        usage = self.backend.usage()
        return {
            "backlog_s": self.backlog.seconds,
            "kv_usage": usage.kv_usage,
            "running_share": (usage.num_running + usage.num_waiting) / self.runtime.config.engine.max_num_seqs,
        }

    def routing_stats(self) -> dict[str, Any]:
        """Return what the routers of `serve_app.cluster.replica_router` choose by."""
        blocks = reported_blocks(self.backend.cached_blocks(MOST_REPORTED))
        return self.load() | {"blocks": blocks, "backlog_tokens": self.backlog.num_tokens}

    @contextlib.contextmanager
    def timed_handoff(self, phase: str) -> Iterator[None]:
        """Count the seconds of a phase of a handoff."""
        began = time.monotonic()
        yield
        self.count_handoff(phase, time.monotonic() - began)

    def count_handoff(self, phase: str, seconds: float) -> None:
        """Count a phase of a handoff that was timed elsewhere."""
        self.runtime.metrics.count("truespec_handoff_seconds_total", seconds, phase=phase)

    def check_health(self) -> None:
        """Raise if the replica is to be replaced."""
        self.backend.check_health()
        if self._rank_nodes is not None:
            self._rank_nodes.check_health()
        if self.updater is not None:
            self.updater.check_health()
        if self._breaker_controller is not None:
            self._breaker_controller.check_health()

    @property
    def breaker_controller(self) -> BreakerController:
        """Return what decides about speculation here. Raises EngineFault: the engine is not loaded yet."""
        if self._breaker_controller is None:
            raise EngineFault("The replica is not started.")
        return self._breaker_controller

    async def _send_report(self) -> None:
        """Send what was counted since the last time, and do what the controller's answer asks for."""
        breaker_controller, runtime = self.breaker_controller, self.runtime
        stats = self.backend.take_stats()
        runtime.metrics.record_steps(stats, self.backend.usage())
        self.backlog.observe(stats.num_prompt_tokens + stats.prefix_cache_hits, stats.draft_s + stats.verify_s)
        runtime.metrics.gauge("truespec_build_info", 1, **self._build)
        for sampling, rates in zip(("sampled", "greedy"), self._held_out_acceptance, strict=True):
            for position, rate in enumerate(accumulate(rates, mul)):  # of drafts, all before which are accepted
                runtime.metrics.gauge(
                    "truespec_held_out_acceptance_ratio", rate, sampling=sampling, position=str(position)
                )
        computing = self._computing
        if computing.kernels:
            runtime.metrics.gauge("truespec_kernels_active", not computing.kernels_off, kernels=computing.kernels)
        checks = self.backend.self_checks()
        breaker_controller.inspect(stats, checks)
        breaker_controller.act()
        batch, trips, finished = runtime.buffer.drain(), breaker_controller.take_trips(), tuple(self.finished)
        self.finished.clear()
        try:
            updater = self.updater
            weights = updater.status if updater else None
            report = Report(breaker_controller.status, batch, finished, trips, checks, weights, computing, self._placed)
            orders = await runtime.controller.report(report)
        except (RayError, RayServeException) as error:
            runtime.buffer.put_back(batch)
            breaker_controller.put_back(trips)
            self.finished.extendleft(reversed(finished))
            _logger.debug("the report failed; its contents go with the next one: %s", error)
            return
        breaker_controller.apply(orders)
        breaker_controller.act()
        if orders.rehearse:
            control = breaker_controller
            self.runtime.spawn(Rehearsing(self.canary, control.note_rehearsal, control.rehearse).run())
        if self.updater is not None and orders.weights is not None:
            self.updater.apply(orders.weights)
            self.reporter.every_s = _HURRIED_REPORT_S if self.updater.behind else REPORT_EVERY_S

    async def _join(self, info: ModelInfo) -> ModelInfo:
        """Come to the weights that the service has by now, before any request comes; what is served then."""

        async def pull(content: Any) -> Any:
            return await content

        @contextlib.asynccontextmanager
        async def fetch(ref: WeightsRef) -> AsyncIterator[tuple[str, str | None]]:
            with naming_node():
                async with fetched(ref, info, pull) as folders:
                    yield folders

        def switched(info: ModelInfo) -> None:
            self.runtime.metrics.forget("truespec_build_info", **self._build)  # of the old fingerprint
            self._build["fingerprint"] = info.fingerprint
            self.weights_switched(info)

        runtime = self.runtime
        updater = WeightUpdater(self.backend, info, fetch, switched, runtime.metrics)
        try:
            async with asyncio.timeout(_JOIN_TIMEOUT_S):
                wanted = await runtime.controller.wanted_weights()
        except (RayError, RayServeException, TimeoutError) as error:
            _logger.warning(
                "the controller did not say which weights to serve; a later report will bring them: %s", error
            )
        else:
            updater.apply(dataclasses.replace(wanted, load=None))
            await updater.wait_converged()
            updater.check_health()
        self.updater = updater
        return updater.info
