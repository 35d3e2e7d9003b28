"""From a request and a server's vendor to the parameters that sample in the same way."""

import json
from collections.abc import Mapping
from typing import Any

import pytest

from serve_app.referee.wire.exchange import COMPLETIONS
from serve_app.referee.wire.sampling import Sampled, sampled_as
from serve_app.referee.wire.vendors import VENDORS, Vendor, dialect_of, vendor_of


def sampled(dialect: str, body: dict[str, Any], generation: dict[str, Any] | None = None, **own: float) -> Sampled:
    whole = {} if "messages" in body else {"prompt": "x"}
    return sampled_as(vendor_of(dialect), generation or {}, own, whole | body, is_chat="messages" in body)


def filters(found: Sampled) -> tuple[float, int, float, float]:
    params = found.params
    return params.temperature, params.top_k, params.top_p, params.min_p


OFF = (1.0, 0, 1.0, 0.0)


def test_a_request_that_says_nothing_is_sampled_without_filters() -> None:
    for dialect in ("vllm", "sglang", "trtllm", "truespec", "other"):
        assert filters(sampled(dialect, {})) == OFF
    assert [sampled("vllm", {"top_k": k}).params.top_k for k in (-1, 0, 7)] == [0, 0, 7]
    assert [sampled("vllm", {"seed": seed}).seed for seed in (5, 2**64 + 5, -1, None, "5")] == [5, 5, None, None, None]


def test_generation_config_speaks_where_the_request_does_not() -> None:
    recommended = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "eos_token_id": 2, "do_sample": True}
    asked = {"top_k": 5, "temperature": None}
    assert filters(sampled("vllm", asked, recommended)) == (0.6, 5, 0.95, 0.0)
    assert filters(sampled("trtllm", asked, recommended)) == (1.0, 5, 1.0, 0.0)
    assert filters(sampled("sglang", {"messages": []}, recommended))[0] == 0.6
    assert filters(sampled("sglang", {}, recommended)) == OFF, "SGLang's completions ignore it"
    found = sampled("vllm", {"top_p": 0.5}, {"temperature": 0.6, "top_p": 0.9}, temperature=0.3, top_p=0.8)
    assert filters(found) == (0.3, 0, 0.5, 0.0), "what the operator says comes before the file, and after the request"


def test_penalties_bias_and_limits_are_taken_over() -> None:
    body = {
        "frequency_penalty": 0.5, "presence_penalty": -1, "repetition_penalty": 1.2, "min_tokens": 30, "max_tokens": 20,
        "logit_bias": {"7": -3, "9": 2.5}, "stop_token_ids": [4], "allowed_token_ids": [4, 7, 9], "ignore_eos": True,
    }  # fmt: skip
    found = sampled("vllm", body)
    params = found.params
    assert (params.frequency_penalty, params.presence_penalty, params.repetition_penalty) == (0.5, -1, 1.2)
    assert params.logit_bias == ((7, -3.0), (9, 2.5))
    assert (params.stop_token_ids, params.allowed_token_ids, params.ignore_eos) == ((4,), (4, 7, 9), True)
    assert (params.min_tokens, params.max_tokens) == (30, 30)
    assert (found.untested, found.stops) == ("", True)


# llama.cpp filters first, and divides by the temperature then.


def test_llama_cpp_has_filters_unless_told_otherwise() -> None:
    assert "top_p" in sampled("llama.cpp", {}).untested
    assert "top_p" in sampled("llama.cpp", {"temperature": 1.0}).untested
    explicit = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
    plain = sampled("llama.cpp", {"temperature": 0.7, **explicit})
    assert (filters(plain), plain.untested) == ((0.7, 0, 1.0, 0.0), "")
    of_server = sampled("llama.cpp", {}, temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    assert (filters(of_server), of_server.untested) == (OFF, ""), "its flags, named by --default"


@pytest.mark.parametrize("temperature", [0.25, 0.5, 1.0, 2.0])
def test_min_p_before_the_temperature_keeps_the_same_tokens(temperature: float) -> None:
    found = sampled("llama.cpp", {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.1})
    assert found.untested == ""
    ratio = 0.1 + 1e-9  # of a token that llama.cpp only just keeps, to the likeliest
    assert ratio ** (1 / temperature) > found.params.min_p > (0.1 - 1e-9) ** (1 / temperature)


def test_top_p_before_the_temperature_is_another_set() -> None:
    at_1 = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "min_p": 0.0}
    assert (filters(sampled("llama.cpp", at_1)), sampled("llama.cpp", at_1).untested) == ((1.0, 40, 0.9, 0.0), "")
    assert "top_p" in sampled("llama.cpp", at_1 | {"temperature": 0.9}).untested
    assert "top_p" in sampled("llama.cpp", at_1 | {"min_p": 0.1}).untested
    assert sampled("llama.cpp", at_1 | {"temperature": 0.0}).untested == "", "the likeliest token passes every filter"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"presence_penalty": 0.1}, "penalties"),
        ({"repetition_penalty": 1.1}, "penalties"),
        ({"repeat_penalty": 1.1}, "repeat_penalty"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"logit_bias": [[5, False]]}, "logit_bias"),
        ({"logit_bias": [["word", 1.0]]}, "cannot be repeated"),
        ({"samplers": ["top_k"]}, "samplers"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
    ],
)
def test_what_llama_cpp_does_otherwise_is_not_tested(changed: dict[str, Any], reason: str) -> None:
    for temperature in (0.0, 1.0):
        plain = {"temperature": temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0}
        biased = sampled("llama.cpp", plain | {"logit_bias": [[5, 1.5], [6, -2]]})
        assert (biased.params.logit_bias, biased.untested) == (((5, 1.5), (6, -2.0)), "")
        assert reason in sampled("llama.cpp", plain | changed).untested


# SGLang applies top_p to the whole distribution.


@pytest.mark.parametrize(
    ("body", "tested"),
    [
        ({"top_p": 0.9}, True),
        ({"min_p": 0.1}, True),
        ({"top_p": 0.9, "top_k": 9}, False),
        ({"min_p": 0.1, "top_k": 9}, False),
        ({"frequency_penalty": 0.5}, True),
        ({"repetition_penalty": 1.2}, False),
    ],
)
def test_filters_of_sglang_are_ours_one_at_a_time(body: dict[str, Any], tested: bool) -> None:
    assert (sampled("sglang", body).untested == "") is tested
    assert sampled("vllm", body).untested == ""


# transformers serve takes few fields, and is greedy unless a configuration says otherwise.


def test_transformers_samples_by_its_file_with_a_top_k_that_nobody_named() -> None:
    greedy = sampled("transformers", {"temperature": 1.0})
    assert (greedy.params.greedy, greedy.untested) == (True, ""), "whatever temperature is sent"
    assert filters(sampled("transformers", {}, {"do_sample": True, "eos_token_id": 2})) == (1.0, 50, 1.0, 0.0)
    assert filters(sampled("transformers", {"temperature": 0.5}, {"do_sample": True, "top_k": 0})) == (0.5, 0, 1.0, 0.0)
    assert sampled("transformers", {"temperature": 0}, {"do_sample": True}).params.greedy


def test_transformers_samples_by_the_request_s_generation_config() -> None:
    sent = json.dumps({"do_sample": True, "top_k": 0, "temperature": 0.7, "max_new_tokens": 9})
    found = sampled("transformers", {"generation_config": sent}, {"top_p": 0.8})
    assert (filters(found), found.untested) == ((0.7, 0, 0.8, 0.0), "")
    assert filters(sampled("transformers", {"generation_config": sent, "temperature": 1.0, "top_p": 1.0})) == OFF
    assert "generation_config" in sampled("vllm", {"generation_config": sent}).untested
    assert "cannot be repeated" in sampled("transformers", {"generation_config": "{"}).untested


def test_penalties_of_transformers_are_its_own() -> None:
    found = sampled("transformers", {"frequency_penalty": 0.3, "presence_penalty": 1.0})
    params = found.params
    assert (params.repetition_penalty, params.frequency_penalty, params.presence_penalty) == (1.3, 0.0, 0.0)
    assert found.untested == ""


@pytest.mark.parametrize(
    ("generation", "tested"),
    [
        ({"num_beams": 1, "typical_p": 1.0, "no_repeat_ngram_size": 0, "pad_token_id": 3}, True),
        ({"typical_p": 0.9}, False),
        ({"no_repeat_ngram_size": 1}, False),
        ({"do_sample": True, "top_p": 0.9, "min_p": 0.1}, False),
        ({"top_p": 0.9, "min_p": 0.1}, True),
    ],
)
def test_other_settings_of_transformers(generation: dict[str, Any], tested: bool) -> None:
    assert (sampled("transformers", {}, generation).untested == "") is tested


@pytest.mark.parametrize(
    ("body", "compared"),
    [
        ({"temperature": 0.0}, True),
        ({"temperature": 1.0, "top_p": 0.9}, True),
        ({"temperature": 0.7}, False),
        ({"temperature": 1.0, "frequency_penalty": 0.5}, False),
    ],
)
def test_sglangs_logprobs_are_the_models_only_where_nothing_changes_them(body: dict[str, Any], compared: bool) -> None:
    assert sampled("sglang", body).compared == compared
    assert sampled("vllm", body).compared


def test_a_vendor_is_added_in_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    class Colder(Vendor):
        owned_by = "colder"
        defaults: Mapping[str, Any] = {"temperature": 0.5}
        logprobs_after_temperature = True

        def why_not_ours(self, values: dict[str, Any]) -> str:
            return "top_k: it has its own" if "top_k" in values else ""

    monkeypatch.setitem(VENDORS, "colder", Colder())
    assert dialect_of("colder") == "colder" and dialect_of("") is None
    found = sampled("colder", {})
    assert found.params.temperature == 0.5 and not found.compared and not found.untested
    assert sampled("colder", {"temperature": 1.0}).compared
    assert sampled("colder", {"top_k": 5}).untested == "top_k: it has its own"
    assert vendor_of("colder").extras(COMPLETIONS, False)[0] == {"logprobs": 1, "return_token_ids": True}
    assert vendor_of("never heard of").extras(COMPLETIONS, False) == ({},)
