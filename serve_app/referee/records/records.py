"""Records what a replica serves, until it is an answer for the referee."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

from serve_app.backends.base import UNKNOWN_NUMERICS, Numerics
from serve_app.referee.judge.answer import Alternatives, Answer, KeptAlternatives
from serve_app.referee.judge.strata import shared
from serve_app.referee.wire.demands import broken_limit
from speculative.request import FinishReason, Request, Round, TokenDelta, TokenKind


@dataclass(slots=True)
class Record:
    """A record of what was served for one request, delta by delta."""

    request: Request
    replica: str
    began_at: float
    max_model_len: int
    num_draft_tokens: int = 0  # the most drafted in a round
    numerics: Numerics = UNKNOWN_NUMERICS  # of the engine that decodes
    eos_token_ids: tuple[int, ...] = ()  # of the model
    prefilled_by: str = ""
    num_rounds: int | None = None  # since the handoff; None where there was none
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    made_by: list[str] = field(default_factory=list)
    rounds_since_handoff: list[int | None] = field(default_factory=list)
    preempted: list[bool] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_scored_by: str = ""
    num_drafted: int = 0
    num_cached: int = 0
    weight_versions: dict[str, None] = field(default_factory=dict)  # a set, the latest last
    num_before_update: int = 0  # tokens of earlier versions than the latest
    rounds: list[Round] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    keeps_alternatives: bool = True  # what is reported beside the logprobs; nobody looks at it without a replay
    alternatives: KeptAlternatives = field(default_factory=KeptAlternatives)
    misnamed: str = ""  # the first logprob that is said to be another token's, in words

    @property
    def since_handoff(self) -> str:
        """The next round's, as the metrics name it."""
        rounds = self.num_rounds
        if rounds is None:
            return "none"
        return str(rounds) if rounds < 2 else "2_3" if rounds < 4 else "4_7" if rounds < 8 else "8_up"

    def take(self, delta: TokenDelta) -> None:
        """Add what one step emitted."""
        count, maker = len(delta.token_ids), delta.prefilled_by or self.replica
        self.prefilled_by = delta.prefilled_by or self.prefilled_by
        latest = next(reversed(self.weight_versions), None)
        # Weights that only ended the answer made nothing of it.
        if delta.weight_version != latest and (latest is None or delta.token_ids or delta.prompt_logprobs):
            if latest is not None:
                # What vLLM made before a switch may be read with what it made after it.
                merged = count if self.numerics.engine == "vllm" else 0
                self.num_before_update = len(self.token_ids) + merged
            self.weight_versions.pop(delta.weight_version, None)
            self.weight_versions[delta.weight_version] = None
        if delta.logprobs or delta.prompt_logprobs:
            self._take_entries(delta)
        self.token_ids += delta.token_ids
        self.kinds += delta.kinds
        self.made_by += [maker] * count
        if delta.logprobs is not None:
            self.logprobs += [entry.logprob for entry in delta.logprobs]
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs += [entry.logprob for entry in delta.prompt_logprobs]
            self.prompt_scored_by = maker
        self.rounds_since_handoff += [self.num_rounds] * count
        self.preempted += [delta.preempted] * count
        self.num_drafted += delta.num_drafted
        self.rounds += delta.rounds
        if delta.num_cached_tokens > self.num_cached:
            self.num_cached = delta.num_cached_tokens
        self.finish_reason = delta.finish_reason or self.finish_reason
        if self.num_rounds is not None and delta.token_ids:
            self.num_rounds += len(delta.rounds) or 1

    def _take_entries(self, delta: TokenDelta) -> None:
        """Add what is reported beside each logprob, before the delta's tokens are counted."""
        own, of_prompt = delta.logprobs or (), delta.prompt_logprobs or ()
        params, prompt = self.request.params, self.request.prompt_token_ids
        start = len(prompt) + len(self.token_ids)
        named = (*zip(of_prompt, prompt[1:], strict=False), *zip(own, delta.token_ids, strict=False))
        wrong = next((one for one in named if one[0].token_id != one[1]), None)
        if wrong is not None and not self.misnamed:
            self.misnamed = f"the logprob of the token {wrong[1]} is said to be that of {wrong[0].token_id}"
        if not self.keeps_alternatives:
            return
        add = self.alternatives.add
        if params.prompt_logprobs:
            for place, entry in enumerate(of_prompt, start=1):
                add(Alternatives(place, entry.top))
        if params.logprobs or params.logprob_token_ids:
            for place, entry in enumerate(own, start=start):
                add(Alternatives(place, entry.top, entry.scored))

    @property
    def broken_limit(self) -> str:
        """The limit of its request that the answer breaks, in words; "" = none."""
        return self.misnamed or broken_limit(
            self.request.params,
            self.token_ids,
            self.eos_token_ids,
            finish_reason=self.finish_reason,
            room=self.max_model_len - len(self.request.prompt_token_ids),
        )

    def answer(self) -> Answer | None:
        """The answer for the referee; None if there is nothing to compare."""
        if not self.token_ids:
            return None
        own: dict[str, Any] = {name: getattr(self, name) for name in _OF_ANSWERS}
        own = {name: tuple(value) if isinstance(value, list | dict) else value for name, value in own.items()}
        complete = len(self.token_ids) == len(self.logprobs)
        own |= {"logprobs": own["logprobs"] if complete else (), "strata": shared(self._strata())}
        beside = {"alternatives": tuple(self.alternatives.kept), "num_left_out": self.alternatives.num_left_out}
        return Answer(**own | beside)

    def _strata(self) -> Iterator[tuple[str, ...]]:
        """Yield the strata of each token."""
        params = self.request.params
        common = (
            "all",
            "speculative" if self.num_drafted else "plain",
            "cached_prefix" if self.num_cached else "computed_prefix",
            "greedy" if params.greedy else "filtered" if params.filtered else "sampled",
        )
        room = self.max_model_len - len(self.request.prompt_token_ids)
        made = zip(self.kinds, self.rounds_since_handoff, self.preempted, strict=False)
        for index, (kind, since, preempted) in enumerate(made):
            near = ("near_limit",) if room - index <= self.num_draft_tokens + 1 else ()
            yield (*common, kind.value, _since(since), *near, *(("preempted",) if preempted else ()))


_OF_ANSWERS = [one.name for one in fields(Answer) if hasattr(Record, one.name)]
"""What an answer says as its record does."""


@dataclass(slots=True)
class Records:
    """Records of the requests that one replica is serving, by request id."""

    replica: str  # its name
    max_model_len: int  # of its engine
    num_draft_tokens: int = 0  # the most that its engine drafts in a round
    eos_token_ids: tuple[int, ...] = ()  # with which its model ends an answer
    numerics: Numerics = UNKNOWN_NUMERICS  # of its engine
    clock: Callable[[], float] = time.time  # unix seconds
    _live: dict[str, Record] = field(default_factory=dict)

    def begin(self, request: Request) -> Record:
        """Record what is served for a request from now on."""
        engine = self.max_model_len, self.num_draft_tokens, self.numerics, self.eos_token_ids
        self._live[request.request_id] = record = Record(request, self.replica, self.clock(), *engine)
        return record

    def handed_off(self, request_id: str, prefilled_by: str) -> None:
        """The handoff of a request was accepted; the rounds after it come next."""
        record = self._live.get(request_id)
        if record is not None:
            record.prefilled_by, record.num_rounds = prefilled_by, 0

    def answered_by(self, request_id: str, replica: str) -> None:
        """Note that another replica than the recording one, or than before, makes the next tokens."""
        record = self._live.get(request_id)
        if record is not None and record.replica != replica:
            record.replica, record.prefilled_by, record.num_rounds = replica, "", None

    def end(self, request_id: str) -> None:
        """Nothing more follows."""
        self._live.pop(request_id, None)


def _since(rounds: int | None) -> str:
    if rounds is None:
        return "no_handoff"
    return f"handoff_{rounds}" if rounds < 2 else "handoff_2_7" if rounds < 8 else "handoff_8_up"
