"""Verifiers give the target's distribution exactly: their uniforms integrated out over tiny vocabularies."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.sampling.probs import draw
from speculative.verification.base import Verifier, VerifyInput, VerifyOutput
from speculative.verification.draft_probs import PointMass
from speculative.verification.token_wise import verify_token_wise
from speculative.vocabulary.ops import VocabularyOps
from tests.support.vocabulary import with_both_ops

LEAST, MOST = 2.0**-53, 1 - 2.0**-53  # the uniforms nearest to 0 and 1
GRID = 64  # distributions are multiples of 1/64, so float32 holds them exactly and they sum to exactly 1


def pack(
    rounds: list[tuple[Tensor, list[int]]], accept_uniforms: Tensor | float, sample_uniforms: Tensor | float
) -> VerifyInput:
    """One entry per (distribution [K + 1, V], drafts [K]); a float stands for all rows."""
    counts = torch.tensor([len(drafts) for _, drafts in rounds])
    num_rows = int(counts.sum()) + len(rounds)
    nothing = torch.zeros(num_rows, dtype=torch.int64)
    return VerifyInput(
        probs=torch.cat([distribution for distribution, _ in rounds]).float(),
        draft_probs=PointMass(),
        packed=nothing,
        seeds=nothing,
        positions=nothing,
        drafts=torch.tensor([token for _, drafts in rounds for token in (*drafts, -1)]),
        entries=torch.repeat_interleave(torch.arange(len(rounds)), counts + 1),
        offsets=torch.cat([torch.arange(len(drafts) + 1) for _, drafts in rounds]),
        first_rows=torch.cumsum(counts + 1, 0) - counts - 1,
        counts=counts,
        accept_uniforms=torch.as_tensor(accept_uniforms, dtype=torch.float64).expand(num_rows).clone(),
        sample_uniforms=torch.as_tensor(sample_uniforms, dtype=torch.float64).expand(num_rows).clone(),
    )


@dataclass
class Integrated:
    """For rounds with K drafts each: P(draft j survives | those before it did), and the final token's distribution.

    survives: [E, K] float64. final: [E, K + 1, V] float64, given the number of accepted drafts.
    """

    survives: np.ndarray
    final: np.ndarray


def bisect(holds: Callable[[Tensor], Tensor], size: int) -> np.ndarray:
    """Measure of the uniforms in (0, 1) for which something holds that holds up to some uniform and not after."""
    low, high = torch.zeros(size, dtype=torch.float64), torch.ones(size, dtype=torch.float64)
    for _ in range(60):
        middle = (low + high) / 2
        below = holds(middle.clamp(LEAST, MOST))
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return ((low + high) / 2).numpy()


def integrate(verify: Verifier, distributions: Tensor, drafts: Tensor) -> Integrated:
    """distributions [E, K + 1, V], drafts [E, K]; knows nothing of the verifier but that it is monotonic in each
    uniform."""
    num_entries, num_drafts = drafts.shape
    rounds = [(distribution, row.tolist()) for distribution, row in zip(distributions, drafts, strict=True)]
    step = pack(rounds, 0.5, 0.5)

    def outcome(num_survivors: int, coin: Tensor | float, final: Tensor | float) -> VerifyOutput:
        """Coins that let `num_survivors` drafts survive, then `coin`."""
        accept_uniforms = torch.full((num_entries, num_drafts + 1), LEAST, dtype=torch.float64)
        if num_survivors < num_drafts:
            accept_uniforms[:, num_survivors] = torch.as_tensor(coin, dtype=torch.float64)
        sample_uniforms = torch.as_tensor(final, dtype=torch.float64).expand(num_entries)
        return verify(
            replace(
                step,
                accept_uniforms=accept_uniforms.reshape(-1),
                sample_uniforms=sample_uniforms.repeat_interleave(num_drafts + 1),
            )
        )

    survives = np.zeros((num_entries, num_drafts))
    for j in range(num_drafts):
        survives[:, j] = bisect(lambda coin, j=j: outcome(j, coin, 0.5).num_accepted > j, num_entries)
    vocab_size = distributions.shape[-1]
    final = np.zeros((num_entries, num_drafts + 1, vocab_size))
    for accepted, token in itertools.product(range(num_drafts + 1), range(vocab_size)):
        final[:, accepted, token] = bisect(
            lambda u, a=accepted, t=token: outcome(a, MOST, u).token_ids <= t, num_entries
        )
    return Integrated(survives, np.diff(final, axis=-1, prepend=0))


def departure(verify: Verifier, distributions: Tensor, drafts: Tensor) -> float:
    """The largest |P(emitted) - target| over all rounds, positions and tokens.

    Lossless means: that the round emits drafts 0..i-1 and then y has the target's probability of just that.
    """
    found, target = integrate(verify, distributions, drafts), distributions.double().numpy()
    worst, num_entries = 0.0, len(distributions)
    reached_by_round, reached_by_target = np.ones(num_entries), np.ones(num_entries)
    rows = np.arange(num_entries)
    for i in range(drafts.shape[1] + 1):
        emitted = found.final[:, i]
        if i < drafts.shape[1]:
            survives = found.survives[:, i]
            emitted = (1 - survives)[:, None] * emitted
            emitted[rows, drafts[:, i]] += survives
        difference = reached_by_round[:, None] * emitted - reached_by_target[:, None] * target[:, i]
        worst = max(worst, float(np.abs(difference).max()))
        if i < drafts.shape[1]:
            reached_by_round *= found.survives[:, i]
            reached_by_target *= target[rows, i, drafts[:, i]]
    return worst


def random_distributions(num_rows: int, vocab_size: int, seed: int) -> Tensor:
    """Distributions [num_rows, V] in multiples of 1/64, with many zeros and some certainties."""
    generator = np.random.default_rng(seed)
    weights = generator.dirichlet(np.full(vocab_size, 0.6), num_rows)
    return torch.from_numpy(np.stack([generator.multinomial(GRID, weight) for weight in weights])) / GRID


def every_round(vocab_size: int, num_drafts: int, seed: int) -> tuple[Tensor, Tensor]:
    """Every draft of `num_drafts` tokens, each with distributions of its own."""
    drafts = torch.tensor(list(itertools.product(range(vocab_size), repeat=num_drafts)), dtype=torch.int64)
    drafts = drafts.reshape(vocab_size**num_drafts, num_drafts)
    distributions = random_distributions(len(drafts) * (num_drafts + 1), vocab_size, seed)
    return distributions.reshape(len(drafts), num_drafts + 1, vocab_size), drafts


@pytest.mark.parametrize("num_drafts", range(5))
@pytest.mark.parametrize("vocab_size", [2, 3, 4])
@with_both_ops
def test_point_mass_verification_is_exact(ops: VocabularyOps, vocab_size: int, num_drafts: int) -> None:
    for seed in range(2):
        assert departure(ops.verify_token_wise, *every_round(vocab_size, num_drafts, seed)) < 1e-12


@with_both_ops
def test_certain_and_impossible_drafts_are_exact(ops: VocabularyOps) -> None:
    """p(x) = 1 and p(x) = 0 in all combinations over two drafts."""
    edges = torch.tensor(
        [[1.0, 0, 0], [0, 1, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [1 / 64, 63 / 64, 0], [63 / 64, 0, 1 / 64]]
    )
    triples = list(itertools.product(range(len(edges)), repeat=3))
    pairs = torch.tensor(list(itertools.product(range(3), repeat=2)))
    distributions = edges[torch.tensor(triples)].repeat(len(pairs), 1, 1)
    assert departure(ops.verify_token_wise, distributions, pairs.repeat_interleave(len(triples), 0)) < 1e-12


@pytest.mark.parametrize("final", [LEAST, 0.5, MOST])
@with_both_ops
def test_a_draft_of_no_probability_never_survives_and_a_certain_one_always_does(
    ops: VocabularyOps, final: float
) -> None:
    distribution = torch.tensor([[0.0, 0.25, 0.75], [0.0, 0.25, 0.75]])
    impossible = ops.verify_token_wise(pack([(distribution, [0])], LEAST, final))
    assert impossible.num_accepted.item() == 0
    assert impossible.token_ids.item() != 0
    certain = ops.verify_token_wise(pack([(torch.tensor([[0.0, 1.0, 0.0]] * 2), [1])], MOST, final))
    assert certain.num_accepted.item() == 1
    assert certain.token_ids.item() == 1


@with_both_ops
def test_a_rejected_draft_that_is_certain_but_for_rounding_is_emitted_after_all(ops: VocabularyOps) -> None:
    """p(x) = 1 - 6e-8 in float32 and nothing else has mass: there is no residual to draw from."""
    distribution = torch.tensor([[0.0, 1 - 2.0**-24, 0.0], [1.0, 0.0, 0.0]])
    rejected = ops.verify_token_wise(pack([(distribution, [1])], MOST, 0.5))
    assert rejected.num_accepted.item() == 0
    assert rejected.token_ids.item() == 1


@with_both_ops
def test_greedy_rows_match_the_longest_run_of_best_tokens(ops: VocabularyOps) -> None:
    one_hot = torch.eye(4)[[2, 0, 1, 3]]
    for drafts, accepted, token in (
        ([2, 0, 1], 3, 3),
        ([2, 0, 0], 2, 1),
        ([2, 1, 1], 1, 0),
        ([0, 0, 1], 0, 2),
    ):
        for uniform in (LEAST, 0.5, MOST):
            verified = ops.verify_token_wise(pack([(one_hot, drafts)], uniform, uniform))
            assert (verified.num_accepted.item(), verified.token_ids.item()) == (accepted, token)


@with_both_ops
def test_packed_entries_do_not_touch_each_other(ops: VocabularyOps) -> None:
    """[a, b, c] with [2, 0, 1] drafts gives what each gives alone, whatever its neighbours are."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(50):
        counts = [2, 0, 1, 4, 0]
        distributions = [random_distributions(count + 1, 4, seed=trial * 10 + count).float() for count in counts]
        rounds = [
            (distribution, torch.randint(4, (count,), generator=generator).tolist())
            for distribution, count in zip(distributions, counts, strict=True)
        ]
        accept_uniforms, sample_uniforms = torch.rand(
            2, sum(counts) + len(counts), generator=generator, dtype=torch.float64
        )
        together = ops.verify_token_wise(pack(rounds, accept_uniforms, sample_uniforms))
        start = 0
        for index, (round_, count) in enumerate(zip(rounds, counts, strict=True)):
            own = slice(start, start + count + 1)
            alone = ops.verify_token_wise(pack([round_], accept_uniforms[own], sample_uniforms[own]))
            assert together.num_accepted[index] == alone.num_accepted[0]
            assert together.token_ids[index] == alone.token_ids[0]
            assert together.expected_accepted[index] == alone.expected_accepted[0]
            start += count + 1


@with_both_ops
def test_expected_acceptance_sums_over_the_positions_reached(ops: VocabularyOps) -> None:
    distribution = torch.tensor([[0.5, 0.5], [0.25, 0.75], [0.125, 0.875], [1, 0]])
    for accept_uniforms, accepted, expected in (
        ([0.9, 0.1, 0.1, 0.1], 0, 0.5),
        ([0.1, 0.9, 0.1, 0.1], 1, 0.5 + 0.25),
        ([0.1, 0.1, 0.9, 0.1], 2, 0.5 + 0.25 + 0.125),
        ([0.1, 0.1, 0.1, 0.9], 3, 0.5 + 0.25 + 0.125),
    ):
        verified = ops.verify_token_wise(pack([(distribution, [0, 0, 0])], torch.tensor(accept_uniforms), 0.5))
        assert verified.num_accepted.item() == accepted
        assert verified.expected_accepted.item() == expected


@with_both_ops
def test_the_input_is_left_as_it_is(ops: VocabularyOps) -> None:
    step = pack([(random_distributions(3, 4, 1), [1, 2])], 0.99, 0.5)
    before = step.probs.clone()
    ops.verify_token_wise(step)
    assert torch.equal(step.probs, before)


def residual_from_p(step: VerifyInput) -> VerifyOutput:
    """A fault: after a rejection the token is drawn from p, the rejected draft included."""
    right = verify_token_wise(step)
    rows = step.first_rows + right.num_accepted
    return VerifyOutput(right.num_accepted, draw(step.probs[rows], step.sample_uniforms[rows]), right.expected_accepted)


def accept_always(step: VerifyInput) -> VerifyOutput:
    """A fault: whatever was drafted survives."""
    rows = step.first_rows + step.counts
    return VerifyOutput(step.counts, draw(step.probs[rows], step.sample_uniforms[rows]), step.counts.float())


def reject_always(step: VerifyInput) -> VerifyOutput:
    """A fault: nothing survives, and yet the token comes from the residual."""
    return verify_token_wise(replace(step, accept_uniforms=torch.full_like(step.accept_uniforms, 1.0)))


@pytest.mark.parametrize("faulty", [residual_from_p, accept_always, reject_always])
def test_the_enumeration_sees_a_faulty_verifier(faulty: Verifier) -> None:
    assert departure(faulty, *every_round(3, 2, seed=0)) > 0.05
