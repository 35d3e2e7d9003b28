"""What a client was sent is compared with what it asked for, in its own words."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from serve_app.openai.prepared_request import PreparedRequest
from serve_app.referee.client_demands import ClientDemands, Delivered, spellings, vllm_spellings
from serve_app.text.tokenizer import StopStrings, Tokenizer
from tests.support.front_ends import chat, completion, fake_front_end

EOS = 2


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def said(text: str, *, reason: str = "stop", **more: Any) -> Delivered:
    return Delivered(text, encode(text), reason, **more)


@pytest.mark.parametrize(
    ("body", "answer", "found"),
    [
        ({}, said("anything"), ""),
        ({"stop": "END"}, said("before", stop_reason="END"), ""),
        ({"stop": "END"}, said("before END after"), "its text goes on behind stop string 0, or holds it"),
        ({"stop": ["x", "END"]}, said("before END"), "its text goes on behind stop string 1, or holds it"),
        ({"stop": "END", "include_stop_str_in_output": True}, said("before END", stop_reason="END"), ""),
        (
            {"stop": "END", "include_stop_str_in_output": True},
            said("END after", reason="length"),
            "its text goes on behind stop string 0, or holds it",
        ),
        ({"stop": "END"}, said("before", stop_reason="FIN"), "a stop string ended it that the request does not name"),
        ({"stop": "a", "min_tokens": 3}, said("abcd", unsearched=3), ""),
        ({"stop": "d", "min_tokens": 3}, said("abc"), "it ended with 3 tokens, and min_tokens is 3"),
        ({"max_tokens": 3}, said("abcd", reason="length"), "it has 4 tokens, and max_tokens is 3"),
        ({"max_completion_tokens": 3, "max_tokens": 9}, said("abcd"), "it has 4 tokens, and max_tokens is 3"),
        (
            {"max_tokens": 9},
            said("abcd", reason="length"),
            "it ended for its length with 4 tokens, and there was room for 9",
        ),
        ({}, said("abcd", reason="length"), ""),  # the server's own limit
        ({"stop_token_ids": [98]}, said("abcd"), "token 1 ends the answer, and others follow"),
        ({"bad_words": ["bc"]}, said("abcd"), "a bad word ends with token 2"),
        ({"bad_words": ["bx", "cd"]}, said("abcd"), "a bad word ends with token 3"),
        ({"bad_words": ["bd"]}, said("abcd"), ""),
        ({"response_format": {"type": "json_object"}}, said("[1]"), "it is no JSON object"),
        ({"response_format": {"type": "text"}}, said("[1]"), ""),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            said("1"),
            "it breaks `type` of its JSON schema",
        ),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, said("maybe"), "it is none of its choices"),
        ({"guided_regex": "[0-9]+"}, said("12a"), "it does not match its regular expression"),
        ({"guided_regex": "[0-9]+"}, said("12a", shown_whole=False), ""),  # a parser left out the rest
        ({"structured_outputs": {"choice": ["yes", "no"]}, "stop": "s"}, said("ye", stop_reason="s"), ""),
        ({"guided_regex": "[0-9]+", "include_stop_str_in_output": True}, said("12<end>"), ""),  # its last token's text
        (
            {"guided_regex": "[0-9]+", "include_stop_str_in_output": True},
            said("12<end>", reason="length"),
            "it does not match its regular expression",
        ),
    ],
)
def test_what_a_request_demands(body: dict[str, Any], answer: Delivered, found: str) -> None:
    assert ClientDemands.of(body, encode).broken(answer, (EOS,), room=9) == found


def test_a_bad_word_is_also_one_behind_a_space() -> None:
    def as_one(text: str) -> list[int]:
        return {"cat": [5], " cat": [6], "dog": [7], " dog": [8, 7]}[text]

    assert spellings("cat", as_one) == vllm_spellings("cat", as_one) == [(5,), (6,)]
    assert spellings(" dog", as_one) == [(7,), (8, 7)]
    assert vllm_spellings(" dog", as_one) == [(7,)], "where that takes as many tokens"


async def reported(tokenizer: Tokenizer, wire: Any, text: str, change: Callable[[PreparedRequest], Any]) -> list[str]:
    """What a front end reports of the choices of one request."""
    front, _, script = fake_front_end(tokenizer)
    script.say(text)
    found: list[str] = []
    front.report_broken_to(lambda request_id, why: found.append(why))
    await front.collect(change(await front.prepare(wire)))
    streamed = list(found)
    async for _ in front.events(change(await front.prepare(wire))):
        pass
    assert found == streamed * 2, "streamed or not"
    return streamed


def as_it_is(job: PreparedRequest) -> PreparedRequest:
    return job


def without_stops(job: PreparedRequest) -> PreparedRequest:
    return replace(job, stops=StopStrings(()))


def one_choice(job: PreparedRequest) -> PreparedRequest:
    return replace(job, groups=tuple(group[:1] for group in job.groups))


ALL_SHOWN = {"include_stop_str_in_output": True, "skip_special_tokens": False}


@pytest.mark.parametrize(
    ("fields", "change", "found"),
    [
        ({"stop": ["STOP"]}, as_it_is, []),
        ({"stop": ["STOP"]}, without_stops, ["its text goes on behind stop string 0, or holds it"]),
        ({"stop": ["STOP"], "include_stop_str_in_output": True}, as_it_is, []),
        ({"stop": ["STOP", "one"], "min_tokens": 2}, as_it_is, []),
        ({"n": 2}, as_it_is, []),
        ({"n": 2}, one_choice, ["1 choices were generated, and n is 2"]),
        ({"structured_outputs": {"choice": ["one two", "three"]}}, as_it_is, ["it is none of its choices"]),
        ({"structured_outputs": {"choice": ["one two STOP four"]}, **ALL_SHOWN}, as_it_is, []),
        ({"bad_words": ["two"]}, as_it_is, ["a bad word ends with token 1"]),
        ({"max_tokens": 4}, as_it_is, []),
    ],
)
async def test_the_front_end_compares_what_it_sends_with_what_came(
    tokenizer: Tokenizer, fields: dict[str, Any], change: Callable[[PreparedRequest], Any], found: list[str]
) -> None:
    """The fake engine says what it is told to, whatever the request."""
    assert await reported(tokenizer, completion(**fields), "one two STOP four", change) == found
    if "max_tokens" not in fields:
        assert await reported(tokenizer, chat(**fields), "one two STOP four", change) == found


@pytest.mark.parametrize("name", ["of", "broken"])
async def test_a_comparison_that_fails_changes_no_reply_and_is_logged_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    def failing(*_: Any, **__: Any) -> str:
        raise ArithmeticError("a client's own words")

    monkeypatch.setattr(ClientDemands, name, failing)
    front, _, script = fake_front_end(tokenizer)
    for fields in ({}, {"structured_outputs": {"choice": ["one two"]}}):
        script.say("one two")
        reply = await front.collect(await front.prepare(completion(**fields)))
        assert reply["choices"][0]["text"] == "one two"
    (logged,) = caplog.records
    assert "ArithmeticError" in logged.getMessage() and "own words" not in caplog.text


async def test_a_structure_is_compared_beside_the_event_loop(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_loop: list[bool] = []

    def noted(*_: Any) -> str:
        on_loop.append(threading.current_thread() is threading.main_thread())
        return ""

    monkeypatch.setattr(ClientDemands, "broken", noted)
    assert await reported(tokenizer, completion(structured_outputs={"choice": ["a"]}), "a", as_it_is) == []
    assert on_loop == [False, False]
