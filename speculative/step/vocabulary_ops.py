"""The arithmetic of `sampling.ops`, and that of the checks beside it."""

from torch import Tensor

from speculative.sampling.ops import DistributionOps
from speculative.sampling.verification import VerifyInput, VerifyOutput
from speculative.selfcheck import invariants, terms
from speculative.selfcheck.terms import TermScope
from speculative.state.batch import Terms


class VocabularyOps(DistributionOps):
    """Computes by torch's operators, on any device; shapes as in `DistributionOps`."""

    def broken_rows(
        self, step: VerifyInput, verified: VerifyOutput, emitted: Tensor, highest: Tensor, outside: Tensor
    ) -> Tensor:
        """[R] int64: 1 + the index into ROW_KINDS of the invariant that is broken at a row, or 0."""
        return invariants.broken_rows(step, verified, emitted, highest, outside)

    def take_terms(self, step: VerifyInput, verified: VerifyOutput, emitted: Tensor, scope: TermScope) -> Terms:
        """The terms of the self-checks."""
        return terms.take_terms(step, verified, emitted, scope)
