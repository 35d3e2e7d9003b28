"""Chunks of a stream: the ones that are written in a short way are those that the long way gives."""

import dataclasses
from typing import Any

import pytest

from serve_app.openai.replies import ChatFormat, ChoiceDelta, ChunkStream, CompletionFormat, ReplyHead, Usage, sse_event
from tests.support.loops import for_each

HEAD = ReplyHead("cmpl-1", 7, 'a "model"', "fp", ((1, 2),), 2, with_token_ids=True, with_scored=False, with_usage=True)
FIRST = ChoiceDelta(0, "x", (1,), ("first",), first=True, weight_versions=(("v1", 1),))
NEXT = ChoiceDelta(0, "y", (2,), ("bonus",), weight_versions=(("v1", 1),))
SPOKEN = ("", " word", '" and \\', "\n\u2028\x00", "\N{SLIGHTLY SMILING FACE}", '"token_ids":[-1]', "\0the text\0")


def written_long(chunks: CompletionFormat | ChatFormat, head: ReplyHead, piece: ChoiceDelta) -> bytes:
    return sse_event(chunks.chunk(head, piece))


@for_each((CompletionFormat(), ChatFormat()), lambda chunks: chunks.operation)
@for_each(
    (
        {},
        {"with_token_ids": False},
        {"with_usage": False},
        {"with_token_kinds": True},
        {"model": '"token_ids":[-1]'},
        {"model": '{"text":"\\u0000the text\\u0000"}'},
    ),
    str,
)
def test_every_chunk_is_what_the_format_says(fields: dict[str, Any], chunks: CompletionFormat | ChatFormat) -> None:
    head = dataclasses.replace(HEAD, **fields)
    stream = ChunkStream(chunks, continuous_usage=False)
    stream.piece(head, FIRST, Usage)
    for text in SPOKEN:
        for ids in ((5,), (5, 60, 700), ()):
            piece = NEXT._replace(text=text, token_ids=ids, token_kinds=("bonus",) * len(ids))
            assert stream.piece(head, piece, Usage) == written_long(chunks, head, piece)


@for_each((CompletionFormat(), ChatFormat()), lambda chunks: chunks.operation)
def test_what_changes_within_a_stream_changes_in_its_chunks(chunks: CompletionFormat | ChatFormat) -> None:
    stream = ChunkStream(chunks, continuous_usage=False)
    stream.piece(HEAD, FIRST, Usage)
    switched = dataclasses.replace(HEAD, system_fingerprint="other")
    for head, piece in (
        (HEAD, NEXT),
        (HEAD, NEXT._replace(index=1)),
        (HEAD, NEXT._replace(weight_versions=(("v2", 1),))),
        (HEAD, NEXT._replace(weight_versions=(("v1", 1), ("v2", 1)))),
        (switched, NEXT),
        (HEAD, NEXT._replace(reasoning="because")),
        (HEAD, NEXT._replace(finish_reason="stop", stop_reason="x", unrepeatable="")),
        (HEAD, NEXT),
    ):
        assert stream.piece(head, piece, Usage) == written_long(chunks, head, piece)


@pytest.mark.parametrize("chunks", [CompletionFormat(), ChatFormat()])
def test_a_chunk_with_usage_has_that_of_its_moment(chunks: CompletionFormat | ChatFormat) -> None:
    stream = ChunkStream(chunks, continuous_usage=True)
    stream.piece(HEAD, FIRST, Usage)
    for count in (2, 3):
        event = stream.piece(HEAD, NEXT, lambda count=count: Usage(completion_tokens=count))  # type: ignore[misc]
        assert b'"completion_tokens":%d,' % count in event
