"""Runs a plan: all engines started once, then asked in turn, case by case and round by round."""

import contextlib
import dataclasses
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from deploy.reports.progress import View
from deploy.run.quiet import Others
from speculative.errors import ConfigError
from tools.bench.engines import LeftOut, resolve
from tools.bench.plan import BenchCase, BenchPlan
from tools.bench.process import EngineFailed, EngineProcess
from tools.bench.workers.channel import BatchOfPrompts

_WARM_UP_TOKENS = 64  # an engine with dynamic draft lengths has tried every length by then


@dataclass(frozen=True, slots=True)
class BenchSample:
    """One engine's answer to one batch of prompts, of so many tokens. `reported` is the worker's reply."""

    engine: str
    case: BenchCase
    round: int
    reported: dict[str, Any]
    prompt_tokens: int

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the speeds."""
        speeds = {"decode_tokens_per_s": self.decode_speed, "tokens_per_s": self.whole_speed}
        speeds["prompt_tokens_per_s"] = self.prompt_speed
        return {"engine": self.engine, **dataclasses.asdict(self.case), "round": self.round, **self.reported, **speeds}

    @property
    def decode_speed(self) -> float:
        """Tokens a second from the moment every stream had its first token."""
        return float(self.reported["decode_tokens"] / self.reported["decode_s"])

    @property
    def whole_speed(self) -> float:
        """Tokens a second of the whole batch, its prompts included."""
        return float(self.reported["num_tokens"] / self.reported["wall_s"])

    @property
    def prompt_speed(self) -> float:
        """Tokens of the prompts a second, until every stream had its first token."""
        return float(self.prompt_tokens / max(self.reported["first_token_s"]))


@dataclass(slots=True)
class BenchResult:
    """The results of a run."""

    plan: BenchPlan
    provenance: dict[str, Any]
    samples: list[BenchSample] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    versions: dict[str, dict[str, str]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with every sample."""
        return {
            "provenance": self.provenance,
            "plan": self.plan.as_dict(),
            "versions": self.versions,
            "left_out": [{"engine": one.name, "reason": one.reason} for one in self.left_out],
            "samples": [sample.as_dict() for sample in self.samples],
        }


def run_bench(plan: BenchPlan, provenance: dict[str, Any], view: View) -> BenchResult:
    """Measure everything the plan asks for. An engine that fails is left out from there on, with the reason.

    An interrupt ends the measuring, not the command: what was found until then is returned.

    Raises:
        ConfigError: a setting is wrong, or not one engine could be started.
    """
    found = BenchResult(plan, provenance)
    launches, missing = resolve(plan)
    for one in missing:
        _leave_out(found, one, view)
    with contextlib.ExitStack() as stack:
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # engines are ended, not left behind
        stack.callback(signal.signal, signal.SIGTERM, before)
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="truespec-bench-")))
        engines: dict[str, EngineProcess] = {}
        for launch in launches:
            view.stage(f"starting {', '.join(launch.serves)}")
            try:
                process = stack.enter_context(EngineProcess(launch, folder))
                engines |= dict.fromkeys(launch.serves, process)
                found.versions |= dict.fromkeys(launch.serves, process.versions)
            except EngineFailed as error:
                for name in launch.serves:
                    _leave_out(found, LeftOut(name, f"it did not start: {error}"), view)
        if not engines:
            raise ConfigError("No engine could be started; the lines above say why.")
        run, others = _Run(found, engines, view), Others()
        try:
            for case in plan.cases():
                run.case(case)
        except KeyboardInterrupt:
            view.say("interrupted; the report covers the measurements so far")
        found.provenance["others_meanwhile"] = others.cores()
    return found


class _Run:
    """The engines still alive, and their results."""

    def __init__(self, found: BenchResult, engines: dict[str, EngineProcess], view: View) -> None:
        self._found = found
        self._engines = engines
        self._view = view
        self._num_cases = len(list(found.plan.cases()))
        self._num_begun = 0

    def case(self, case: BenchCase) -> None:
        """All rounds of a case, the first one as warm-up."""
        plan, able = self._found.plan, self._able(case)
        self._num_begun += 1
        self._view.stage(f"case {self._num_begun} of {self._num_cases}, {case}: {len(able)} engines")
        for number in range(-1, plan.rounds):
            self._view.count(max(number, 0), plan.rounds, "rounds")
            for name in able:
                ask = _ask(plan, case, number)
                if plan.keeps_prefixes:
                    self._ask(name, case, ask)
                reported = self._ask(name, case, ask)
                if reported is not None and number >= 0:
                    self._found.samples.append(BenchSample(name, case, number, reported, ask.prompt_tokens))

    def _able(self, case: BenchCase) -> list[str]:
        able = []
        for name, process in self._engines.items():
            if process.max_streams is None or case.streams <= process.max_streams:
                able.append(name)
            else:
                self._view.say(f"{case}: without {name}, which answers at most {process.max_streams} at once")
        return able

    def _ask(self, name: str, case: BenchCase, ask: BatchOfPrompts) -> dict[str, Any] | None:
        """An engine's reply; None if it failed, now or before."""
        process = self._engines.get(name)
        if process is None:
            return None
        try:
            return process.run(dataclasses.replace(ask, engine=name))
        except EngineFailed as error:
            _leave_out(self._found, LeftOut(name, f"it failed at {case}: {error}"), self._view)
            del self._engines[name]
            if process not in self._engines.values():
                process.close()
            return None


def _ask(plan: BenchPlan, case: BenchCase, number: int) -> BatchOfPrompts:
    warm_up = number < 0
    return BatchOfPrompts(
        prompts=plan.round_prompts(case, max(number, 0)),
        max_tokens=min(plan.tokens, _WARM_UP_TOKENS) if warm_up else plan.tokens,
        temperature=case.temperature,
        seed=number + 1,
    )


def _leave_out(found: BenchResult, one: LeftOut, view: View) -> None:
    found.left_out.append(one)
    view.say(f"left out: {one.name}: {one.reason}")
