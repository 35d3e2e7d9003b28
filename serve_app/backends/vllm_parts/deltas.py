"""vLLM's outputs as our deltas: token kinds, logprobs, and the contract of these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serve_app.backends.vllm_parts.settings import TERMS
from speculative.request import FinishReason, ReplayedToken, Request, Round, TokenDelta, TokenKind, TokenLogprobs

GAVE_UP = "vLLM gave up the request."
"""The error of a request that vLLM ends by itself, without giving a reason."""


@dataclass(frozen=True, slots=True)
class SpeculationRound:
    """One step of one request; an answer may end before the last draft that was accepted."""

    num_emitted: int
    num_drafted: int = 0
    num_accepted: int = 0


class DeltaReader:
    """Reads the outputs of one request, in their order.

    Args:
        request: whose they are.
        num_emitted: tokens that were emitted for it elsewhere.
        handed_off: its prompt was computed elsewhere, where its cached tokens have been reported.
        keeps_draws: deltas come with the rounds that had no drafts; their draws can be made again.
    """

    def __init__(
        self, request: Request, num_emitted: int = 0, *, handed_off: bool = False, keeps_draws: bool = False
    ) -> None:
        self._request = request
        self._keeps_draws = keeps_draws and num_emitted == 0  # the draws of the others were another generator's
        self._is_first = num_emitted == 0
        self._handed_off = handed_off
        self._num_read = 0
        self._begun = False

    def read(self, output: Any, weight_version: str) -> tuple[TokenDelta, list[SpeculationRound]]:
        """The delta of one output, and its rounds; a slow reader finds several rounds in one output."""
        request, completion = self._request, output.outputs[0]
        params = request.params
        token_ids = tuple(completion.token_ids)
        reported = (output.kv_transfer_params or {}).get(TERMS) or {}
        rounds = self._rounds(reported.get("rounds") or (), len(token_ids))
        reason = next((one for one in FinishReason if one == completion.finish_reason), None)
        # A judged draft takes numbers from the generator of which nothing is known here.
        self._keeps_draws &= not any(one.num_drafted for one in rounds)
        logprobs = None
        if params.returns_logprobs and completion.logprobs is not None:
            logprobs = _entries(token_ids, completion.logprobs, params.logprobs or 0, params.logprob_token_ids)
        delta = TokenDelta(
            request.request_id,
            token_ids=token_ids,
            kinds=self._kinds(rounds),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs(request, output),
            num_drafted=sum(one.num_drafted for one in rounds),
            num_accepted=sum(min(one.num_accepted, one.num_emitted) for one in rounds),
            num_cached_tokens=0 if self._begun or self._handed_off else output.num_cached_tokens or 0,
            queue_s=0.0 if self._begun else queue_s(output),
            preempted=bool(reported.get("preempted")),
            finish_reason=reason,
            stop_token_id=token_ids[-1] if reason is FinishReason.STOP and token_ids else None,
            error=GAVE_UP if reason is FinishReason.ERROR else None,
            weight_version=weight_version,
            rounds=(Round("vllm", len(token_ids)),) if self._keeps_draws and token_ids else (),
        )
        self._begun = True
        return delta, rounds

    def _rounds(self, reported: Sequence[Sequence[int]], num_new: int) -> list[SpeculationRound]:
        """The rounds that emitted the newest tokens. Rounds that are not reported had no drafts."""
        rounds, begin = [], self._num_read
        self._num_read += num_new
        for end, num_drafted, num_accepted in reported:
            if begin < end <= self._num_read:
                rounds.append(SpeculationRound(end - begin, num_drafted, num_accepted))
                begin = end
        if begin < self._num_read:
            rounds.append(SpeculationRound(self._num_read - begin))
        return rounds

    def _kinds(self, rounds: Sequence[SpeculationRound]) -> tuple[TokenKind, ...]:
        kinds: list[TokenKind] = []
        for one in rounds:
            if self._is_first:
                kinds += [TokenKind.FIRST] + [TokenKind.BONUS] * (one.num_emitted - 1)
                self._is_first = False
                continue
            last = TokenKind.RECOVERED if one.num_accepted < one.num_drafted else TokenKind.BONUS
            drafted = TokenKind.ACCEPTED if one.num_drafted else TokenKind.BONUS  # rounds not reported come as one
            num_before = one.num_accepted if one.num_drafted else one.num_emitted - 1
            kinds += [*[drafted] * num_before, last][: one.num_emitted]
        return tuple(kinds)


def scored(request: Request, output: Any, weight_version: str) -> tuple[TokenDelta, list[SpeculationRound]]:
    """The delta of a teacher-forced request; no rounds.

    For a greedy one with unchanged logits, the logprobs are enough: they show how much less likely each token is than
    the likeliest. Any other would need the whole distribution, which vLLM does not return."""
    assert request.score_from is not None
    params = request.params
    num_top = params.prompt_logprobs or 0
    entries = _prompt_entries(request, output, max(1, num_top))[request.score_from - 1 :]
    replayed = None
    if params.greedy and not params.ruled and params.structure is None:
        gaps = [entry.top[0][1] - entry.logprob for entry in entries]
        replayed = tuple(ReplayedToken(float(gap == 0), 1.0, 0.0, 0.0, gap, 0.0) for gap in gaps)
    delta = TokenDelta(
        request.request_id,
        logprobs=tuple(replace(entry, top=entry.top[:num_top]) for entry in entries),
        num_cached_tokens=output.num_cached_tokens or 0,
        queue_s=queue_s(output),
        replayed=replayed,
        finish_reason=FinishReason.STOP,
        weight_version=weight_version,
    )
    return delta, []


def prompt_logprobs(request: Request, output: Any) -> tuple[TokenLogprobs, ...] | None:
    """Entries of prompt tokens 1.., if they were requested and come with this output."""
    num_top = request.params.prompt_logprobs
    if num_top is None or not output.prompt_logprobs:
        return None
    return tuple(_prompt_entries(request, output, num_top))


def queue_s(output: Any) -> float:
    """Return how long the request waited for its first step."""
    metrics = output.metrics
    return 0.0 if metrics is None else max(0.0, metrics.scheduled_ts - metrics.queued_ts)


def _prompt_entries(request: Request, output: Any, num_top: int) -> tuple[TokenLogprobs, ...]:
    return _entries(request.prompt_token_ids[1:], list(output.prompt_logprobs)[1:], num_top, ())


def _entries(
    token_ids: Sequence[int], reported: Sequence[Mapping[int, Any]], num_top: int, scored_ids: Sequence[int]
) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(
            token,
            row[token].logprob,
            row[token].rank,
            top=_top(row, num_top),
            scored=tuple((other, row[other].logprob) for other in scored_ids),
        )
        for token, row in zip(token_ids, reported, strict=True)
    )


def _top(row: Mapping[int, Any], num_top: int) -> tuple[tuple[int, float], ...]:
    best = sorted(row.items(), key=lambda item: (-item[1].logprob, item[0]))[:num_top] if num_top else []
    return tuple((token, one.logprob) for token, one in best)
