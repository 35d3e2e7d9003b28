"""Rows to sample drafts from, of every kind, and what a draft is by definition; on any device."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from speculative.gpu.row_drafts import DraftBuffers, DraftFields, SampleDrafts
from speculative.sampling.rng import gumbel
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.judged_rows import generator, in_turn, no_filters, of_wider
from tests.support.torch_operators import TorchDrafts

NUM_DRAFTS, OFFSET = 3, 1  # of a round, and the one that is sampled
FILTERS = ((0.0, 0, 1.0), (0.0, 5, 1.0), (0.0, 0, 0.7), (0.05, 20, 0.9))  # min_p, top_k, top_p
_ROUNDING = 1e-12  # of sums of q in float64: in float32 they would be off by 1e-9 and more


@dataclass(frozen=True)
class DraftScene:
    """E sequences of a round, of which some are greedy."""

    logits: Tensor
    fields: DraftFields
    ids: Tensor | None
    vocab_size: int

    def to(self, device: torch.device, dtype: torch.dtype = torch.float32) -> "DraftScene":
        """The same there, with logits of another type."""
        ids = None if self.ids is None else self.ids.to(device)
        fields = DraftFields(*(one.to(device) for one in self.fields))
        return DraftScene(of_wider(self.logits.to(device, dtype)), fields, ids, self.vocab_size)

    def with_fields(self, **changes: Tensor) -> "DraftScene":
        return replace(self, fields=self.fields._replace(**changes))

    def filtered(self, *filters: tuple[float, int, float]) -> "DraftScene":
        """With min_p, top_k (0 = all) and top_p of its sequences, in turn."""
        return self.with_fields(**in_turn(filters, range(len(self.logits)), self.logits))

    def rows(self, begin: int, end: int) -> "DraftScene":
        of_drafts = ("uniforms", "noise_positions")
        parts = {
            name: (one[:, begin:end] if name in of_drafts else one[begin:end]).contiguous()
            for name, one in self.fields._asdict().items()
        }
        return replace(self, logits=self.logits[begin:end], fields=DraftFields(**parts))

    def sample(self, sample: SampleDrafts) -> DraftBuffers:
        """The buffers of a round, one draft of which was sampled; -1 and NaN stand in the rows of the others."""
        device, (num_rows, width) = self.logits.device, self.logits.shape
        drafts = DraftBuffers.empty(NUM_DRAFTS * num_rows, width, device)
        for part in drafts:
            part.fill_(torch.nan if part.is_floating_point() else -1)
        sample(self.logits, self.fields, OFFSET, self.ids, self.vocab_size, drafts)
        return drafts


def draft_scene(num_rows: int, width: int, *, vocab_size: int | None = None, seed: int = 0) -> DraftScene:
    """Rows of warm and cold sequences, one in three greedy, over a vocabulary or, if it has a size, a part of it."""
    random = generator(seed)
    greedy = torch.arange(num_rows) % 3 == 2
    fields = DraftFields(
        temperature=torch.where(greedy, 1.0, 0.3 + torch.rand(num_rows, generator=random))[:, None],
        greedy=greedy,
        **no_filters(num_rows, width),
        uniforms=torch.rand((NUM_DRAFTS, num_rows), generator=random, dtype=torch.float64),
        coupled=torch.zeros(num_rows, dtype=torch.bool),
        seeds=torch.randint(-(2**63), 2**63 - 1, (num_rows,), generator=random),
        noise_positions=2**12 * torch.randint(0, 2**20, (NUM_DRAFTS, num_rows), generator=random),
    )
    ids = None if vocab_size is None else torch.randperm(vocab_size, generator=random)[:width].contiguous()
    logits = torch.randn((num_rows, width), generator=random) * 3 - 7
    return DraftScene(of_wider(logits), fields, ids, vocab_size or width)


def assert_sampled(given: DraftScene, sample: SampleDrafts) -> DraftBuffers:
    """The drafts of a scene: q is torch's, each draft what its own q, uniform and noise give, and no other row is
    written to. Returns the sampled rows."""
    whole, num_rows = given.sample(sample), len(given.logits)
    own = slice(OFFSET * num_rows, (OFFSET + 1) * num_rows)
    for part in whole:
        others = torch.cat([part[: own.start], part[own.stop :]])
        assert (others.isnan() if others.is_floating_point() else others == -1).all()
    found = DraftBuffers(*(part[own] for part in whole))
    expected = given.sample(TorchDrafts(VocabularyOps()))
    torch.testing.assert_close(found.probs, expected.probs[own], rtol=1e-4, atol=1e-7)
    assert_drawn(given, found)
    return found


def assert_drawn(given: DraftScene, found: DraftBuffers) -> None:
    """Each draft is the one that the search for its uniform in its own q gives, or its noise."""
    q, rows = found.probs.double(), torch.arange(len(found.probs), device=found.probs.device)
    assert ((q.sum(dim=-1) - 1).abs() < 1e-4).all()
    assert (found.probs[rows, found.columns] > 0).all(), "a token without mass was drawn"
    assert torch.equal(found.tokens, found.columns if given.ids is None else given.ids[found.columns])
    cdf = q.cumsum(dim=-1)
    before = cdf[rows, found.columns] - q[rows, found.columns]
    torch.testing.assert_close(found.mass_before, before, rtol=0, atol=_ROUNDING)
    threshold = given.fields.uniforms[OFFSET] * cdf[:, -1]
    is_within = (before - _ROUNDING <= threshold) & (threshold <= before + q[rows, found.columns] + _ROUNDING)
    noise = gumbel(given.fields.seeds, given.fields.noise_positions[OFFSET], given.vocab_size)
    score = found.probs.log().double() + (noise if given.ids is None else noise[:, given.ids])
    is_best = found.columns == score.argmax(dim=-1)
    assert torch.where(given.fields.coupled, is_best, is_within).all()
