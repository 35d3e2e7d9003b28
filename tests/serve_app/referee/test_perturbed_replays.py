"""Sound answers, replayed by an engine whose logits are off by noise of the size that bfloat16 rounds: none is accused,
whatever was filtered, however cold, whoever drafted; and a token that is wrong is still found.

`test_real_rounding` has the noise of a real model in place of a made-up one.
"""

from collections.abc import Callable, Mapping

import pytest
import torch

from serve_app.backends.base import Numerics
from serve_app.referee.tolerance import Tolerance
from tests.support.perturbed_engines import DRAFTERS, SETTINGS, VERIFIERS, VOCAB, Pair, Tables

NOISE_NATS = 0.02  # of a logit, between a batch of drafts in bfloat16 and the same tokens in one prefill
EACH = 3  # answers of each setting, verifier and drafter for each pair of engines


def made_up(nats: float, *, heavy: bool = False) -> tuple[Tables, Tables]:
    """Tables of an engine that answers, and of one whose logits are off by noise of this size; heavy: with tails of a t
    distribution."""
    chance = torch.Generator().manual_seed(1)
    table, of_drafter, noise, more_noise = (torch.randn(VOCAB, VOCAB, generator=chance) for _ in range(4))
    if heavy:  # Student's t with 5 degrees of freedom, of variance 1
        squares = torch.randn(2, 5, VOCAB, VOCAB, generator=chance).square().sum(1)
        noise, more_noise = noise * (3 / squares[0]).sqrt(), more_noise * (3 / squares[1]).sqrt()
    target, near = 3 * table, 3 * table + of_drafter
    return Tables(target, near), Tables(target + nats * noise, near + nats * more_noise)


ROUNDED = Pair(*made_up(NOISE_NATS), Tolerance.between_equals("bfloat16"))


@pytest.mark.parametrize("drafted", DRAFTERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_no_sound_answer_is_accused_because_logits_are_rounded(verifier: str, drafted: str) -> None:
    assert not ROUNDED.accused(verifier, drafted, SETTINGS, 3)


PAIRS: Mapping[str, tuple[str, Callable[[str], Tolerance], float]] = {
    "float32, another engine": ("float32", Tolerance.against_float32, 1.5e-5),
    "bfloat16, the same engine": ("bfloat16", Tolerance.between_equals, 0.02),
    "bfloat16 and float32": ("bfloat16", Tolerance.against_float32, 0.015),
    "four bits and bfloat16": ("bfloat16", Tolerance.against_float32, 0.025),
    "w4a8 and float32": ("w4a8", Tolerance.against_float32, 0.1),
}
"""Pairs of engines, and the standard deviation of the noise between their logits, as measured in docs/runs/watch.md."""


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("drafted", DRAFTERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_no_sound_answer_is_accused_whichever_engines_compute_it(verifier: str, drafted: str, pair: str) -> None:
    precision, between, nats = PAIRS[pair]
    perturbed = Pair(*made_up(nats, heavy=True), between(precision), Numerics("truespec", precision))
    accused = perturbed.accused(verifier, drafted, SETTINGS, EACH, list(PAIRS).index(pair))
    assert not accused, accused[:20]


@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
def test_a_wrong_token_is_found_although_logits_are_rounded(verifier: str) -> None:
    settings = {name: one for name, one in SETTINGS.items() if "0.7" in name or "1.0" in name}
    assert ROUNDED.share_found(verifier, "sampled", settings, 4) >= 0.95
