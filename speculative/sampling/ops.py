"""The arithmetic over the vocabulary that has a second implementation, and the one by torch's operators.

The mathematics stands in the modules beside, for any device. `step.kernel_ops` has the same over our CPU kernels. An
engine takes one of the two when it is built; tests run both on the same input.
"""

from torch import Tensor

from speculative.kernels.bindings import Kernels
from speculative.sampling import coupled, probs, token_wise, verification
from speculative.sampling.coupled import NoiseRows
from speculative.sampling.probs import SamplingRows
from speculative.sampling.verification import VerifyInput, VerifyOutput


class DistributionOps:
    """By torch's operators, on any device. R verify rows, E sampled entries, V tokens; logits and probabilities are
    float32.

    host: kernels for random numbers; None = numpy.
    """

    def __init__(self, host: Kernels | None = None) -> None:
        self.host = host

    def process(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Logits [R, V] after temperature and filters; given back as they are where neither changes anything."""
        return probs.process(logits, rows)

    def target_probs(self, processed: Tensor, rows: SamplingRows) -> Tensor:
        """The distribution [R, V] of processed logits; greedy rows have all mass on the most likely token."""
        return probs.target_probs(processed, rows)

    def draw(self, distribution: Tensor, uniform: Tensor) -> Tensor:
        """[E] int64, one token of each distribution [E, V] by inverse CDF; uniform: [E] float64."""
        return probs.draw(distribution, uniform)

    def choose(self, probs: Tensor, columns: Tensor, rows: NoiseRows, ids: Tensor | None, vocab_size: int) -> Tensor:
        """[E] int64, the columns of coupled drafts, from distributions [E, W]; those of others are given."""
        return coupled.choose(probs, columns, rows, ids, vocab_size, self.host)

    def verify_token_wise(self, step: VerifyInput) -> VerifyOutput:
        """Accept each draft by its own coin, up to the first that is rejected."""
        return token_wise.verify_token_wise(step)

    def emitted_at_rows(self, verified: VerifyOutput, step: VerifyInput) -> Tensor:
        """[R] int64, the token emitted at each row; rows past the last emitted one repeat it."""
        return verification.emitted_at_rows(verified, step)

    def round_probs(
        self, step: VerifyInput, verified: VerifyOutput, *, places: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """[R] q of the draft judged at each row, [E] q of each entry's last token; and with `places` [R] the mass of q
        before each draft, in the order it is sampled in. Of sampled drafts only; rows without one hold anything."""
        return verification.round_probs(step, verified, places=places)
