"""Runs each entry of a batch by the first step that takes it, and measures how long drafting and verification take."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, Protocol

from speculative.state.batch import Batch, Entry, StepOutcome, merge_outcomes
from speculative.stats import StepStats


class Step(Protocol):
    """One way to compute a batch: eagerly (`EagerStep`), or as captured graphs (`gpu.GraphStep`)."""

    def takes(self, entries: Sequence[Entry]) -> list[bool]:
        """Return which of them it can compute together; it is asked again for the others."""

    def draft(self, batch: Batch) -> Any:
        """Return what was drafted, in the form that its own `verify` takes."""

    def verify(self, batch: Batch, drafts: Any, beside: Sequence[Entry] = ()) -> StepOutcome:
        """Run the target, verify and sample, and copy the results to the host.

        beside: the entries left to later steps, whose rows may be computed in the same pass.
        """


@dataclass
class StepExecutor:
    """The steps of an engine in order of preference; the last one takes every entry.

    stats: gets the seconds of drafting and of verification. Where the device works behind the host's back, drafting is
        counted with verification, which waits for it.
    """

    steps: tuple[Step, ...]
    stats: StepStats

    def run(self, batch: Batch) -> StepOutcome:
        """Draft, forward, verify, sample: entries that only a later step takes come behind the others."""
        left, parts, places = dict(enumerate(batch.entries)), list[StepOutcome](), list[int]()
        for step in self.steps:
            while left and (chosen := list(compress(left, step.takes(tuple(left.values()))))):
                own = Batch(tuple(map(left.pop, chosen)))
                parts.append(self._run(step, own, tuple(left.values())))
                places += chosen
        return parts[0] if len(parts) == 1 else merge_outcomes(parts, places)

    def _run(self, step: Step, batch: Batch, beside: Sequence[Entry]) -> StepOutcome:
        started = time.perf_counter()
        drafts = step.draft(batch)
        draft_s = time.perf_counter() - started
        outcome = replace(step.verify(batch, drafts, beside), step_s=time.perf_counter() - started)
        self.stats.draft_s += draft_s
        self.stats.verify_s += outcome.step_s - draft_s
        return outcome
