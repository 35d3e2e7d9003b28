"""Drafters without weights, one a file: each registers itself with its options. Knows sequences; knows no torch."""

from typing import Protocol

from speculative.state.sequence import Sequence


class Lookup(Protocol):
    """Chooses drafts for one sequence at a time.

    They are a function of the sequence's tokens and of what was seen before, never of a random number that was drawn at
    the position.
    """

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """At most `max_drafts` token ids to follow the sequence's; also called with 0."""

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""
