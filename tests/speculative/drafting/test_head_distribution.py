"""The distribution of whole continuations when a head over the target's hidden states draws the drafts, through the
real step.

The target is a Markov chain in the weights of a real decoder, so that its distribution is known exactly; the heads are
random."""

import pytest
import torch
from torch import Tensor

from speculative.config import DrafterConfig
from speculative.drafting.head_drafters import Eagle3DraftModel
from speculative.engine import EngineCore
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Config, Eagle3Head
from tests.support.engines import markov_decoder, settings
from tests.support.markov_chain import sample, worst_window
from tests.support.tiny_heads import randomise

pytestmark = pytest.mark.slow

V, LENGTH, COUNT, FIRST = 8, 5, 2_500, 3
FIVE_SIGMA = 5.0


@pytest.fixture(scope="module")
def distribution() -> Tensor:
    """[V, V] float32."""
    return (1.5 * torch.randn(V, V, generator=torch.Generator().manual_seed(1))).softmax(-1)


@pytest.fixture(scope="module")
def decoder(distribution: Tensor) -> Decoder:
    return markov_decoder(distribution, num_layers=3)


PART, ALL = (0, 2, 3, 5, 7), tuple(range(V))


def draft_model(drafted: tuple[int, ...], decoder: Decoder) -> Eagle3DraftModel:
    """A head that drafts something, of these tokens."""
    config = Eagle3Config(decoder.config, len(drafted), target_hidden_size=V).for_target(decoder.config)
    head = Eagle3Head(config, torch.tensor(drafted), decoder.embedding, dtype=torch.float32)
    randomise(head)
    return Eagle3DraftModel(head, "random")


def head_engine(drafted: tuple[int, ...], decoder: Decoder, verifier: str = "token_wise") -> EngineCore:
    config = settings(
        drafter=DrafterConfig(num_draft_tokens=3),
        verifier=verifier,
        max_num_seqs=256,
        max_batched_tokens=2048,
        kv_cache_tokens=8192,
        prefix_caching=False,
    )
    return EngineCore(decoder, decoder.config, config, "markov", None, draft_model(drafted, decoder))


@pytest.mark.parametrize("drafted", [PART, ALL])
def test_joint_distribution_with_drawn_drafts(decoder: Decoder, distribution: Tensor, drafted: tuple[int, ...]) -> None:
    engine = head_engine(drafted, decoder)
    samples = sample(engine, (FIRST, FIRST), COUNT, LENGTH)
    assert worst_window(samples, distribution.double().numpy(), FIRST) < FIVE_SIGMA
    stats = engine.take_stats()
    assert stats.num_drafts > COUNT and 0 < stats.num_accepted < stats.num_drafted
    assert abs(stats.expected_accepted - stats.num_accepted) < 5 * stats.num_drafted**0.5
