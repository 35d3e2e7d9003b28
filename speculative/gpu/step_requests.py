"""Requests of a captured step, and what they ask for: no step changes it."""

from collections.abc import Sequence as Sequences

from speculative.state.batch import Entry
from speculative.state.sequence import Sequence


class StepRequests:
    """The requests of some sequences, in order.

    edited: whether any has rules for its logits, or a structure. reported: whether any wants logprobs.
    """

    def __init__(self, sequences: Sequences[Sequence]) -> None:
        self.sequences = sequences
        self.params = [sequence.params for sequence in sequences]
        self.edited = any(sequence.rules is not None or sequence.constraint is not None for sequence in sequences)
        self.reported = any(params.returns_logprobs for params in self.params)


class LastRequests:
    """Gives the requests of the last step again where the sequences are the same objects in the same order: none of
    them ever gets another request, rules or structure."""

    def __init__(self) -> None:
        self._last = StepRequests([])

    def of(self, entries: Sequences[Entry]) -> StepRequests:
        """Those of a step's entries."""
        sequences = [entry.sequence for entry in entries]
        if sequences != self._last.sequences:
            self._last = StepRequests(sequences)
        return self._last
