"""Arithmetic over the vocabulary in our CPU kernels, at any size and by definition; `step_conformance` compares the
rest with torch's operators."""

import pytest
import torch

from speculative.kernels.library import cpu_kernels
from speculative.request import SamplingParams
from speculative.sampling.coupled import largest
from speculative.sampling.probs import SamplingRows
from speculative.sampling.rng import gumbel
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.judged_rows import generator
from tests.support.vocabulary import CPU_OPS, needs_kernels

pytestmark = needs_kernels

CPU = torch.device("cpu")
OURS, TORCHS = CPU_OPS, VocabularyOps()


@pytest.mark.parametrize("size", [1, 15, 17, 256, 1000, 49152])
def test_distributions(size: int) -> None:
    logits = torch.randn(6, size, generator=generator(0)) * 8
    logits[2, ::2] = -torch.inf  # filtered out
    logits[2, -1] = 3.0
    logits[3, :] = 1.5  # ties: the first one
    params = [SamplingParams(temperature=value) for value in (1, 0, 0.3, 0, 1, 1.7)]
    rows = SamplingRows.build(params, size, CPU)
    ours = OURS.target_probs(OURS.process(logits, rows), rows)
    theirs = TORCHS.target_probs(TORCHS.process(logits, rows), rows)
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=1e-30)  # torch sums in float32
    exact = torch.softmax((logits / rows.temperature)[[0, 2, 4, 5]].double(), dim=-1)
    torch.testing.assert_close(ours[[0, 2, 4, 5]].double(), exact, rtol=5e-6, atol=1e-30)
    assert (ours.double().sum(dim=-1) - 1).abs().max() < 1e-6
    assert torch.equal(ours[[1, 3]], theirs[[1, 3]])
    assert torch.equal(ours[2] > 0, theirs[2] > 0), "what is filtered out has no mass"


@pytest.mark.parametrize("size", [2, 31, 33, 1000, 8193])
def test_the_largest_with_noise(size: int) -> None:
    """The definition is all scores, sorted. Ids of a part of the vocabulary keep the noise of their tokens."""
    keys = torch.randint(-(2**62), 2**62, (8,), generator=generator(3)), torch.arange(8) * 1_000_003
    noise = gumbel(*keys, size)
    ids = torch.randperm(size, generator=generator(4))[: size // 2 + 1].sort().values
    for part in (None, ids):
        width = size if part is None else len(part)
        probs = (torch.randn(8, width, generator=generator(5)) * torch.linspace(0, 9, 8)[:, None]).softmax(-1)
        probs[2, ::2] = 0.0
        probs[3] = torch.eye(width)[width // 2]
        scores = probs.log() + (noise if part is None else noise[:, part])
        for count in (1, min(4, width)):
            found = largest(probs, keys, cpu_kernels(), ids=part, vocab_size=size, count=count)
            wanted = scores.topk(count).indices
            has_mass = probs.gather(1, wanted) > 0
            assert torch.equal(found[has_mass], wanted[has_mass])
            assert has_mass[:, 0].all() and int(found.min()) >= 0 and int(found.max()) < width
