"""The request against the answer: what breaks its limits is found without a replay, whether it was selected or not."""

from random import Random

import pytest

from serve_app.referee.records.records import Records
from serve_app.referee.wire.demands import broken_limit
from serve_app.telemetry.metrics import Metrics, Sink
from speculative.request import FinishReason, Request, SamplingParams, TokenDelta, TokenKind
from tests.support.front_ends import DeltaSource, observed

EOS = 2


@pytest.mark.parametrize(
    ("changes", "tokens", "ended", "found"),
    [
        ({}, (5, 6, 7, 8), FinishReason.LENGTH, ""),
        ({}, (5, 6), FinishReason.STOP, ""),
        ({}, (5, 6, EOS), FinishReason.STOP, ""),
        ({"max_tokens": 3}, (5, 6, 7, 8), FinishReason.LENGTH, "it has 4 tokens, and max_tokens is 3"),
        ({}, (5, EOS, 7, 8), FinishReason.LENGTH, "token 1 ends the answer, and others follow"),
        ({"ignore_eos": True}, (5, EOS, 7, 8), FinishReason.LENGTH, ""),
        ({"stop_token_ids": (7,)}, (5, 6, 7, 8), FinishReason.LENGTH, "token 2 ends the answer, and others follow"),
        ({"min_tokens": 3}, (5, 6, 7, EOS), FinishReason.STOP, ""),
        ({"min_tokens": 3}, (5, EOS), FinishReason.STOP, "token 1 ends the answer, and min_tokens is 3"),
        ({}, (5, 6), FinishReason.LENGTH, "it ended for its length with 2 tokens, and there was room for 4"),
        ({"max_tokens": 100}, (5, 6, 7, 8, 9), FinishReason.LENGTH, ""),
        ({"bad_words": ((7, 8), (6, 7), (9,))}, (5, 6, 7, 8), FinishReason.LENGTH, "a bad word ends with token 2"),
    ],
)
def test_what_a_request_demands_of_its_answer(
    changes: dict[str, object], tokens: tuple[int, ...], ended: FinishReason, found: str
) -> None:
    params = SamplingParams(**{"max_tokens": 4, **changes})  # type: ignore[arg-type]
    assert broken_limit(params, tokens, (EOS,), finish_reason=ended, room=5) == found


@pytest.mark.parametrize(("num_tokens", "found"), [(3, ""), (4, "it has 4 tokens, and max_tokens is 3")])
async def test_an_answer_too_long_goes_to_the_referee_though_it_was_not_selected(num_tokens: int, found: str) -> None:
    ended: list[str] = []
    kinds = (TokenKind.BONUS,) * num_tokens
    source = observed(
        DeltaSource(TokenDelta("", tuple(range(5, 5 + num_tokens)), kinds, finish_reason=FinishReason.LENGTH)),
        Metrics(Sink(), model_name="m", pool="decode"),
        records=Records("r1", 256, 4, (EOS,)),
        ended=lambda record, checked: ended.append(record.broken_limit if checked else ""),
    )
    request = Request("cmpl-1-0", (1, 2), SamplingParams(max_tokens=3))
    assert [len(delta.token_ids) async for delta in source.stream([request])] == [num_tokens]
    assert ended == [found]


def test_the_first_bad_word_that_ends_is_found_wherever_it_is() -> None:
    random = Random(0)
    for _ in range(300):
        ids = [random.randrange(3) for _ in range(random.randrange(12))]
        words = [tuple(random.randrange(3) for _ in range(random.randrange(1, 4))) for _ in range(2)]
        ends = (
            end
            for end in range(len(ids))
            for word in words
            if tuple(ids[max(0, end + 1 - len(word)) : end + 1]) == word
        )
        first = next(ends, None)
        found = broken_limit(SamplingParams(max_tokens=99, bad_words=tuple(words), ignore_eos=True), ids)
        assert found == ("" if first is None else f"a bad word ends with token {first}")
