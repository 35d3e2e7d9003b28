"""The limits that a client's request sets, and that an answer keeps to whatever the model says."""

import sys
from collections.abc import Collection, Sequence

from speculative.request import FinishReason, SamplingParams


def broken_limit(
    params: SamplingParams,
    token_ids: Sequence[int],
    end_token_ids: Collection[int] = (),
    *,
    finish_reason: FinishReason | None = None,
    room: int | None = None,
) -> str:
    """The limit that an answer breaks, in words; "" = none.

    Args:
        params: of the request.
        token_ids: all that were generated for it.
        end_token_ids: those with which the model ends an answer.
        finish_reason: why the answer ended; None = it did not, or that is not known.
        room: tokens that fit behind the prompt; None = not known.
    """
    num_tokens, most = len(token_ids), params.max_tokens
    if num_tokens > most:
        return f"it has {num_tokens} tokens, and max_tokens is {most}"
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_token_ids)}
    places = [index for index, token in enumerate(token_ids) if token in ends] if ends else []
    if places and places[0] < num_tokens - 1:
        return f"token {places[0]} ends the answer, and others follow"
    if places and places[0] < params.min_tokens:
        return f"token {places[0]} ends the answer, and min_tokens is {params.min_tokens}"
    if (place := _bad_word(params.bad_words, token_ids)) is not None:
        return f"a bad word ends with token {place}"
    most = most if room is None else min(most, room)
    if finish_reason is FinishReason.LENGTH and num_tokens < most:
        return f"it ended for its length with {num_tokens} tokens, and there was room for {most}"
    return ""


def _bad_word(words: Sequence[Sequence[int]], token_ids: Sequence[int]) -> int | None:
    """The last token of the first word in an answer; None = it holds none."""
    if not words:
        return None
    answer = _as_text(token_ids)  # which Python searches in linear time
    ends = (at + len(word) - 1 for word in words if (at := answer.find(_as_text(word))) >= 0)
    return min(ends, default=None)


def _as_text(token_ids: Sequence[int]) -> str:
    return "".join(chr(min(max(token, 0), sys.maxunicode)) for token in token_ids)
