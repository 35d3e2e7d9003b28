"""Requests in vLLM's words: what is passed on, what is changed on the way, and what is refused."""

from typing import Any

import pytest

from serve_app.backends.base import ChatPrompt
from serve_app.openai.tools.forced_calls import call_form
from speculative.errors import EngineFault, InvalidRequest
from speculative.request import Request, SamplingParams, Structure
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = NEEDS_VLLM
PROMPT = (5, 9, 17)
ENDS = (2, 9)


def reported(params: SamplingParams, emitted: tuple[int, ...] = (), room: int = 1000, **request: Any) -> Any:
    from serve_app.backends.vllm_parts.params import to_vllm

    return to_vllm(Request("r", PROMPT, params, **request), emitted=emitted, room=room, transfer={}, ends=ENDS)


def test_every_parameter_reaches_vllm() -> None:
    params = SamplingParams(
        max_tokens=30, min_tokens=4, temperature=0.7, top_k=40, top_p=0.9, min_p=0.05, presence_penalty=0.5,
        frequency_penalty=-0.5, repetition_penalty=1.2, logit_bias=((7, 2.0),), bad_words=((3,), (4, 5)),
        allowed_token_ids=(1, 2, 7), stop_token_ids=(9,), ignore_eos=True, logprobs=3, prompt_logprobs=1,
    )  # fmt: skip
    got = reported(params)
    same = (
        *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "presence_penalty"),
        *("frequency_penalty", "repetition_penalty", "ignore_eos", "logprobs", "prompt_logprobs"),
    )
    assert {name: getattr(got, name) for name in same} == {name: getattr(params, name) for name in same}
    assert (got.logit_bias, got.allowed_token_ids, got.stop_token_ids) == ({7: 2.0}, [1, 2, 7], [9])
    assert got.clone().bad_words_token_ids == [[3], [4, 5]]
    assert got.detokenize is False and got.n == 1
    named = reported(SamplingParams(logprob_token_ids=(4, 5), logprobs=2))
    assert named.logprobs == -1 and named.logprob_token_ids is None, "they are read from all"


def test_top_k_never_goes_alone_and_its_distribution_stays() -> None:
    import torch

    alone = reported(SamplingParams(top_k=5)).top_p
    assert alone < 1 and torch.tensor(alone, dtype=torch.float32) == 1
    assert reported(SamplingParams(top_k=5, top_p=0.8)).top_p == 0.8 and reported(SamplingParams()).top_p == 1


def test_forms_keep_their_text() -> None:
    for structure, name, value in (
        (Structure("json_schema", '{"type": "object"}'), "json", '{"type": "object"}'),
        (Structure("regex", "a+"), "regex", "a+"),
        (Structure("grammar", 'start: "a"'), "grammar", 'start: "a"'),
        (Structure("choice", '["yes", "no"]'), "choice", ["yes", "no"]),
        (Structure("json_object"), "json_object", True),
    ):
        got = reported(SamplingParams(structure=structure))
        assert getattr(got.structured_outputs, name) == value
        assert got.extra_args["truespec"]["speculate"] is False


def test_what_was_emitted_elsewhere_counts_and_its_draws_are_not_drawn_again() -> None:
    params = SamplingParams(max_tokens=30, min_tokens=4)
    whole, rest = reported(params, seed=5), reported(params, (1, 2, 3), seed=5)
    assert (whole.max_tokens, rest.max_tokens) == (30, 27)
    assert (whole.min_tokens, rest.min_tokens) == (4, 1)
    assert len({whole.seed, rest.seed, reported(params, (1, 2), seed=5).seed, reported(params, seed=6).seed}) == 4
    assert whole.seed == reported(params, seed=5).seed and 0 <= whole.seed < 2**63
    assert reported(params, room=8).max_tokens == 8


def test_distributions_that_look_at_what_was_emitted_do_not_go_on_elsewhere() -> None:
    for params in (
        SamplingParams(presence_penalty=0.1),
        SamplingParams(frequency_penalty=0.1),
        SamplingParams(bad_words=((1, 2),)),
        SamplingParams(structure=Structure("regex", "a")),
    ):
        reported(params)
        with pytest.raises(EngineFault, match="cannot be resumed on another replica"):
            reported(params, (1,))
    reported(SamplingParams(repetition_penalty=1.3, bad_words=((1,),)), (1,))


def test_drafts_are_left_to_the_scheduler() -> None:
    terms = reported(SamplingParams()).extra_args["truespec"]
    assert terms == {"speculate": True, "canary": False, "chosen_seed": False}
    assert reported(SamplingParams(speculate=False)).extra_args["truespec"]["speculate"] is False
    assert reported(SamplingParams(), canary=True).extra_args["truespec"]["canary"] is True


def test_what_vllm_would_pass_over_is_refused_where_it_would() -> None:
    from serve_app.backends.vllm_parts.params import check

    def refused(params: SamplingParams, *, speculates: bool, prompt: tuple[int, ...] = PROMPT) -> str | None:
        try:
            check(Request("r", prompt, params), speculates=speculates, max_model_len=10, vocab_size=100)
        except InvalidRequest as error:
            return error.field
        return None

    for name, params in (("min_p", SamplingParams(min_p=0.1)), ("logit_bias", SamplingParams(logit_bias=((1, 1.0),)))):
        assert refused(params, speculates=True) == name
        assert refused(params, speculates=False) is None
    assert refused(SamplingParams(reproducible=True), speculates=False) == "reproducible"
    assert refused(SamplingParams(stop_token_ids=(100,)), speculates=False) == "stop_token_ids"
    assert refused(SamplingParams(), speculates=True, prompt=(100,)) == "prompt"
    assert [refused(SamplingParams(), speculates=True, prompt=(1,) * n) for n in (9, 10)] == [None, "prompt"]


def test_a_parameter_that_nobody_told_vllm_of_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from serve_app.backends.vllm_parts import params

    request = Request("r", PROMPT, SamplingParams(top_k=3, frequency_penalty=0.5, stop_token_ids=(4,), logprobs=1))
    limits = {"speculates": False, "max_model_len": 10, "vocab_size": 100}
    params.check(request, **limits)
    monkeypatch.setattr(params, "_SAME", ("top_k",))
    with pytest.raises(InvalidRequest, match="frequency_penalty is not among vLLM's parameters"):
        params.check(request, **limits)


def test_another_distribution_is_not_taken_for_ours() -> None:
    from serve_app.backends.vllm_parts.params import allows_what_ours_allows

    calls = call_form(ChatPrompt(tools=({"type": "function", "function": {"name": "f"}},), use="required"))
    others = (Structure("grammar", 'start: "a"'), Structure("json_object"), Structure("choice", '["a"]'))
    assert all(map(allows_what_ours_allows, (None, calls))) and not any(map(allows_what_ours_allows, others))
