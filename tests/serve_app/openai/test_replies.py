"""Chunks of a stream."""

import pytest

from serve_app.openai.replies import ChatFormat, ChoiceDelta, ChunkStream, CompletionFormat, ReplyHead, Usage

HEAD = ReplyHead("cmpl-1", 7, 'a "model"', "fp", ((1, 2),), 2, with_token_ids=True, with_scored=False, with_usage=True)
FIRST = ChoiceDelta(0, "x", (1,), ("first",), first=True, weight_versions=(("v1", 1),))
NEXT = ChoiceDelta(0, "y\u2028", (2,), ("bonus",), weight_versions=(("v1", 1),))


@pytest.mark.parametrize("chunks", [CompletionFormat(), ChatFormat()])
def test_a_chunk_with_usage_has_that_of_its_moment(chunks: CompletionFormat | ChatFormat) -> None:
    stream = ChunkStream(chunks, continuous_usage=True)
    stream.piece(HEAD, FIRST, Usage)
    for count in (2, 3):
        event = stream.piece(HEAD, NEXT, lambda count=count: Usage(completion_tokens=count))  # type: ignore[misc]
        assert b'"completion_tokens":%d,' % count in event and event.isascii()
