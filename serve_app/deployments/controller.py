"""The controller: one actor that replays answers, collects reports and coordinates weights."""

import asyncio
import dataclasses
import os
import time
from collections.abc import Collection, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayTaskError
from ray.serve.handle import DeploymentHandle

from serve_app.backends.base import PauseMode, Replayed
from serve_app.config.app_config import AppConfig
from serve_app.deployments.pool_states import watch_pools
from serve_app.deployments.runtime import REPORT_EVERY_S, observe, own_error
from serve_app.http.admin import Statuses
from serve_app.openai.kept_responses import ResponseStore
from serve_app.page.status import StatusBook
from serve_app.referee.breaker import Mode
from serve_app.referee.dumps import DumpFolder
from serve_app.referee.heartbeat import Orders, Report
from serve_app.referee.independent_checks import IndependentChecks
from serve_app.referee.judgement import Judge
from serve_app.referee.records import ReplayJob
from serve_app.referee.replay_checker import ReplayChecker
from serve_app.referee.replica_book import ReplicaBook
from serve_app.referee.tolerance import tolerances_of
from serve_app.referee.verdicts import Checked
from serve_app.telemetry.metrics import MetricBatch, Metrics, PrometheusSink, RaySink, Sink
from serve_app.telemetry.tracing import Carried, adopt, carried
from serve_app.weights.coordinator import WeightCoordinator
from serve_app.weights.desired_state import DesiredState, Outcome, WeightsRef
from serve_app.weights.transfer import Transfers
from speculative.errors import EngineFault
from speculative.request import Request


class Controller:
    """One actor for the whole app: it has finished requests replayed, keeps the verdicts, and everybody's counts."""

    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        pool = config.pool_names[0]
        replayer = "PrefillServer" if pool == "prefill" else "MonolithServer"
        tracing = observe(config, "referee", context.replica_tag)

        @cache  # made when first needed: by then the replayer is there
        def replayers() -> DeploymentHandle[Any]:
            return serve.get_deployment_handle(replayer, context.app_name)

        async def replay_independently(request: Request) -> Replayed:
            try:
                referee, weights = await replayers().independent_referee.remote()
                return await referee.replay.remote(request, weights)  # type: ignore[no-any-return]
            except RayTaskError as error:
                raise own_error(error) from error

        async def replay(request: Request, avoid: Collection[str]) -> Replayed:
            with tracing.call("replay.call", {"truespec.choice": request.request_id}):
                try:
                    return await replayers().replay.remote(request, carried(), avoid=avoid)  # type: ignore[no-any-return]
                except RayTaskError as error:
                    raise own_error(error) from error

        self._sums = PrometheusSink(source=context.replica_tag)
        sinks: list[Sink] = [RaySink(), self._sums]
        metrics = Metrics(sinks, model_name=config.model.served_name, pool=pool)
        tolerance, against_transformers = tolerances_of(config.replay, config.engine)
        self._book = ReplicaBook(metrics, tolerance, _dump_folder(config), config.replay.keep_verdicts)
        num_draft_tokens = config.engine_config(pool).drafter.max_drafts
        self._independent = IndependentChecks(
            replay_independently,
            against_transformers,
            self._book,
            metrics,
            rate=config.replay.independent_rate_of(config.engine),
            num_draft_tokens=num_draft_tokens,
        )
        self._checker = ReplayChecker(
            replay,
            Judge(tolerance, num_draft_tokens),
            self._book,
            metrics,
            max_queue=config.replay.max_queue,
            max_running=config.replay.max_running,
            verified=self._independent.offer,
        )
        self._responses = ResponseStore(config.responses.max_mib * 2**20, config.responses.max_age_s)
        self._status = StatusBook(_about(config), self._sums, time.time)
        self._weights = WeightCoordinator()
        self._transfers = Transfers(ray.put)
        pools = watch_pools(context.app_name, config, sinks)
        self._work = asyncio.get_running_loop().create_task(self._run(pools))

    async def _run(self, pools: Coroutine[Any, Any, None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._checker.run())
            tasks.create_task(self._independent.run())
            tasks.create_task(self._note_forever())
            tasks.create_task(pools)

    async def _note_forever(self) -> None:
        while True:
            self._checker.report_queue()
            self._status.note()
            await asyncio.sleep(REPORT_EVERY_S)

    async def submit(self, job: ReplayJob, reported: Carried) -> None:
        """Queue a finished request for replay."""
        adopt(reported)
        self._checker.submit(job)

    async def check(self, job: ReplayJob, reported: Carried) -> Checked:
        """Have a finished request replayed, and wait for it."""
        adopt(reported)
        return await self._checker.check(job)

    async def report(self, report: Report) -> Orders:
        """Take in what a replica counted and did, and tell it what was found out about it."""
        self._sums.apply(report.batch)
        orders = self._book.hear(report)
        if report.weights is None:
            return orders
        return dataclasses.replace(orders, weights=self._weights.hear(report.status.replica, report.weights))

    async def wanted_weights(self) -> DesiredState:
        """What a replica that starts is to serve."""
        return self._weights.wanted

    async def weights(self) -> Statuses:
        """Which weights each replica serves."""
        return self._weights.statuses()

    async def update_weights(self, ref: WeightsRef, mode: PauseMode, timeout_s: float) -> Outcome:
        """Bring new weights to every replica, or to none."""
        return await self._weights.update(ref, mode=mode, timeout_s=timeout_s)

    async def begin_transfer(self) -> int:
        """Weights are to come over the wire; the number of their transfer."""
        return self._transfers.begin()

    async def put_shard(self, transfer: int, index: int, content: Any, digest: str, drafter: bool) -> None:
        """Take in a part of them."""
        self._transfers.put(transfer, index, content, digest, drafter=drafter)

    async def end_transfer(
        self, transfer: int, num_shards: tuple[int, int], version: str, mode: PauseMode, timeout_s: float
    ) -> Outcome:
        """All of them came, so many shards of the target and of the drafter: bring them to every replica."""
        ref = self._transfers.end(transfer, version, *num_shards)
        return await self._weights.update(ref, mode=mode, timeout_s=timeout_s)

    async def stage_weights(self, ref: WeightsRef | None) -> None:
        """Keep what `finish_weights` is to bring; None = nothing."""
        self._weights.stage(ref)

    async def finish_weights(self, version: str, timeout_s: float) -> Outcome:
        """Bring the staged weights to every replica, or to none."""
        return await self._weights.finish(version, timeout_s)

    async def reset_prefix_caches(self) -> Outcome:
        """Empty every replica's prefix cache."""
        return await self._weights.reset_caches()

    async def pause(self, mode: PauseMode, timeout_s: float) -> Outcome:
        """Have every replica begin nothing new."""
        return await self._weights.pause(mode, timeout_s)

    async def resume(self) -> Outcome:
        """Have every replica go on."""
        return await self._weights.resume()

    async def count(self, batch: MetricBatch) -> None:
        """Take in what a replica without an engine counted."""
        self._sums.apply(batch)

    async def verdict(self, reply_id: str) -> dict[str, Any] | None:
        """What is known of a reply."""
        return self._book.verdicts.reply(reply_id)

    async def put_response(self, response_id: str, owner: str, record: bytes) -> bool:
        """Keep a response; returns whether it is kept."""
        return self._responses.put(response_id, owner, record)

    async def response(self, response_id: str, owner: str) -> bytes | None:
        """A response that is kept."""
        return self._responses.get(response_id, owner)

    async def delete_response(self, response_id: str, owner: str) -> bool:
        """Forget a response; returns whether there was one."""
        return self._responses.delete(response_id, owner)

    async def statuses(self) -> Statuses:
        """Where every replica stands."""
        return self._book.statuses()

    async def order(self, mode: Mode, replica: str | None) -> Statuses | None:
        """Pass on what an operator wants; None where there is no such replica."""
        return self._book.order(mode, replica)

    async def status(self) -> dict[str, Any]:
        """What the status page shows."""
        return self._status.render(self._book.overview())

    async def status_history(self) -> dict[str, Any]:
        """The last hour of the status page."""
        return self._status.history()

    async def exposition(self) -> tuple[bytes, str]:
        """The app's metrics in Prometheus' text format, and the content type."""
        return self._sums.exposition()

    async def check_health(self) -> None:
        """Called by Serve; a referee whose work has ended is replaced."""
        if self._work.done():
            raise EngineFault("The referee's work has ended.")


def _about(config: AppConfig) -> dict[str, Any]:
    grafana = os.environ.get("RAY_GRAFANA_IFRAME_HOST") or os.environ.get("RAY_GRAFANA_HOST", "")  # Ray's own settings
    return {
        "model": config.model.served_name,
        "topology": config.topology,
        "drafter": config.drafter.kind,
        "replay_share": config.replay.sample_rate,
        "max_tme": config.replay.max_tme,
        "max_first_token_s": config.limits.max_time_to_first_token_s,
        "grafana": grafana if grafana.startswith(("https://", "http://")) else "",
        "verifies": config.engine.logprobs_mode == "raw_logprobs",
    }


def _dump_folder(config: AppConfig) -> DumpFolder:
    dumps = config.dumps
    folder = None if dumps.folder is None else Path(dumps.folder)
    return DumpFolder(folder, dumps.max_files, dumps.max_mib * 2**20)
