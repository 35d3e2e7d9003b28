"""Sound answers, replayed with the rounding that SmolLM2-135M really has between two engines: none is accused, and a
token that is wrong is still found. docs/runs/detection.md has the figures."""

import pytest

from speculative.kernels.library import cpu_kernels
from speculative.model.catalogue import fetch_model
from tests.support.perturbed_engines import DRAFTERS, SETTINGS, VERIFIERS
from tests.support.real_logits import FORMS, RealLogits

EACH = 2  # answers of each setting, verifier and drafter for each pair of forms
PAIR = "w4a8 and float32"  # the noisiest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cpu_kernels() is None, reason="without kernels there are no four-bit weights"),
]


@pytest.fixture(scope="module")
def real() -> RealLogits:
    return RealLogits(fetch_model("smollm2-135m"))


def test_the_two_forms_are_rounded_apart(real: RealLogits) -> None:
    assert 0.05 < real.noise(PAIR).std() < 0.5, "nats"


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_a_wrong_token_is_found_in_four_bits(real: RealLogits, verifier: str) -> None:
    settings = {name: one for name, one in SETTINGS.items() if "0.7" in name or "1.0" in name}
    assert real.pair(PAIR).share_found(verifier, "sampled", settings, 4) >= 0.95


@pytest.mark.parametrize("pair", FORMS)
@pytest.mark.parametrize("drafted", DRAFTERS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_no_sound_answer_is_accused_whichever_forms_compute_it(
    real: RealLogits, verifier: str, drafted: str, pair: str
) -> None:
    accused = real.pair(pair).accused(verifier, drafted, SETTINGS, EACH, list(FORMS).index(pair))
    assert not accused, accused[:20]
