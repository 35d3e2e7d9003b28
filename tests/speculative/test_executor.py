"""Entries of a batch go to the first step that takes them, and their results come back in the batch's order."""

from collections.abc import Callable
from collections.abc import Sequence as Entries

import pytest

from speculative.request import Request
from speculative.state.batch import Batch, Entry, SequenceResult, StepOutcome
from speculative.state.sequence import Sequence
from speculative.stats import StepStats
from speculative.step.executor import StepExecutor


class NamedStep:
    """Emits the last number of each prompt it takes; `batches` has the prompts of each part that it ran."""

    def __init__(self, takes: Callable[[int], bool]) -> None:
        self._takes = takes
        self.batches: list[list[int]] = []

    def takes(self, entries: Entries[Entry]) -> list[bool]:
        return [self._takes(number(entry)) for entry in entries]

    def draft(self, batch: Batch) -> str:
        return "drafts"

    def verify(self, batch: Batch, drafts: str, beside: Entries[Entry] = ()) -> StepOutcome:
        assert drafts == "drafts" and not set(map(number, beside)) & set(map(number, batch.entries))
        numbers = [number(entry) for entry in batch.entries]
        self.batches.append(numbers)
        return StepOutcome(tuple(SequenceResult((one,)) for one in numbers), expected_accepted=len(numbers))


def number(entry: Entry) -> int:
    return entry.sequence.request.prompt_token_ids[-1]


@pytest.mark.parametrize(
    ("numbers", "parts"),
    [
        ([2, 4], ([[2, 4]], [], [])),
        ([1, 3], ([], [], [[1, 3]])),
        ([1, 2, 6, 3, 4], ([[2, 4]], [[6]], [[1, 3]])),
        ([6, 1], ([], [[6]], [[1]])),
    ],
    ids=["the first takes all", "the last takes all", "each takes some", "the first takes none"],
)
def test_each_entry_is_computed_once_and_results_keep_their_order(
    numbers: list[int], parts: tuple[list[list[int]], ...]
) -> None:
    steps = (NamedStep(lambda own: own in (2, 4)), NamedStep(lambda own: own % 2 == 0), NamedStep(lambda own: True))
    stats = StepStats()
    entries = tuple(Entry(Sequence(Request(f"r{own}", (own,))), 1, 0, True) for own in numbers)
    outcome = StepExecutor(steps, stats).run(Batch(entries))
    assert tuple(step.batches for step in steps) == parts
    assert [result.token_ids for result in outcome.results] == [(own,) for own in numbers]
    assert outcome.expected_accepted == len(numbers)
    assert outcome.step_s == pytest.approx(stats.draft_s + stats.verify_s)
