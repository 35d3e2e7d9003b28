"""The controller: one actor that replays answers, collects reports and coordinates weights."""

import asyncio
import dataclasses
import inspect
import os
import time
from collections.abc import Collection, Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.backends.base import Replayed
from serve_app.cluster.weight_coordinator import WeightCoordinator
from serve_app.cluster.weight_transfer import Transfers
from serve_app.config.app_config import AppConfig
from serve_app.deployments.controller_client import ANSWERED
from serve_app.deployments.known_numerics import KnownNumerics
from serve_app.deployments.pool_states import watch_pools
from serve_app.deployments.remote_errors import answered
from serve_app.deployments.replica_reports import ReplicaReports
from serve_app.deployments.runtime import REPORT_EVERY_S, observe
from serve_app.guard.heartbeat import Report
from serve_app.guard.referee_counts import RefereeCounts, count_controls, count_independent
from serve_app.guard.replica_registry import ReplicaRegistry
from serve_app.http.page.status import StatusBook
from serve_app.openai.responses.kept_responses import ResponseStore
from serve_app.referee.book.controls import Controls
from serve_app.referee.book.dumps import DumpFolder
from serve_app.referee.book.independent_checks import IndependentChecks
from serve_app.referee.book.replay_checker import ReplayChecker
from serve_app.referee.book.replica_book import ReplicaBook
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.detectors import Alarm
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.strata import SERVED_STRATA
from serve_app.referee.judge.tolerance import ServiceTolerances, Tolerance
from serve_app.referee.judge.verdicts import Checked, Finished, VerdictBook
from serve_app.referee.records.coverage import Coverage
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.telemetry.tracing import Carried, adopt, carried
from speculative.errors import EngineFault
from speculative.request import Request


class Controller:
    """One actor for the whole app: it has finished requests replayed, keeps the verdicts, and everybody's counts."""

    # Serve awaits it in the actor's loop, which the task at its end needs.
    async def __init__(self, config: AppConfig) -> None:  # type: ignore[misc]
        context = serve.get_replica_context()
        pool = config.pool_names[0]  # prefill where there is one: it drafts nothing, and replays while it is idle
        replayer = "PrefillServer" if pool == "prefill" else "MonolithServer"
        tracing = observe(config, "referee", context.replica_tag)

        @cache  # made when first needed: by then the replayer is there
        def replayers() -> DeploymentHandle[Any]:
            return serve.get_deployment_handle(replayer, context.app_name)

        async def replay(request: Request, avoid: Collection[str]) -> Replayed:
            with tracing.call("replay.call", {"truespec.choice": request.request_id}):
                return numerics.replayed(await answered(replayers().replay.remote(request, carried(), avoid=avoid)))

        async def replay_independently(request: Request) -> Replayed:
            referee, weights = await answered(replayers().independent_referee.remote())
            return await answered(referee.replay.remote(request, weights))

        sums = PrometheusSink(source=context.replica_tag)
        metrics = Metrics(sums, model_name=config.model.served_name, pool=pool)
        tolerances = ServiceTolerances(config)
        self._counts = counts = RefereeCounts(metrics, SERVED_STRATA)
        folder = None if config.dumps.folder is None else Path(config.dumps.folder)
        dumps = DumpFolder(folder, config.dumps.max_files, config.dumps.max_mib * 2**20)
        book = ReplicaBook(tolerances, dumps, VerdictBook(config.replay.keep_verdicts), alarmed=counts.alarmed)

        def accuse(replica: str, alarm: str, shown: Finished | None = None) -> None:
            found = Alarm(alarm, "all", time.time())  # of what no answer shows: it trips no breaker
            if shown is not None:
                book.dump(f"alarm {alarm}", lambda: {"replica": replica, "finished": dataclasses.asdict(shown)})
            book.incidents.note("replay", alarm, replica, alarm=found)
            counts.alarmed(found, replica)

        numerics = KnownNumerics(config, lambda replica: accuse(replica, "numerics"))
        share, longest_s = config.replay.sample_rate, config.limits.request_timeout_s
        coverage = Coverage(share, longest_s, lambda replica, one: accuse(replica, "missing", one))

        def heard(report: Report, in_time: bool) -> None:
            numerics.observe(report.status.replica, report.status.pool, report.computing)
            if in_time:  # else what it handed in may be lost as well, and is no fault of its own
                coverage.finished(report.status.replica, report.finished)

        def handed_in(answer: Answer) -> Answer:
            coverage.came(answer)
            return numerics.served(answer)

        registry = ReplicaRegistry(book, counts, heard)
        self._independent = IndependentChecks(
            replay_independently,
            tolerances,
            book,
            rate=config.replay.independent_rate_of(config.engine),
            ended=count_independent(metrics),
        )
        judge = Judge(tolerances)
        self._controls = Controls(replay, judge.judge, ended=count_controls(metrics), dump=book.dump)

        def verified(answer: Answer, checked: Checked) -> None:
            self._independent.offer(answer)
            self._controls.offer(answer, checked)

        self._checker = ReplayChecker(
            replay,
            counts.counting(judge.judge),
            book,
            max_queue=config.replay.max_queue,
            max_running=config.replay.max_running,
            ended=counts.ended,
            verified=verified,
        )
        self._checker.handed_in = handed_in
        self._status = StatusBook(_about(config, tolerances.configured), sums, time.time)
        weights = WeightCoordinator()
        parts = (
            ReplicaReports(sums, registry, weights, self._status),
            sums,
            registry,
            book.verdicts,
            self._checker,
            self._status,
            weights,
            Transfers(ray.put, weights.update),
            ResponseStore(config.responses.max_mib * 2**20, config.responses.max_age_s),
        )
        self._parts = {type(part).__name__: part for part in parts}  # as the name of a `Call` begins
        pools = watch_pools(context.app_name, config, sums, registry.requests_on)
        self._work = asyncio.get_running_loop().create_task(self._run(pools))

    async def _run(self, pools: Coroutine[Any, Any, None]) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._checker.run())
            tasks.create_task(self._independent.run())
            tasks.create_task(self._controls.run())
            tasks.create_task(self._note_forever())
            tasks.create_task(pools)

    async def _note_forever(self) -> None:
        while True:
            self._counts.set_gauges(self._checker)
            self._status.note()
            await asyncio.sleep(REPORT_EVERY_S)

    async def call(self, name: str, reported: Carried, /, *args: Any, **kwargs: Any) -> Any:
        """Answer a `Call` of a client: have one of the parts do it. Raises LookupError: there is no such call."""
        adopt(reported)
        method = ANSWERED.get(name)
        if method is None:
            raise LookupError(f"The controller has no call {name!r}; the caller may run another version.")
        answer = method(self._parts[name.partition(".")[0]], *args, **kwargs)
        return await answer if inspect.isawaitable(answer) else answer

    async def check_health(self) -> None:
        """Called by Serve; a referee whose work has ended is replaced."""
        if self._work.done():
            raise EngineFault("The referee has stopped.")


def _about(config: AppConfig, tolerance: Tolerance) -> dict[str, Any]:
    grafana = os.environ.get("RAY_GRAFANA_IFRAME_HOST") or os.environ.get("RAY_GRAFANA_HOST", "")  # Ray's own settings
    of_engine = config.vllm if config.engine.kind == "vllm" else config.engine
    return {
        "model": config.model.served_name,
        "topology": config.topology,
        "drafter": config.drafter.kind,
        "max_num_seqs": config.engine.max_num_seqs,
        "shares": {
            "replay.sample_rate": config.replay.sample_rate,
            "replay.independent_rate": config.replay.independent_rate_of(config.engine),
            "self_check_sample_rate": of_engine.self_check_sample_rate,
        },
        "max_tme": tolerance.max_tme,
        "assumes_rounding": tolerance.assumed,
        "max_first_token_s": config.limits.max_time_to_first_token_s,
        "grafana": grafana if grafana.startswith(("https://", "http://")) else "",
        "verifies": config.engine.logprobs_mode == "raw_logprobs",
    }
