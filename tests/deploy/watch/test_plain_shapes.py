"""What was added to a request is taken out of the reply, to the byte."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.exchange.asking import BROUGHT
from deploy.exchange.event_stream import EventEditor
from deploy.watch.plain_shapes import PlainShape
from tests.support.watched_server import plain_events, plain_reply

WORDS = st.sampled_from(["logprobs", "token_ids", 'a"b', "\\", ',"logprobs":', "é", "\u2028", "x"]) | st.text(
    max_size=4
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=8,
)
STYLES = st.sampled_from(
    [{}, {"separators": (",", ":")}, {"indent": 2}, {"ensure_ascii": False}, {"separators": (" , ", " : ")}]
)
OTHERS = st.dictionaries(WORDS.filter(lambda word: word not in BROUGHT | {"choices"}), VALUES, max_size=3)
ADDED = st.dictionaries(
    st.sampled_from(sorted(BROUGHT)), st.tuples(st.sampled_from(["absent", None, []]), VALUES.filter(bool)), max_size=3
)


@st.composite
def objects(draw: Any, more: dict[str, tuple[Any, Any]]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same object without and with what was added, its members in any order."""
    others, added = draw(OTHERS), draw(ADDED)
    both = {key: (value, value) for key, value in others.items()} | added | more
    order = draw(st.permutations(list(both)))
    plain = {key: both[key][0] for key in order if both[key][0] != "absent" or key not in added}
    return plain, {key: both[key][1] for key in order}


@st.composite
def replies(draw: Any) -> tuple[str, str]:
    """A reply without and with what was added."""
    content = draw(WORDS)
    message = {"content": content, "logprobs": draw(VALUES)}
    choice = draw(objects({"message": (message, message)}))
    number = draw(st.integers(1, 2))
    top = draw(objects({"choices": ([choice[0]] * number, [choice[1]] * number)}))
    style = draw(STYLES)
    return json.dumps(top[0], **style), json.dumps(top[1], **style)


@settings(deadline=None)  # a busy machine is no failure
@given(replies())
def test_a_reply_is_plain_again(pair: tuple[str, str]) -> None:
    plain, instrumented = pair
    shape = PlainShape()
    shape.learn(plain, streamed=False)
    assert shape.usable
    assert shape.learned
    again = shape.plain(instrumented, BROUGHT, streamed=False)
    assert again.text == plain
    assert not again.unknown
    assert shape.plain(instrumented, BROUGHT, streamed=False).text == plain, "the plan that was kept says the same"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_the_client_asks_for_itself_stays(path: str) -> None:
    shape = PlainShape()
    shape.learn(plain_reply(path, logprobs=True).decode(), streamed=False)
    both = plain_reply(path, logprobs=True, return_token_ids=True).decode()
    plain = shape.plain(both, frozenset({"token_ids", "prompt_token_ids"}), streamed=False)
    assert plain.text == plain_reply(path, logprobs=True).decode()


def learned_stream() -> PlainShape:
    shape = PlainShape()
    for event in plain_events()[:-1]:
        shape.learn(event.decode().removeprefix("data: "), streamed=True)
    return shape


def plain_stream(shape: PlainShape, pieces: list[bytes]) -> bytes:
    editor = EventEditor(lambda text: shape.plain(text, BROUGHT, streamed=True).text)
    return b"".join([*(data for piece in pieces for data in editor.push(piece)), editor.last()])


@settings(deadline=None)
@given(st.sets(st.integers(1, 1500)))
def test_a_stream_is_plain_again_wherever_it_is_cut(cuts: set[int]) -> None:
    data = b"".join(plain_events(logprobs=True, return_token_ids=True))
    edges = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    pieces = [data[start:end] for start, end in pairwise(edges)]
    assert plain_stream(learned_stream(), pieces) == b"".join(plain_events())


@pytest.mark.parametrize("end", [b"\n\n", b" \n\n", b"\r\n\r\n", b"\r\r"])
def test_the_ends_of_events_stay_as_the_server_writes_them(end: bytes) -> None:
    written = [event.removesuffix(b"\n\n") + end for event in plain_events()]
    with_ids = [
        event.removesuffix(b"\n\n") + end
        for event in plain_events(return_token_ids=True)
        if b'"delta":{},' not in event
    ]
    got = plain_stream(learned_stream(), with_ids)
    assert got == b"".join(event for event in written if b'"delta":{},' not in event)


def test_comments_names_and_what_is_no_json_pass_unchanged() -> None:
    data = b": ping\n\nevent: x\nid: 1\ndata: hello\n\ndata: {broken\n\ndata: [1]\n\ndata: {\n\ndata: the last"
    assert plain_stream(learned_stream(), [data]) == data


def test_an_event_has_its_other_lines_left() -> None:
    event = plain_events(logprobs=True)[1]
    got = plain_stream(learned_stream(), [b"id: 7\nevent: x\n" + event])
    assert got == b"id: 7\nevent: x\n" + plain_events()[1]


def test_empty_events_that_a_server_always_sends_cannot_be_told_from_ours() -> None:
    shape = learned_stream()
    assert shape.usable
    shape.learn('{"choices": [{"index": 0, "delta": {}, "finish_reason": null}]}', streamed=True)
    assert not shape.usable


def test_a_key_that_is_at_times_null_and_at_times_missing_makes_a_shape_useless() -> None:
    shape = PlainShape()
    shape.learn('{"choices": [{"text": "a", "logprobs": null}]}', streamed=False)
    assert shape.usable
    shape.learn('{"choices": [{"text": "a"}]}', streamed=False)
    assert not shape.usable


def test_what_a_server_reports_unasked_stays() -> None:
    shape = PlainShape()
    shape.learn('{"choices": [{"text": "a", "token_ids": [1]}]}', streamed=False)
    text = '{"choices": [{"text": "b", "token_ids": [2]}]}'
    assert shape.plain(text, BROUGHT, streamed=False).text == text


def test_an_unknown_object_is_taken_for_the_one_most_like_it_and_reported() -> None:
    shape = learned_stream()
    text = '{"id": "x", "choices": [{"index": 0, "delta": {"reasoning": "a"}, "logprobs": {}, "finish_reason": null}]}'
    plain = shape.plain(text, BROUGHT, streamed=True)
    assert plain.unknown
    assert plain.text == text.replace("{}", "null")


@pytest.mark.parametrize("text", ["", "[]", "{", '{"choices": [}', "null"])
def test_what_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"Expecting|not a JSON object"):
        PlainShape().learn(text, streamed=False)
