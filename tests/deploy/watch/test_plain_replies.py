"""What was added to a request is taken out of the reply, and nothing else changes."""

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.watch.plain_replies import PlainEvents, plain_reply
from tests.support.watched_server import plain_events
from tests.support.watched_server import plain_reply as served

ADDED = frozenset({"logprobs", "token_ids", "prompt_token_ids", "token_logprobs"})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_reply_is_plain_again(path: str) -> None:
    assert plain_reply(served(path, logprobs=True, return_token_ids=True), ADDED) == served(path)
    ids = frozenset({"token_ids", "prompt_token_ids"})
    asked_for = served(path, logprobs=True)
    assert plain_reply(served(path, logprobs=True, return_token_ids=True), ids) == asked_for, "the client's own stays"


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("1e-7", "1e-07"),
        ("-0.0", "-0.0"),
        ("12345678901234567890123", "12345678901234567890123"),
        ('"\\u00fc\\n"', '"ü\\n"'),
        ('{"z":1,"a":[2,{"logprobs":3}]}', '{"z":1,"a":[2,{"logprobs":3}]}'),
    ],
)
def test_values_and_the_order_of_keys_stay(value: str, written: str) -> None:
    text = f'{{"z": {value}, "choices": [{{"token_ids": [1], "text": "a", "b": {value}}}], "a": null}}'
    got = plain_reply(text.encode(), ADDED).decode()
    assert got == f'{{"z":{written},"choices":[{{"text":"a","b":{written}}}],"a":null}}'
    assert json.loads(got)["z"] == json.loads(value)


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{", b'{"choices": 1}', b'{"choices": [1]}', b'{"choices": []}x', b"\xff"]
    + [b'{"choices":' + b"[" * 100_000 + b"]" * 100_000 + b"}"]
    + [b'{"choices": [{"token_ids": [1], "a": %s}]}' % value for value in (b"1e999", b'"\\ud800"', b"1" * 5000)],
)
def test_what_cannot_be_read_or_written_again_stays_as_it_came(data: bytes) -> None:
    assert plain_reply(data, ADDED) == data
    event = b"data: " + data + b"\n\n"
    assert plain_stream([event]) == event


def plain_stream(pieces: list[bytes]) -> bytes:
    events = PlainEvents(ADDED)
    return b"".join([*map(events.push, pieces), events.last()])


@settings(deadline=None)
@given(st.sets(st.integers(1, 1500)))
def test_a_stream_is_plain_again_wherever_it_is_cut(cuts: set[int]) -> None:
    data = b"".join(plain_events(logprobs=True, return_token_ids=True))
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    assert plain_stream(pieces) == b"".join(plain_events())


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n", b"\r\r"])
def test_the_ends_and_other_lines_of_events_stay(end: bytes) -> None:
    line = end[: len(end) // 2]
    event = plain_events(logprobs=True)[1].removesuffix(b"\n\n")
    got = plain_stream([b"id: 7" + line + b"event: x" + line + event + end])
    assert got == b"id: 7" + line + b"event: x" + line + plain_events()[1].removesuffix(b"\n\n") + end


def test_comments_and_what_is_no_object_pass_unchanged() -> None:
    data = b": ping\n\nevent: x\nid: 1\ndata: hello\n\ndata: {broken\n\ndata: [1]\n\ndata: {\n\ndata: the last"
    assert plain_stream([data]) == data


@pytest.mark.parametrize(
    "kept", ['"finish_reason":"stop"', '"delta":{"role":"assistant"}', '"delta":{"tool_calls":[]}']
)
def test_only_an_event_that_says_nothing_is_left_out(kept: str) -> None:
    event = b'data: {"choices":[{"index":0,"delta":{},"token_ids":[1],"logprobs":{}}]}\n\n'
    assert plain_stream([event]) == b""
    told = event.replace(b'"delta":{}', b'"delta":{},' + kept.encode())
    assert kept.encode() in plain_stream([told])
    usage = event.replace(b"}]}", b'}],"usage":{"completion_tokens":1}}')
    assert b"completion_tokens" in plain_stream([usage])
