"""The arithmetic over the vocabulary that has a second implementation, by torch's operators.

The mathematics stands here and in the modules beside, for any device. `step.kernel_ops` has the same over our CPU
kernels. An engine takes one of the two when it is built; tests run both on the same input.
"""

import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels
from speculative.sampling import probs, token_wise
from speculative.sampling.coupled import NoiseRows, largest
from speculative.sampling.draft_probs import PointMass
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
        """Logits [R, V] after temperature and filters, -inf where a token is filtered out; given back as they are where
        neither changes anything."""
        if rows.all_warm and rows.filters is None:
            return logits
        processed = logits / rows.temperature
        if rows.filters is not None:
            filtered = rows.filters.rows
            processed[filtered] = rows.filters.keep(processed[filtered])
        return processed

    def target_probs(self, processed: Tensor, rows: SamplingRows) -> Tensor:
        """The distribution [R, V] of processed logits; greedy rows have all mass on the most likely token."""
        distribution = torch.softmax(processed, dim=-1)
        if not rows.any_greedy:
            return distribution
        best = processed.argmax(dim=-1, keepdim=True)
        return torch.where(rows.greedy[:, None], torch.zeros_like(distribution).scatter_(1, best, 1.0), distribution)

    def draw(self, distribution: Tensor, uniform: Tensor) -> Tensor:
        """[E] int64, one token of each distribution [E, V] by inverse CDF; uniform: [E] float64."""
        return probs.draw(distribution, uniform)

    def choose(self, probs: Tensor, columns: Tensor, rows: NoiseRows, ids: Tensor | None, vocab_size: int) -> Tensor:
        """[E] int64, the columns of drafts: of coupled rows those chosen from distributions [E, W] with the noise of
        their target tokens, of others those given, [E]. ids: [W] the token of each column; None where it is that."""
        choice = largest(probs, (rows.seeds, rows.positions), self.host, ids=ids, vocab_size=vocab_size)[:, 0]
        return torch.where(rows.coupled, choice, columns)

    def verify_token_wise(self, step: VerifyInput) -> VerifyOutput:
        """Accept each draft by its own coin, up to the first that is rejected."""
        return token_wise.verify_token_wise(step)

    def emitted_at_rows(self, verified: VerifyOutput, step: VerifyInput) -> Tensor:
        """[R] int64, the token emitted at each row; rows past the last emitted one repeat it."""
        accepted = step.offsets < verified.num_accepted[step.entries]
        return torch.where(accepted, step.drafts, verified.token_ids[step.entries])

    def round_probs(
        self, step: VerifyInput, verified: VerifyOutput, *, places: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """[R] q of the draft judged at each row, [E] q of each entry's last token; and with `places` [R] the mass of q
        before each draft, in the order it is sampled in. Of sampled drafts only; rows without one hold anything."""
        q, rows = step.draft_probs, step.first_rows + verified.num_accepted
        assert not isinstance(q, PointMass), "a point mass needs no record"
        of_last = q.of_tokens(verified.token_ids, step.drafts[rows], step.packed[rows], step.probs.shape[1])
        return step.q_of_drafts(), of_last, q.mass_before(step.drafts, step.packed) if places else None
