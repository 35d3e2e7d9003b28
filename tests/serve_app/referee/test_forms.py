"""SmolLM2-135M served in each form that a CPU has, and computed again by `transformers` with the weights of that form:
sound answers are verified, a logprob that is off and a filter that was not applied are found."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from serve_app.backends.base import Numerics, Replayed, ServedWeights, precision_of
from serve_app.config.files import parse_args
from serve_app.referee.book.transformers_model import TransformersReferee
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.tolerance import ServiceTolerances
from serve_app.referee.judge.verdicts import Checked, Verdict
from speculative.config import EngineConfig
from speculative.engine import EngineCore
from speculative.kernels.library import cpu_kernels
from speculative.model.catalogue import fetch_model
from speculative.model.fingerprint import model_fingerprint
from speculative.request import DEFAULT_VERSION, Request, SamplingParams
from speculative.weight_formats import FORMATS, is_rounded
from tests.support.engines import NGRAM
from tests.support.referees import serve

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(cpu_kernels() is None, reason="the forms are those of the CPU kernels"),
]

WORDS = (504, 2365, 355, 253, 1789, 30, 198, 504, 2365, 355, 253)
PLAIN = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=0)
KINDS = (
    PLAIN,
    replace(PLAIN, temperature=0.7, top_p=0.9),
    replace(PLAIN, temperature=0),
    replace(PLAIN, top_k=20, min_p=0.05),
    replace(PLAIN, reproducible=True),
)


class Service:
    """An engine with weights in one form, and the independent referee of its answers."""

    def __init__(self, folder: Path, form: str) -> None:
        dtype: Literal["float32", "bfloat16"] = "float32" if form == "float32" else "bfloat16"
        self.engine = EngineCore.load(
            folder, EngineConfig(dtype=dtype, quantization=form, device="cpu", kv_cache_tokens=1024, drafter=NGRAM)
        )
        kept = form if is_rounded(form) else "plain"
        self.numerics = Numerics("truespec", precision_of(dtype, form), kept, True)
        fingerprint = model_fingerprint(folder, weights=form)
        self.weights = ServedWeights(str(folder), str(folder), form, fingerprint, DEFAULT_VERSION)
        self.referee = TransformersReferee(bytes)
        config = parse_args({"model": {"source": "m"}})
        self.judge = Judge(ServiceTolerances(config))
        self.sound = [self.answer(number, KINDS[number % len(KINDS)]) for number in range(10)]
        self.replays = [self.replay(answer) for answer in self.sound]

    def answer(self, number: int, params: SamplingParams) -> Answer:
        prompt = (*WORDS, 2365 + number, *WORDS)
        answer = serve(self.engine, Request(f"cmpl-{number}-0", prompt, params, seed=number + 7))
        return replace(answer, numerics=self.numerics)

    def replay(self, answer: Answer) -> Replayed:
        return self.referee.replay(answer.scored("again"), self.weights)

    def check(self, answer: Answer, replayed: Replayed | None = None) -> Checked:
        return self.judge.judge(answer, replayed or self.replay(answer)).checked


@pytest.fixture(scope="module", params=[name for name, one in FORMATS.items() if "cpu" in one.devices])
def service(request: pytest.FixtureRequest) -> Service:
    return Service(fetch_model("smollm2-135m"), request.param)


def verdicts(service: Service, answers: Sequence[Answer]) -> list[Verdict]:
    return [service.check(*pair).verdict for pair in zip(answers, service.replays, strict=True)]


def test_sound_answers_are_verified_with_the_weights_that_are_served(service: Service) -> None:
    assert {replayed.numerics.weights for replayed in service.replays} == {service.numerics.weights}
    assert verdicts(service, service.sound) == [Verdict.VERIFIED] * len(service.sound)


def test_a_logprob_that_is_off_is_found(service: Service) -> None:
    off = 0.1 if service.numerics.precision == "float32" else 6.0
    shifted = [
        replace(one, logprobs=(*one.logprobs[:5], (one.logprobs[5] or 0) - off, *one.logprobs[6:]))
        for one in service.sound
    ]
    assert verdicts(service, shifted) == [Verdict.SUSPECT] * len(shifted)


def test_a_filter_that_was_not_applied_is_found(service: Service) -> None:
    """The engine samples from all tokens where the request allows the five likeliest."""
    hot = [service.answer(number, replace(PLAIN, temperature=1.5)) for number in range(20, 24)]
    asked = replace(PLAIN, temperature=1.5, top_k=5)
    dropped = [replace(one, request=replace(one.request, params=asked)) for one in hot]
    assert [service.check(one).verdict for one in dropped] == [Verdict.SUSPECT] * len(dropped)
