"""What verifiers take and give."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class VerifyInput:
    """One step's verify rows, packed. Row j of an entry judges its draft j; its last row draws the bonus token.

    probs: [R, V] float32, the target's law at each row.
    drafts: [R] int64, the draft judged there; -1 in each entry's last row.
    entries: [R] int64, which drawing entry a row belongs to.
    offsets: [R] int64, its position in the round.
    first_rows: [E] int64, each entry's first row.
    counts: [E] int64, its drafts.
    coins: [R] float64 in (0, 1), purpose coin.
    finals: [R] float64 in (0, 1), for the token drawn at this row if it is the last one: purpose residual where a draft
        was rejected, purpose bonus in the last row.
    """

    probs: Tensor
    drafts: Tensor
    entries: Tensor
    offsets: Tensor
    first_rows: Tensor
    counts: Tensor
    coins: Tensor
    finals: Tensor


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """What survived, on the device.

    num_accepted: [E] int64, leading drafts that survived.
    token_ids: [E] int64, the recovered or bonus token after them.
    expected_accepted: [E] float32, the verifier's acceptance probability summed over the positions it reached.
    """

    num_accepted: Tensor
    token_ids: Tensor
    expected_accepted: Tensor


class Verifier(Protocol):
    """Decides which drafts survive, so that what is emitted follows the target's law."""

    def __call__(self, step: VerifyInput) -> VerifyOutput:
        """Verify all entries of a step at once."""
        ...
