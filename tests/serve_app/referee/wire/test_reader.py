"""From exchanges to answers: the tokens, how they were sampled, and what cannot be judged."""

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.backends.base import ModelInfo
from serve_app.referee.wire.demands import Demands
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS, Exchange
from serve_app.referee.wire.reader import Answer, ExchangeReader
from serve_app.referee.wire.reply import Unreadable
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest

EOS = 2


@pytest.fixture
def reader(folder: Path) -> ExchangeReader:
    return reader_of(folder)


def reader_of(folder: Path, *dialect: str) -> ExchangeReader:
    return ExchangeReader(ModelInfo("tiny", 64, 512, "", str(folder), (EOS,)), Tokenizer.from_folder(folder), *dialect)


def exchange(request: dict[str, Any], *choices: dict[str, Any], path: str = COMPLETIONS, **reply: Any) -> Exchange:
    whole = {"id": "cmpl-1", "choices": [{"index": index, **choice} for index, choice in enumerate(choices)], **reply}
    return Exchange(path, json.dumps(request).encode(), json.dumps(whole).encode(), False, 5.0, 6.0)


def choice(
    ids: list[int], *, logprobs: list[float] | None = None, reason: str = "length", **more: Any
) -> dict[str, Any]:
    reported = None if logprobs is None else {"token_logprobs": logprobs, "tokens": ["x"] * len(logprobs)}
    return {"token_ids": ids, "logprobs": reported, "finish_reason": reason, **more}


def answer_of(reader: ExchangeReader, request: dict[str, Any], *choices: dict[str, Any], **more: Any) -> Answer:
    return reader.answers(exchange(request, *choices, **more))[0]


def test_tokens_logprobs_and_parameters_are_taken_over(reader: ExchangeReader) -> None:
    request = {"prompt": [7, 8, 9], "temperature": 0.5, "top_k": -1, "top_p": 0.9, "seed": 11, "min_tokens": 3}
    answer = answer_of(reader, request, choice([20, 21], logprobs=[-0.5, -1.5]))
    assert answer.request.prompt_token_ids == (7, 8, 9)
    assert (answer.token_ids, answer.logprobs) == ((20, 21), (-0.5, -1.5))
    params = answer.request.params
    assert (params.temperature, params.top_k, params.top_p, params.min_tokens) == (0.5, 0, 0.9, 3)
    assert answer.request.seed == 11
    assert answer.request.request_id == "cmpl-1-0"
    assert answer.untested == ""
    assert (answer.began_at, answer.replica) == (5.0, "server")


def test_the_generation_config_of_the_model_is_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"top_k": 20}')
    model = ModelInfo("tiny", 64, 512, "", str(tmp_path), (EOS,))
    reader = ExchangeReader(model, Tokenizer.from_folder(folder), "vllm", {"top_p": 0.5})
    params = answer_of(reader, {"prompt": [5]}, choice([20])).request.params
    assert (params.top_k, params.top_p) == (20, 0.5)


def test_choices_of_several_prompts_belong_to_theirs(reader: ExchangeReader) -> None:
    whole = exchange({"prompt": [[5, 6], [7]], "n": 2, "seed": 3}, *(choice([20 + n]) for n in range(4)))
    answers = reader.answers(whole)
    assert [answer.request.prompt_token_ids for answer in answers] == [(5, 6), (5, 6), (7,), (7,)]
    assert [answer.request.seed for answer in answers] == [3, 4, 3, 4], (
        "servers draw for each prompt with the same numbers"
    )


def test_requests_without_a_seed_share_one_only_where_an_answer_comes_twice(reader: ExchangeReader) -> None:
    """The detectors take no further evidence from a seed that they have seen."""
    replies: list[dict[str, Any]] = [*({"id": f"cmpl-{number}"} for number in range(20)), *([{"id": ""}] * 20)]
    seeds = [answer_of(reader, {"prompt": [5]}, choice([20]), **reply).request.seed for reply in [*replies, replies[0]]]
    assert len(set(seeds)) == 40 and seeds[-1] == seeds[0]


def test_the_token_that_ended_an_answer_is_added_where_a_server_leaves_it_out(folder: Path) -> None:
    reader = reader_of(folder, "sglang")
    left_out = answer_of(reader, {"prompt": [5]}, choice([20, 21], logprobs=[-1.0, -2.0], reason="stop"))
    assert left_out.token_ids == (20, 21, EOS)
    assert left_out.logprobs == (-1.0, -2.0, None)
    reported = answer_of(reader, {"prompt": [5]}, choice([20, EOS], logprobs=[-1.0, -2.0], reason="stop"))
    assert reported.token_ids == (20, EOS)
    by_text = answer_of(reader, {"prompt": [5], "stop": ["x"]}, choice([20, 21], reason="stop"))
    assert by_text.token_ids == (20, 21), "a stop string may have ended it"
    named = answer_of(reader, {"prompt": [5]}, choice([20, 21], reason="stop", stop_reason="User:"))
    assert named.token_ids == (20, 21), "even where the request names none: servers have texts of their own"
    at_once = {"text": "", "finish_reason": "stop"}
    assert answer_of(reader, {"prompt": "ab"}, at_once, usage={"completion_tokens": 1}).token_ids == (EOS,)
    claimed = answer_of(reader_of(folder, "vllm"), {"prompt": [5]}, choice([20, 21], reason="stop"))
    assert claimed.token_ids == (20, 21) and claimed.broken_limit, "which vLLM never does"


def test_text_alone_is_read_as_tokens_if_their_number_is_right(folder: Path) -> None:
    reader = reader_of(folder, "other")
    text = reader.tokenizer.decode([30, 31, 32])
    ids = tuple(reader.tokenizer.encode_continuation(text))
    plain = {"text": text, "finish_reason": "length"}
    answer = answer_of(reader, {"prompt": "ab"}, plain, usage={"completion_tokens": len(ids)})
    assert answer.token_ids == ids
    with pytest.raises(Unreadable, match="another number of tokens"):
        answer_of(reader, {"prompt": "ab"}, plain, usage={"completion_tokens": len(ids) + 1})
    given = {"text": "ab", "finish_reason": "length", "logprobs": {"token_logprobs": [-1.0], "tokens": ["ab"]}}
    assert answer_of(reader, {"prompt": "ab"}, given).logprobs == (), "which are those of other tokens, maybe"


@pytest.mark.parametrize("dialect", ["vllm", "truespec", "sglang"])
def test_text_that_came_as_it_was_asked_for_is_read_where_it_has_one_spelling(folder: Path, dialect: str) -> None:
    """It is no sample of all answers, so that only what no draw can be counts against it."""
    reader = reader_of(folder, dialect)
    vocabulary = [reader.tokenizer.token_bytes(token) for token in range(reader.tokenizer.vocab_size)]

    def spellings(text: bytes, most: int) -> int:
        """The number of ways to write it in so many tokens, or fewer."""
        if not text or not most:
            return not text
        return sum(spellings(text[len(one) :], most - 1) for one in vocabulary if one and text.startswith(one))

    found, seeds = set(), set()
    for text in ("zq", "zqzq", "anan", "the", "xyz", "in the", "them"):
        ids = tuple(reader.tokenizer.encode_continuation(text))
        plain, usage = {"text": text, "finish_reason": "length"}, {"completion_tokens": len(ids)}
        is_only = spellings(text.encode(), len(ids)) == 1
        found.add(is_only)
        with contextlib.nullcontext() if is_only else pytest.raises(Unreadable, match="in other tokens"):
            answer = answer_of(reader, {"prompt": "ab", "seed": 7}, plain, usage=usage)
            assert answer.token_ids == ids and not answer.broken_limit
            seeds.add(answer.request.seed)
    assert found == {True, False} and len(seeds) == 1
    with pytest.raises(Unreadable, match="does not say how many"):
        answer_of(reader, {"prompt": "ab"}, {"text": "zq", "finish_reason": "length"})


@pytest.mark.parametrize(
    ("request_body", "reason"),
    [
        ({"mirostat": 2}, "mirostat"),
        ({"best_of": 4}, "best_of"),
        ({"n": 2, "best_of": 4}, "best_of"),
        ({"temperature": 1000}, "temperature"),
    ],
)
def test_what_cannot_be_repeated_is_not_tested(
    reader: ExchangeReader, request_body: dict[str, Any], reason: str
) -> None:
    answer = answer_of(reader, {"prompt": [5], **request_body}, choice([20], logprobs=[-1.0]))
    assert reason in answer.untested
    assert answer.logprobs == (-1.0,), "its logprobs are compared all the same"


@pytest.mark.parametrize(
    "request_body", [{"response_format": {"type": "json_object"}}, {"tool_choice": "required"}, {"guided_regex": "a+"}]
)
def test_logprobs_that_a_grammar_leaves_are_not_the_models(
    reader: ExchangeReader, request_body: dict[str, Any]
) -> None:
    """vLLM applies the grammar's mask to the logits before it takes what it calls raw logprobs."""
    whole = exchange({"prompt": [5], **request_body}, choice([20], logprobs=[-1.0]))
    for dialect, compared in (("vllm", ()), ("llama.cpp", (-1.0,))):
        (answer,) = reader.answers(dataclasses.replace(whole, dialect=dialect))
        assert next(iter(request_body)) in answer.untested
        assert answer.logprobs == compared


SECRET = "the clients own words"


def test_a_reason_holds_none_of_a_clients_words(reader: ExchangeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies: tuple[dict[str, Any], ...] = ({SECRET: 1}, {"temperature": SECRET}, {"logit_bias": {SECRET: 1}})
    for body in (*bodies, {"stop_token_ids": [SECRET]}):
        untested = answer_of(reader, {"prompt": [5], **body}, choice([20])).untested
        assert untested and SECRET not in untested

    def refuse(*_: Any, **__: Any) -> list[int]:
        raise InvalidRequest("messages", f"The template refuses {SECRET}.")

    monkeypatch.setattr(Tokenizer, "encode_chat", refuse)
    with pytest.raises(Unreadable) as error:
        answer_of(reader, {"messages": [{"role": "user", "content": SECRET}]}, choice([20]), path=CHAT)
    assert SECRET not in str(error.value)


@pytest.mark.parametrize("ids", [[20.5], [True], "ab"])
def test_ids_that_are_none_are_unreadable(reader: ExchangeReader, ids: Any) -> None:
    with pytest.raises(Unreadable):
        answer_of(reader, {"prompt": [5]}, choice(ids))
    with pytest.raises(Unreadable):
        answer_of(reader, {"prompt": "x"}, choice([20], prompt_token_ids=ids))


def test_replicas_have_names_that_can_be_shown_and_an_end(reader: ExchangeReader) -> None:
    def replica(name: str) -> str:
        return reader.answers(dataclasses.replace(exchange({"prompt": [5]}, choice([20])), replica=name))[0].replica

    assert replica("pod-\udc80\n7") == "pod-??7"
    names = {replica(f"request-{number}") for number in range(1000)}
    assert len(names) <= 256
    assert "others" in names


def test_fields_that_change_no_distribution_are_no_reason(reader: ExchangeReader) -> None:
    harmless = {"user": "u", "stream_options": {}, "stop": ["x"], "mirostat": 0, "response_format": {"type": "text"}}
    for fields in (harmless, {"n": 2}, {"n": 2, "best_of": 2}):
        answers = reader.answers(exchange({"prompt": [5], **fields}, *[choice([20])] * fields.get("n", 1)))
        assert {answer.untested for answer in answers} == {""}


def test_the_strata_say_where_a_token_stood(reader: ExchangeReader) -> None:
    answer = answer_of(reader, {"prompt": [5] * 20, "temperature": 0}, choice(list(range(20, 60)), reason="length"))
    strata = answer.strata
    assert len(strata) == 40
    assert {"all", "greedy", "position_0", "length_256", "ended_length", "computed_prefix"} == set(strata[0])
    assert "position_1_7" in strata[7]
    assert "position_8_31" in strata[8]
    assert "position_32_127" in strata[39]
    usage = {"completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 16}}
    assert "cached_prefix" in answer_of(reader, {"prompt": [5]}, choice([20]), usage=usage).strata[0]


@pytest.mark.parametrize(
    ("request_body", "served", "reason"),
    [
        ({"prompt": [5] * 60}, choice([20] * 5), "--max-model-len"),
        ({"prompt": {"a": 1}}, choice([20]), "neither a text nor token ids"),
        ({"prompt": [5]}, choice([]), "empty"),
        ({"prompt": [[5], [6]]}, choice([20]), "2 prompts have 1 choices"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, choice([20]), "more than text"),
    ],
)
def test_what_cannot_be_computed_again_says_why(
    reader: ExchangeReader, request_body: dict[str, Any], served: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unreadable, match=reason):
        answer_of(reader, request_body, served, path=CHAT if "messages" in request_body else COMPLETIONS)


@pytest.mark.parametrize("counted", [{"usage": {"prompt_tokens": 9}}, {"timings": {"prompt_n": 4, "cache_n": 5}}])
def test_a_prompt_that_the_server_encodes_otherwise_is_unreadable(
    reader: ExchangeReader, counted: dict[str, Any]
) -> None:
    """Its logprobs would be those after another text."""
    with pytest.raises(Unreadable, match="another number of tokens"):
        answer_of(reader, {"prompt": [5, 6]}, choice([20]), **counted)
    reported = choice([20], prompt_token_ids=[1] * 9)
    assert len(answer_of(reader, {"prompt": "x"}, reported, **counted).request.prompt_token_ids) == 9


@pytest.mark.parametrize(("dialect", "text"), [("llama.cpp", "a\nb"), ("transformers", "a b")])
def test_parts_of_a_message_are_joined_as_the_server_does(
    reader: ExchangeReader, monkeypatch: pytest.MonkeyPatch, dialect: str, text: str
) -> None:
    seen: list[Any] = []

    def encode(_: Tokenizer, messages: Any, **__: Any) -> list[int]:
        seen.extend(messages)
        return [5]

    monkeypatch.setattr(Tokenizer, "encode_chat", encode)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    whole = exchange({"messages": [{"role": "user", "content": parts}]}, choice([20]), path=CHAT)
    reader.answers(dataclasses.replace(whole, dialect=dialect))
    assert seen[0]["content"] == text


@pytest.mark.parametrize(
    ("request_body", "found"),
    [
        ({"max_tokens": 3}, ""),
        ({"max_tokens": 2, "max_new_tokens": 2}, "it has 3 tokens, and max_tokens is 2"),
        ({"max_tokens": 2, "n_predict": 3}, ""),  # which of them counts depends on the vendor
        ({"max_completion_tokens": 2}, ""),  # which completions do not have
        ({"max_tokens": 2, "echo": True}, ""),
        ({"max_tokens": -1}, ""),  # no limit to llama.cpp
        ({"max_tokens": 2.5}, ""),
        ({"max_tokens": 3, "stop_token_ids": [21]}, ""),  # which some vendors ignore
        ({}, ""),  # how many tokens there may be is the server's own default
    ],
)
def test_an_answer_is_compared_with_the_limits_of_its_request(
    reader: ExchangeReader, request_body: dict[str, Any], found: str
) -> None:
    assert answer_of(reader, {"prompt": [5], **request_body}, choice([20, 21, 22])).broken_limit == found


def test_each_choice_is_compared_with_the_request_where_the_vendor_keeps_to_it(folder: Path) -> None:
    goes_on, too_few = "its text goes on behind stop string 0, or holds it", "1 choices came, and the request demands 2"
    bad_word = f"a bad word ends with token {len(reader_of(folder).tokenizer.encode_continuation('abc')) - 1}"
    for body, found in (
        *(({"stop": "b"}, goes_on), ({"n": 2}, too_few), ({"n": "x"}, ""), ({"guided_choice": 7}, "")),
        *(({"bad_words": ["abc"]}, bad_word), ({"bad_words": ["hat"]}, "")),
    ):
        for dialect in ("vllm", "truespec", "llama.cpp"):
            reader = reader_of(folder, dialect)
            ids = [*reader.tokenizer.encode_continuation("abc"), EOS]
            answer = answer_of(reader, {"prompt": [5], **body}, choice(ids, reason="stop", text="abc"))
            assert answer.broken_limit == ("" if dialect == "llama.cpp" else found)


def test_a_comparison_that_fails_loses_no_answer(reader: ExchangeReader, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> str:
        raise ArithmeticError

    monkeypatch.setattr(Demands, "broken_form", failing)
    assert answer_of(reader, {"prompt": [5], "stop": "a"}, choice([30])).broken_limit == ""
