"""Sound answers, replayed by an engine whose logits are off by noise of the size that bfloat16 rounds: none is accused,
whatever was filtered, however cold, whoever drafted; and a token that is wrong is still found.

`test_real_rounding` has the noise of a real model in place of a made-up one.
"""

import pytest
import torch

from serve_app.referee.tolerance import Tolerance
from tests.support.perturbed_engines import DRAFTERS, SETTINGS, VERIFIERS, VOCAB, Pair, Tables

pytestmark = pytest.mark.slow

NOISE_NATS = 0.02  # of a logit, between a batch of drafts in bfloat16 and the same tokens in one prefill
TABLE, OF_DRAFTER, NOISE, MORE_NOISE = torch.randn(4, VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
TARGET, NEAR = 3 * TABLE, 3 * TABLE + OF_DRAFTER
AGAIN = Tables(TARGET + NOISE_NATS * NOISE, NEAR + NOISE_NATS * MORE_NOISE)
ROUNDED = Pair(Tables(TARGET, NEAR), AGAIN, Tolerance.between_equals("bfloat16"))


@pytest.mark.parametrize("drafted", DRAFTERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_no_sound_answer_is_accused_because_logits_are_rounded(verifier: str, drafted: str) -> None:
    assert not ROUNDED.accused(verifier, drafted, SETTINGS, 3)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_wrong_token_is_found_although_logits_are_rounded(verifier: str) -> None:
    settings = {name: one for name, one in SETTINGS.items() if "0.7" in name or "1.0" in name}
    assert ROUNDED.share_found(verifier, "sampled", settings, 4) >= 0.95
