"""What is read off a reply: of recorded ones of each server, and of made-up ones."""

import json
from pathlib import Path
from typing import Any

import pytest

from serve_app.referee.wire.exchange import CHAT, COMPLETIONS, Exchange
from serve_app.referee.wire.reply import Choice, EventReader, Reply, Unreadable, read_reply

REPLIES = Path(__file__).with_name("replies")
WITH_IDS = ("vllm", "vllm-ngram", "truespec")
GREEDY_OR_SEEDED = ("logprobs", "sampled", "stop-string", "two-choices")
KINDS = (*GREEDY_OR_SEEDED, "defaults", "eos", "wide-characters")


def recorded(server: str, name: str) -> Exchange:
    kept = json.loads((REPLIES / server / f"{name}.json").read_text(encoding="utf-8"))
    request = json.dumps(kept["request"]).encode()
    return Exchange(kept["path"], request, kept["reply"].encode(), kept["streamed"], 0.0, 0.0)


def read(server: str, name: str) -> Reply:
    return read_reply(recorded(server, name))


def made_up(*parts: Any, path: str = COMPLETIONS, streamed: bool = True) -> Exchange:
    texts = [part if isinstance(part, str) else json.dumps(part) for part in parts]
    body = "".join(f"data: {text}\n\n" for text in texts) if streamed else texts[0]
    return Exchange(path, b"{}", body.encode(), streamed, 0.0, 0.0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("path", ["chat", "completions"])
@pytest.mark.parametrize("server", WITH_IDS)
def test_every_token_has_its_logprob_streamed_or_not(server: str, path: str, kind: str) -> None:
    whole, streamed = read(server, f"{path}-{kind}"), read(server, f"{path}-streamed-{kind}")
    for reply in (whole, streamed):
        assert sorted(reply.choices) == list(range(2 if kind == "two-choices" else 1))
        for choice in reply.choices.values():
            assert choice.token_ids and choice.logprobs and choice.prompt_token_ids
            assert len(choice.token_ids) == len(choice.logprobs)
            assert all(logprob is not None and logprob <= 0 for logprob in choice.logprobs)
            assert choice.finish_reason == ("stop" if kind in ("eos", "stop-string") else "length")
    assert sum(len(choice.token_ids or ()) for choice in whole.choices.values()) == whole.num_tokens
    for index, choice in whole.choices.items():
        other = streamed.choices[index]
        assert choice.prompt_token_ids == other.prompt_token_ids
        if kind in GREEDY_OR_SEEDED and server != "vllm-ngram":
            assert (choice.token_ids, choice.text) == (other.token_ids, other.text)


def test_usage_is_read_where_it_is() -> None:
    ours = read("truespec", "chat-streamed-usage")
    assert (ours.num_tokens, ours.num_cached) == (3, 32)
    assert read("vllm", "chat-streamed-logprobs").num_tokens is None
    assert read("llama.cpp", "chat-streamed-logprobs").num_tokens == 6, "of its timings"
    assert read("llama.cpp", "completions-logprobs").num_cached == 4


@pytest.mark.parametrize("name", ["chat-logprobs", "chat-streamed-logprobs", "completions-logprobs"])
def test_llama_cpp_gives_ids_with_logprobs_and_pieces(name: str) -> None:
    choice = read("llama.cpp", name).choices[0]
    assert choice.token_ids and choice.logprobs and choice.pieces
    assert len(choice.token_ids) == len(choice.logprobs) == len(choice.pieces) == 6
    assert b"".join(piece or b"" for piece in choice.pieces).decode() == choice.text
    assert choice.prompt_token_ids is None


def test_a_stream_of_llama_cpp_ends_without_the_token_that_ended_it() -> None:
    streamed, whole = read("llama.cpp", "chat-streamed-eos"), read("llama.cpp", "chat-eos")
    assert streamed.num_tokens == whole.num_tokens == 24
    assert streamed.choices[0].token_ids == (whole.choices[0].token_ids or [])[:-1]


def test_logprobs_that_llama_cpp_makes_up_are_not_believed() -> None:
    choice = read("llama.cpp-speculation", "spec-completions").choices[0]
    assert len(choice.token_ids or ()) == 8
    assert None in (choice.logprobs or ()) and any(logprob is not None for logprob in choice.logprobs or ())


def test_probabilities_after_sampling_are_no_logprobs() -> None:
    assert set(read("llama.cpp", "chat-post-sampling").choices[0].logprobs or ()) == {None}


@pytest.mark.parametrize("kind", ["sampled", "eos", "stop-string", "defaults"])
@pytest.mark.parametrize("path", ["chat", "completions", "chat-streamed", "completions-streamed"])
@pytest.mark.parametrize("server", ["transformers", "transformers-sampling"])
def test_transformers_gives_text_and_numbers_only(server: str, path: str, kind: str) -> None:
    reply = read(server, f"{path}-{kind}")
    choice = reply.choices[0]
    assert (choice.token_ids, choice.logprobs) == (None, None)
    assert choice.text and reply.num_tokens
    assert choice.finish_reason == ("stop" if kind in ("eos", "stop-string") else "length")


# Made-up replies: SGLang's forms, and what is broken.


def test_ids_may_stand_elsewhere() -> None:
    """As of SGLang's chats, and in the place of texts."""
    logprobs = {"tokens": ["token_id:7", "token_id:12"], "token_logprobs": [-1.0, -2.0]}
    wire = {"text": "ab", "logprobs": logprobs, "finish_reason": "length"}
    assert read_reply(made_up({"choices": [wire]}, streamed=False)).choices[0].token_ids == [7, 12]
    whole = {"message": {"content": "ab"}, "finish_reason": "stop", "response_token_ids": [7, 8], "index": 0}
    choice = read_reply(made_up({"choices": [whole | {"prompt_token_ids": [5]}]}, path=CHAT, streamed=False)).choices[0]
    assert (choice.token_ids, choice.prompt_token_ids) == ([7, 8], (5,))


def test_streamed_chats_of_sglang_have_them_in_an_event_of_their_own() -> None:
    def event(index: int, text: str, logprob: float, reason: str | None) -> dict[str, Any]:
        entry = {"token": text, "logprob": logprob, "bytes": list(text.encode())}
        wire = {"index": index, "delta": {"content": text}, "logprobs": {"content": [entry]}, "finish_reason": reason}
        return {"id": "one", "choices": [wire]}

    ids = {"choices": [], "sglext": {"input_ids": [5, 6], "output_ids": [[7, 8], [9]]}}
    parts = [event(0, "a", -1.0, None), event(1, "c", -3.0, "stop"), event(0, "b", -2.0, "length"), ids, "[DONE]"]
    reply = read_reply(made_up(*parts, path=CHAT))
    assert [(one.token_ids, one.logprobs, one.text) for one in reply.choices.values()] == [
        ([7, 8], [-1.0, -2.0], "ab"),
        ([9], [-3.0], "c"),
    ]
    assert {one.prompt_token_ids for one in reply.choices.values()} == {(5, 6)}


def test_calls_of_tools_and_thoughts_are_noted() -> None:
    for delta in ({"tool_calls": [{"index": 0}]}, {"reasoning_content": "hm"}, {"reasoning": "hm"}):
        parts = [{"choices": [{"delta": delta}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]}]
        assert read_reply(made_up(*parts, path=CHAT)).choices[0].called


def test_the_parts_of_calls_are_put_together() -> None:
    def event(index: int, **function: Any) -> dict[str, Any]:
        return {"choices": [{"delta": {"tool_calls": [{"index": index, "function": function}]}}]}

    parts = [event(0, name="a", arguments=""), event(0, arguments='{"x"'), event(1, name="b", arguments="{"), END]
    parts += [event(0, arguments=": 1}"), event(1, arguments="}")]
    assert list(read_reply(made_up(*parts, path=CHAT)).choices[0].calls.values()) == [("a", '{"x": 1}'), ("b", "{}")]
    calls = [{"function": {"name": "a", "arguments": "{}"}}, {"function": {"name": "b", "arguments": {"x": 1}}}]
    whole = {"choices": [{"message": {"tool_calls": calls}, "finish_reason": "tool_calls"}], "prompt_token_ids": [5, 6]}
    reply = read_reply(made_up(whole, streamed=False, path=CHAT))
    assert reply.choices[0].prompt_token_ids == (5, 6)
    assert list(reply.choices[0].calls.values()) == [("a", "{}"), ("b", '{"x": 1}')]


def test_comments_and_blank_lines_of_a_stream_are_no_part_of_it() -> None:
    event = json.dumps(END | {"error": None})
    body = f": ping\r\n\r\nevent: message\r\nid: 1\r\ndata:{event}\r\n\r\ndata: [DONE]\r\n\r\n"
    assert read_reply(Exchange(COMPLETIONS, b"{}", body.encode(), True, 0.0, 0.0)).choices[0].text == "a"


END = {"choices": [{"text": "a", "finish_reason": "stop"}]}


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([{"choices": [{"text": "a", "finish_reason": None}]}, "[DONE]"], "ended early"),
        ([END, {"choices": [{"index": 1, "text": "a"}]}], "ended early"),
        ([END, {"error": {"message": "out of memory"}}], "reported an error"),
        ([{"choices": []}], "no choices"),
        (["[1, 2]"], "not a completion"),
        (["[" * 100_000], "not a completion"),
        ([{"choices": [{"index": "first"}]}], "not a completion"),
        ([{"choices": [{"text": "a", "logprobs": {"token_logprobs": ["low"]}}]}], "not a completion"),
        ([{"choices": [{"text": "a", "token_ids": 5}]}], "not a completion"),
        ([{"choices": [{"text": "a", "finish_reason": "stop", "token_ids": [True]}]}], "not a completion"),
        ([{"usage": [1], "choices": []}], "not a completion"),
    ],
)
def test_what_is_no_answer_is_refused(parts: list[Any], reason: str) -> None:
    with pytest.raises(Unreadable, match=reason):
        read_reply(made_up(*parts))


# Streams as they come, and what the audit reads besides.


def test_events_are_read_wherever_the_stream_is_cut() -> None:
    kept = recorded("vllm", "chat-streamed-wide-characters").reply + 'data: {"text": "a\u2028b"}\r\n\r\n'.encode()
    whole = list(EventReader().push(kept))
    for size in (1, 7, 4096):
        events = EventReader()
        pieces = [kept[begin : begin + size] for begin in range(0, len(kept), size)]
        assert [event for piece in pieces for event in events.push(piece)] == whole
    assert whole[-1] == {"text": "a\u2028b"}


def test_candidates_are_read_in_both_forms() -> None:
    by_text = Choice(top_logprobs=[{"token_id:7": -0.5, " a": -1, "b": None}, None])
    assert by_text.candidates() == [[("token_id:7", 7, -0.5), (" a", None, -1.0)], []]
    (first, *_) = read("llama.cpp", "chat-logprobs").choices[0].candidates() or [[]]
    assert first and first[0].token_id is not None and first[0].logprob <= 0
    assert Choice().candidates() is None
    listed = [{"token": "c", "logprob": None}, {"token": "d", "logprob": -2}, 7]
    odd = Choice(top_logprobs=[{"a": "x", "b": -1}, listed])
    assert odd.candidates() == [[("b", None, -1.0)], [("d", None, -2.0)]]


def test_scores_are_read_where_they_are_or_among_the_candidates() -> None:
    assert Choice(scored_logprobs=[{"7": -1}]).scored([7]) == [{7: -1.0}]
    among = Choice(top_logprobs=[{"token_id:7": -1.0, "token_id:8": -2.0}])
    assert among.scored([8, 9]) == [{8: -2.0}]
    assert among.scored([]) is None and Choice().scored([8]) is None


def test_logprobs_of_a_prompt_are_those_of_its_own_tokens() -> None:
    choice = Choice(prompt_logprobs=[None, {"9": {"logprob": -1.0}, "7": {"logprob": -2.0}}, None])
    assert choice.logprobs_of_prompt((5, 7, 8)) == [-2.0, None]
    assert choice.logprobs_of_prompt("two words") == [-1.0, None], "the first is the token's own"
    assert choice.logprobs_of_prompt((5, 7)) == [None], "another number of tokens"
    assert Choice().logprobs_of_prompt((5, 7)) is None


def test_logprobs_of_a_chat_s_prompt_stand_beside_its_choices() -> None:
    """They are all the choices' and are judged once."""
    rows = [None, {"9": {"logprob": -1.0}}]
    reply = Reply(is_chat=True)
    reply.add({"choices": [{"index": index, "message": {"content": "a"}} for index in (0, 1)], "prompt_logprobs": rows})
    assert [reply.choices[index].prompt_logprobs for index in (0, 1)] == [rows, None]
