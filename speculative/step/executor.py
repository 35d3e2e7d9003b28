"""Runs a batch by the first step that takes it, and measures how long drafting and verification take."""

import time
from dataclasses import replace
from typing import Any, Protocol

from speculative.state.batch import Batch, StepOutcome
from speculative.stats import StepStats


class Step(Protocol):
    """One way to compute a batch: eagerly (`EagerStep`), or as captured graphs (`gpu.GraphStep`)."""

    def takes(self, batch: Batch) -> bool:
        """Return whether it can compute this batch."""
        ...

    def draft(self, batch: Batch) -> Any:
        """Return what was drafted, in the form that its own `verify` takes."""
        ...

    def verify(self, batch: Batch, drafts: Any) -> StepOutcome:
        """Run the target, verify and sample, and copy the results to the host."""
        ...


class StepExecutor:
    """The steps of an engine in order of preference; the last one takes every batch.

    Args:
        steps: tried in this order.
        stats: gets the seconds of drafting and of verification. Where the device works behind the host's back,
            drafting is counted with verification, which waits for it.
    """

    def __init__(self, steps: tuple[Step, ...], stats: StepStats) -> None:
        self.steps = steps
        self._stats = stats

    def run(self, batch: Batch) -> StepOutcome:
        """Draft, forward, verify, sample."""
        step = next(step for step in self.steps if step.takes(batch))
        started = time.perf_counter()
        drafts = step.draft(batch)
        drafted = time.perf_counter()
        outcome = step.verify(batch, drafts)
        ended = time.perf_counter()
        self._stats.draft_s += drafted - started
        self._stats.verify_s += ended - drafted
        return replace(outcome, step_s=ended - started)
