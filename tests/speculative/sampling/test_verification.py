"""Token-wise verification at its borders; `test_exact_distribution.py` has the distribution of what it emits."""

import pytest
import torch
from torch import Tensor

from speculative.sampling.draft_probs import PointMass
from speculative.sampling.verification import VerifyInput
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.verify_inputs import verify_input
from tests.support.vocabulary import with_both_ops

LEAST, MOST = 2.0**-53, 1 - 2.0**-53  # the uniforms nearest to 0 and 1


def pack(
    rounds: list[tuple[Tensor, list[int]]], accept_uniforms: Tensor | float, sample_uniforms: Tensor | float
) -> VerifyInput:
    """One entry per (distribution [K + 1, V], drafts [K]); a float stands for all rows."""
    probs = torch.cat([distribution for distribution, _ in rounds]).float()
    drafts = torch.tensor([token for _, drafts in rounds for token in (*drafts, -1)])
    return verify_input(probs, drafts, PointMass(), accept_uniforms, sample_uniforms)


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
    for drafts, accepted, token in (([2, 0, 1], 3, 3), ([2, 0, 0], 2, 1), ([2, 1, 1], 1, 0), ([0, 0, 1], 0, 2)):
        for uniform in (LEAST, 0.5, MOST):
            verified = ops.verify_token_wise(pack([(one_hot, drafts)], uniform, uniform))
            assert (verified.num_accepted.item(), verified.token_ids.item()) == (accepted, token)


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
    step = pack([(torch.tensor([[0.0, 0.25, 0.5, 0.25]] * 3), [1, 2])], 0.99, 0.5)
    before = step.probs.clone()
    ops.verify_token_wise(step)
    assert torch.equal(step.probs, before)
