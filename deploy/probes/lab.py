"""The laboratory that the probes of one audit share: the server, the reference model, prompts and ordinary traffic."""

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from deploy.exchange.answers import Choice
from deploy.exchange.client import Attempt, Client
from deploy.exchange.dialect import Ask, Dialect
from deploy.exchange.prompts import read_texts
from deploy.exchange.reported_alternatives import AlternativesReader
from deploy.probes.probes import Need, ProbeVerdict, Stopped
from deploy.probes.reference import Reference
from serve_app.backends.base import Replayed
from serve_app.referee.alternatives import Alternatives
from serve_app.referee.answer import Answer
from serve_app.referee.detectors import Alarm, ReplicaWatch, SeenToken, why_drifted
from serve_app.referee.drift import TokenDrift
from serve_app.referee.judgement import Judge, Judgement, as_processed, processed_logprobs
from serve_app.referee.shift import moves_of
from serve_app.referee.tolerance import Tolerance
from speculative.request import Draw, ReplayedToken, Request, SamplingParams
from speculative.selfcheck.eprocess import Floats

SEED = 20_261
AT_ONCE = 8
NUM_TOP = 3  # top logprobs requested for every token

_MASKED = -9000.0  # OpenAI writes -9999 for a token that cannot occur
_COPY_LEAST = 2  # tokens that must have occurred before for their continuation to count as a draft
_EXACT_NATS = 3e-4  # a server whose first tokens have a smaller median drift computes in float32
_BASE = SamplingParams(max_tokens=32, logprobs=NUM_TOP, ignore_eos=True)
_PENALTIES: dict[str, Any] = {"frequency_penalty": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.2}

SETTINGS: dict[str, SamplingParams] = {
    "greedy": dataclasses.replace(_BASE, temperature=0),
    "greedy, penalties": dataclasses.replace(_BASE, temperature=0, **_PENALTIES),
    "temperature 1": _BASE,
    "temperature 0.6": dataclasses.replace(_BASE, temperature=0.6),
    "top_p": dataclasses.replace(_BASE, top_p=0.8),
    "min_p": dataclasses.replace(_BASE, min_p=0.1),
    "penalties": dataclasses.replace(_BASE, **_PENALTIES),
}
"""Sampling settings that every audit tries, all in one batch. top_k has killed servers, so it has its own probe."""

FIRST, LAST, BETWEEN = "the first two tokens", "the last token before max_tokens", "tokens in between"
"""Positions of a token in its answer."""

TOP_K = dataclasses.replace(_BASE, top_k=8)


@dataclass(frozen=True, slots=True)
class Budget:
    """Size of an audit: answers per setting (`plain_share` times as many at temperature 1), and the rest."""

    name: Literal["quick", "full"]
    answers: int
    plain_share: int
    twins: int
    lengths: tuple[int, ...]
    longest: int  # tokens of a sequence that reaches the server's limit
    first_tokens: int


_AROUND = (16, 32, 64, 128, 256, 512)
QUICK = Budget("quick", 6, 4, 6, (2, 15, 16, 17, 33, 63, 65, 129, 257), 1024, 160)
FULL = Budget(
    "full", 24, 6, 12, tuple(sorted({2, *(at + d for at in (*_AROUND, 1024) for d in (-1, 0, 1, 2))})), 8192, 640
)


ROUNDED = Tolerance.against_float32("bfloat16")
"""Tolerance of a server whose precision does not show."""


@dataclass(slots=True)
class ServedAnswer:
    """A request and its answer. `setting`: how it was sampled; `replayed`: by the reference; `judgement`: of it.
    `named_beside`: what was reported beside the logprobs of its tokens, once it is read."""

    setting: str
    ask: Ask
    attempt: Attempt
    replayed: Replayed | None = None
    judgement: Judgement | None = None
    named_beside: list[Alternatives] | None = None

    @property
    def answer(self) -> Choice:
        """The one choice of the reply; an empty one if the request failed."""
        return self.attempt.reply.first

    @property
    def ids(self) -> tuple[int, ...]:
        """The emitted tokens."""
        return tuple(self.answer.token_ids or ())

    @property
    def values(self) -> Floats:
        """The served logprobs; NaN where one is missing."""
        return nan_for_none(self.answer.logprobs or ())

    @property
    def top(self) -> list[list[float]] | None:
        """Per token the highest logprobs in descending order, possibly including its own; None = not reported."""
        places = self.answer.candidates()
        if places is None:
            return None
        return [sorted((one.logprob for one in place if not one.logprob < _MASKED), reverse=True) for place in places]

    @property
    def scored(self) -> list[dict[int, float]] | None:
        """Per token the logprobs of the ids that the request asks for; None = not reported."""
        return self.answer.scored(self.ask.extra.get("logprob_token_ids") or ())

    @property
    def prompt_logprobs(self) -> list[float | None] | None:
        """Return the logprobs of the prompt's tokens but the first; None = not reported."""
        return self.answer.logprobs_of_prompt(self.ask.prompt)


@dataclass
class Lab:
    """Everything a probe works with.

    beside: a second server of the same model, without speculation.
    publishing_s: the longest time between the server's updates of its counters.
    """

    server: Client
    dialect: Dialect
    budget: Budget
    reference: Reference | None = None
    beside: tuple[Client, Dialect] | None = None
    destructive: bool = False
    publishing_s: float = 1.1
    mixed_up: bool = False  # a parameter was found not to be applied
    scores_wrongly: bool = False  # logprobs of requested ids were found missing or wrong
    num_computed: int = 0  # answers that the reference has computed again
    refused: dict[str, str] = field(default_factory=dict)  # settings that the server rejects
    failed: list[Attempt] = field(default_factory=list)  # requests of the traffic that failed
    gathered: list[ServedAnswer] = field(default_factory=list)  # all answers with logprobs, from any probe

    @property
    def missing(self) -> set[Need]:
        """Needs that this audit cannot meet."""
        can, limit = self.dialect.can, self.dialect.max_model_len
        met = {
            Need.LOGPROBS: can.logprobs,
            Need.TOKEN_IDS: can.token_ids and can.token_prompts,
            Need.PROMPT_LOGPROBS: can.prompt_logprobs,
            Need.METRICS: can.metrics is not None,
            Need.REFERENCE: self.reference is not None,
            Need.BESIDE: self.beside is not None or can.switches_speculation,
            Need.LIMIT: limit is not None and limit <= self.budget.longest,
        }
        return {need for need, here in met.items() if not here}

    # -- prompts -----------------------------------------------------------------------------------------------

    @cached_property
    def corpus(self) -> tuple[int, ...]:
        """Tokens of ordinary text; random ones for a model without a tokenizer."""
        prose = "\n\n".join(read_texts()["summarise"])
        if self.reference is not None and self.reference.tokenizer is not None:
            return tuple(self.reference.tokenizer.encode(prose, continuation=True))
        if self.reference is not None:
            random = np.random.default_rng(SEED)
            return tuple(random.integers(3, self.reference.vocab_size, 4096).tolist())
        body = {"model": self.dialect.model, "prompt": prose[:1500], "max_tokens": 1, "return_token_ids": True}
        ids = self.server.post(body).reply.first.prompt_token_ids
        if not ids:
            raise Stopped(ProbeVerdict.UNSUPPORTED, "needs the model's tokenizer: give --model")
        return ids

    def passage(self, number: int, length: int) -> tuple[int, ...]:
        """Text of `length` tokens; each number begins elsewhere."""
        start = (number * 61) % len(self.corpus)
        rounds = 1 + (start + length) // len(self.corpus)
        return (self.corpus * rounds)[start : start + length]

    def loop(self, number: int, length: int = 40) -> tuple[int, ...]:
        """Repetitive text, so that there is something to draft."""
        period = self.passage(number, 9 + number % 4)
        return (period * (1 + length // len(period)))[:length]

    def prompt(self, number: int) -> tuple[int, ...]:
        """One of many prompts, every other one repetitive."""
        return self.loop(number) if number % 2 else self.passage(number, 20 + number % 23)

    # -- asking ------------------------------------------------------------------------------------------------

    def ask(self, ask: Ask, setting: str = "") -> ServedAnswer:
        """Send one request."""
        return self.ask_all([ask], setting, at_once=1)[0]

    def ask_all(self, asks: Sequence[Ask], setting: str = "", at_once: int = AT_ONCE) -> list[ServedAnswer]:
        """Send several, `at_once` at a time."""
        attempts = self.server.post_all([self.dialect.body(ask) for ask in asks], at_once)
        served = [ServedAnswer(setting, ask, one) for ask, one in zip(asks, attempts, strict=True)]
        self.gathered += [one for one in served if one.answer.logprobs is not None]
        return served

    def ask_plainly(self, asks: Sequence[Ask]) -> list[ServedAnswer]:
        """The same without speculation."""
        server, dialect = self.beside or (self.server, self.dialect)
        if self.beside is None:
            asks = [dataclasses.replace(ask, extra=ask.extra | {"speculate": False}) for ask in asks]
        attempts = server.post_all([dialect.body(ask) for ask in asks], AT_ONCE)
        return [ServedAnswer("", ask, one) for ask, one in zip(asks, attempts, strict=True)]

    # -- judging -----------------------------------------------------------------------------------------------

    @cached_property
    def _judge(self) -> Judge:
        return Judge(self.tolerance)

    def answer(self, served: ServedAnswer) -> Answer:
        """The answer in the referee's form. Of its prompt nothing is compared."""
        num, values, prompt = len(served.ids), served.answer.logprobs or (), tuple(served.ask.prompt)
        seed = {} if served.ask.seed is None else {"seed": served.ask.seed}
        # How many of the likeliest are reported beside the emitted token is the server's own custom.
        params = dataclasses.replace(served.ask.params, logprobs=None if served.ask.params.logprobs is None else 0)
        answer = Answer.reported(
            Request("audited", prompt, params, **seed),  # type: ignore[arg-type]
            "server",
            served.ids,
            tuple(values) if len(values) == num else (),
            tuple(("all", FIRST if at < 2 else LAST if at == num - 1 else BETWEEN) for at in range(num)),
        )
        own = () if self.stranger(served) is not None else tuple(self._named_beside(served))
        return dataclasses.replace(answer, alternatives=own)

    def stranger(self, served: ServedAnswer) -> int | None:
        """An id that it names beside its tokens and that is none of the model's; None = there is none."""
        assert self.reference is not None
        ids = (token for one in self._named_beside(served) for token, _ in one.pairs)
        return next((token for token in ids if not 0 <= token < self.reference.vocab_size), None)

    def _named_beside(self, served: ServedAnswer) -> list[Alternatives]:
        if served.named_beside is None:
            num_prompt = len(served.ask.prompt)
            kept = self._alternatives.of_choice(served.answer, num_prompt, served.ids).kept
            served.named_beside = [one for one in kept if one.place >= num_prompt]
        return served.named_beside

    @cached_property
    def _alternatives(self) -> AlternativesReader:
        assert self.reference is not None
        return AlternativesReader(self.reference.tokenizer)

    def replayed(self, served: ServedAnswer) -> Replayed:
        """An answer computed again. `rejected_probability` of a token is that of its copy: what followed the latest
        tokens the last time they occurred, which drafters without weights draft."""
        assert self.reference is not None
        if served.replayed is None:
            draws = tuple(Draw("none", at, 0, copy) for at, copy in enumerate(copies(served)))
            request = dataclasses.replace(self.answer(served).scored("audited"), draws=draws)
            served.replayed = self.reference.compute(request)
            self.num_computed += 1
        return served.replayed

    def rows(self, served: ServedAnswer) -> tuple[ReplayedToken, ...]:
        """Return where the tokens of an answer lie in their distributions."""
        return self.replayed(served).replayed or ()

    def judge(self, served: ServedAnswer) -> Judgement:
        """By the service's judge. Of a greedy answer `misplaced` has the tokens that are wrong."""
        if served.judgement is None:
            answer, replayed = self.answer(served), self.replayed(served)
            if self.mode == "processed":
                answer, replayed = as_processed(answer, replayed)
            served.judgement = self._judge.judge(answer, replayed)
        return served.judgement

    def wrong_alone(self, served: ServedAnswer) -> list[str]:
        """The alarms about its distribution that the tokens of one answer raise by themselves."""
        judgement = self.judge(served)
        found = judgement.checked.reason.partition("distribution: ")[2]
        return [found] if found else ["support"] * bool(judgement.misplaced)

    def largest_drift(self, served: ServedAnswer) -> float:
        """Return the largest drift of its logprobs, nats."""
        return self.judge(served).checked.max_drift_nats or 0.0

    def drifted(self, answers: Iterable[tuple[ServedAnswer, Sequence[SeenToken]]]) -> ServedAnswer | None:
        """The first answer whose logprobs are too far off by themselves, or with those of the answers before it."""
        watch, tolerance = ReplicaWatch(self.tolerance), self.tolerance
        for one, found in answers:
            tokens = [SeenToken(("all",), token.drift, None, "server", move=token.move) for token in found]
            if why_drifted(tokens, tolerance.max_tme - 1, tolerance) or self.alarms(watch, one, tokens):
                return one
        return None

    def alarms(self, watch: ReplicaWatch, one: ServedAnswer, tokens: Sequence[SeenToken]) -> list[Alarm]:
        """Return the alarms that an answer's tokens raise in the service's detectors, after the answers before it."""
        return watch.see(tokens, greedy=one.ask.params.greedy, drift_tolerance=self.tolerance.max_tme - 1)

    # -- ordinary traffic --------------------------------------------------------------------------------------

    @cached_property
    def traffic(self) -> dict[str, list[ServedAnswer]]:
        """Answers for every setting that the server accepts, sent together; every other one has no seed. Where a seed
        selects the verifier, every other seeded request opts out, to be verified like most users' unseeded ones."""
        asks: list[tuple[str, Ask]] = []
        for place, (name, params) in enumerate(SETTINGS.items()):
            count = self.budget.answers * (self.budget.plain_share if name == "temperature 1" else 1)
            for number in range(count):
                seed = SEED + 1000 * place + number if number % 2 else None
                plain = {"reproducible": False} if self.dialect.can.reproducible and number % 4 == 1 else {}
                asks.append((name, Ask(self.prompt(7 * place + number), params, seed, plain)))
        order = np.random.default_rng(SEED).permutation(len(asks)).tolist()
        answered = self.ask_all([asks[index][1] for index in order])
        found: dict[str, list[ServedAnswer]] = {name: [] for name in SETTINGS}
        for index, served in zip(order, answered, strict=True):
            name = served.setting = asks[index][0]
            if served.attempt.refused:
                self.refused.setdefault(name, served.attempt.error)
            elif not served.attempt.ok:
                self.failed.append(served.attempt)
            else:
                found[name].append(served)
        return found

    @cached_property
    def modes(self) -> dict[str, str]:
        """By setting, whether logprobs belong to the model's distribution ("raw") or the request's ("processed")."""
        found = {}
        for name, answers in self.traffic.items():
            raw, processed = (self._drifts(answers, mode) for mode in ("raw", "processed"))
            same = not len(raw) or np.allclose(raw, processed)
            found[name] = "either" if same else "raw" if np.nanmedian(raw) <= np.nanmedian(processed) else "processed"
        return found

    @property
    def mode(self) -> str:
        """The mode of most settings."""
        reported = [mode for mode in self.modes.values() if mode != "either"]
        return max(set(reported), key=reported.count) if reported else "raw"

    @cached_property
    def tolerance(self) -> Tolerance:
        """For this server's precision, from the drift of answers' first logprobs: these are never drafted."""
        if self.reference is None:
            return ROUNDED
        parts = [self._drifts([one], self.mode)[:1] for one in self.traffic["temperature 1"]]
        drifts = np.concatenate(parts or [np.zeros(0)])
        drifts = drifts[np.isfinite(drifts)]
        exact = len(drifts) > 0 and float(np.median(drifts)) < _EXACT_NATS
        return Tolerance.against_float32("float32") if exact else ROUNDED

    def _drifts(self, answers: Sequence[ServedAnswer], mode: str) -> Floats:
        """|served - recomputed| of their tokens, nats; NaN where the server reported none."""
        parts = [
            np.abs(one.values - np.array(again.logprobs if mode == "raw" else processed_logprobs(again)))
            for one in answers
            if one.answer.logprobs and len(one.values) == len(one.ids) and (again := self.replayed(one))
        ]
        return np.concatenate(parts) if parts else np.zeros(0)


def copies(served: ServedAnswer) -> list[int]:
    """Return for each token the one that followed the same tokens before, when they occurred last; -1 = never."""
    tokens, start = (*served.ask.prompt, *served.ids), len(served.ask.prompt)
    return [_copy_of(tokens, place) for place in range(start, len(tokens))]


def _copy_of(tokens: Sequence[Any], place: int) -> int:
    latest = tokens[place - _COPY_LEAST : place]
    ends = range(place - 1, _COPY_LEAST - 1, -1)
    return next((tokens[end] for end in ends if tokens[end - _COPY_LEAST : end] == latest), -1)


def compared(tokens: Sequence[int], values: Floats, again: Floats) -> list[SeenToken]:
    """Logprobs that the server reported for the last of these tokens, beside those that it should have."""
    drifts = [TokenDrift.between(*both) for both in zip(values, again, strict=True)]
    moves = moves_of(tokens, values.tolist(), again.tolist())
    return [SeenToken(("all",), drift, None, "server", move=move) for drift, move in zip(drifts, moves, strict=True)]


def nan_for_none(values: Iterable[float | None]) -> Floats:
    """Logprobs as an array, NaN where one is missing."""
    return np.array([np.nan if value is None else value for value in values], float)
