"""The number of tokens that vLLM drafts and verifies in each step: as many as pay, by the policy of our own engine.

Ours drafts and then verifies in one step. vLLM drafts at the end of a step what the next one verifies, and as many for
every request: the longest of the planned lengths; before the next step the others are cut to theirs.
"""

from collections.abc import Collection, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import NamedTuple

from speculative.request import Request
from speculative.scheduling.draft_length import DraftLength, DraftPlan
from speculative.state.batch import Entry, SequenceResult
from speculative.state.sequence import Sequence


class Computed(NamedTuple):
    """One request's share of a step: known tokens, drafts, the tokens sampled for it, kept or not."""

    num_known: int
    num_drafted: int
    token_ids: list[int]

    @property
    def num_accepted(self) -> int:
        """Drafts that were accepted; one more token follows them."""
        return min(self.num_drafted, max(0, len(self.token_ids) - 1))


@dataclass
class PlannedDrafts:
    """The lengths planned for the requests that vLLM runs."""

    policy: DraftLength
    most: int  # drafts that vLLM's drafter may make
    _: KW_ONLY
    by_model: bool  # whether drafting takes time: a model runs once for each draft

    def __post_init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._plan = DraftPlan()
        self._num_drafts = self.most  # as planned last

    def add(self, request: Request) -> None:
        """Plan for a request, too."""
        self._sequences[request.request_id] = Sequence(request)

    def keep(self, remaining: Collection[str]) -> None:
        """Forget all requests but these."""
        for request_id in self._sequences.keys() - set(remaining):
            del self._sequences[request_id]
            self.policy.forget(request_id)

    def restart(self) -> None:
        """Forget how often drafts were accepted: it may be with other weights."""
        self.policy.restart()

    def num_verified(self, request_id: str, num_made: int) -> int:
        """Return how many of the drafts made for a request are to be verified, by the last plan."""
        return self._plan.most(request_id, num_made)

    def plan(self, running: Collection[str], drafting: Collection[str]) -> int:
        """Return how many tokens to draft at the end of the next step; where none of its requests is known, as many as
        last.

        Args:
            running: the requests of that step.
            drafting: those that may have drafts verified in the step after it.
        """
        self._plan = self.policy.choose([self._sequences[name] for name in running if name in self._sequences])
        known = [name for name in drafting if name in self._sequences]
        if known:
            self._num_drafts = max(self._plan.most(name, self.most) for name in known)
        return self._num_drafts

    def observe(self, step: Mapping[str, Computed], seconds: float, num_made: int) -> None:
        """Learn from a step: what of its drafts was accepted, and how long it took.

        Args:
            step: its requests.
            seconds: of all of it.
            num_made: drafts made for each request at its end.
        """
        entries, results = [], []
        for request_id, one in step.items():
            if (sequence := self._sequences.get(request_id)) is not None:
                entries.append(Entry(sequence, one.num_known, one.num_drafted, samples=bool(one.token_ids)))
                results.append(SequenceResult(tuple(one.token_ids), one.num_drafted, one.num_accepted))
        if len(entries) == len(step):  # the others are prompts to hand over and texts to score, which take long
            self.policy.observe(entries, results, seconds, num_made if self.by_model else None)
        for entry, result in zip(entries, results, strict=True):
            entry.sequence.tokens.extend(result.token_ids)
