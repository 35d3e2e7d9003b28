"""Pairs of engines over tables that differ by noise, what one of them answers, and what the referee says of it."""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from serve_app.backends.base import UNKNOWN_NUMERICS, Numerics, Replayed
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.detectors import ReplicaWatch
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.judge.verdicts import Verdict
from serve_app.referee.records.records import Records
from speculative.drafting.base import Drafter, DraftOutput
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams, TokenDelta
from speculative.sampling.draft_probs import PointMass
from speculative.state.batch import Batch
from tools.faults.toy import LikeliestDrafter, TableDrafter, engine_over
from tools.faults.traffic import PLAIN, sampling

VOCAB = 256
MOST_DRAFTS = 3
VERIFIERS = ("token_wise", "coupled")
DRAFTERS = ("sampled", "likeliest", "runner-up")
FILTERS: Mapping[str, Mapping[str, float]] = {
    "nothing": {}, "top_k 1": {"top_k": 1}, "top_p 0.05": {"top_p": 0.05}, "Qwen's": {"top_k": 20, "top_p": 0.8},
    "min_p 0.1": {"min_p": 0.1},
}  # fmt: skip
SETTINGS = {
    f"{name} at {temperature}": replace(PLAIN, temperature=temperature, logprobs=0, **filters)  # type: ignore[arg-type]
    for temperature in (0.01, 0.05, 0.3, 0.7, 1.0, 1.5)
    for name, filters in FILTERS.items()
}


class RunnerUpDrafter(Drafter):
    """Drafts the likeliest token and the second by turns: where both are nearly alike, filters keep either."""

    def __init__(self, table: Tensor) -> None:
        self._two = table.topk(2, dim=-1).indices.tolist()

    def propose(self, batch: Batch) -> DraftOutput:
        drafts = []
        for entry in batch.entries:
            start, chain = len(entry.sequence.tokens), [entry.sequence.tokens[-1]]
            while len(chain) <= min(entry.max_drafts, MOST_DRAFTS):
                chain.append(self._two[chain[-1]][(start + len(chain)) % 2])
            drafts.append(chain[1:])
        return DraftOutput.pack(drafts, PointMass())


@dataclass(frozen=True, slots=True)
class Tables:
    """Logits [V, V] by the token before: the target's, and those that a drafter samples from."""

    target: Tensor
    near: Tensor

    def engine(self, drafted: str, verifier: str) -> EngineCore:
        """One that answers, or replays, by these."""
        drafters: Mapping[str, Callable[[], Drafter]] = {
            "sampled": lambda: TableDrafter(self.near.softmax(-1), MOST_DRAFTS),
            "likeliest": lambda: LikeliestDrafter(self.target),
            "runner-up": lambda: RunnerUpDrafter(self.target),
        }
        sizes = {"kv_cache_tokens": 65536, "self_check_sample_rate": 0.0}
        return engine_over(self.target, drafters[drafted](), verifier=verifier, **sizes)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two engines, and what the referee knows of them. numerics: of the one that answers."""

    served: Tables
    replayed: Tables
    tolerance: Tolerance
    numerics: Numerics = UNKNOWN_NUMERICS

    def accused(
        self, verifier: str, drafted: str, settings: Mapping[str, SamplingParams], each: int, number: int = 0
    ) -> list[tuple[str, str]]:
        """Setting and reason of every answer, of so many of each setting, that is not verified, and of every alarm.

        number: of the pair; requests are others for each, and for each verifier and drafter.
        """
        number = (number * len(VERIFIERS) + VERIFIERS.index(verifier)) * len(DRAFTERS) + DRAFTERS.index(drafted)
        answering, replaying = self.served.engine(drafted, verifier), self.replayed.engine(drafted, verifier)
        accused: list[tuple[str, str]] = []
        for name, served in answers(answering, settings, each, self.numerics, number).items():
            judge, watch = Judge(self.tolerance), ReplicaWatch(self.tolerance)
            assert len(served) == each
            for answer, again in zip(served, replayed(replaying, served), strict=True):
                judgement = judge.judge(answer, again)
                accused += [(name, judgement.checked.reason)] * (judgement.checked.verdict is not Verdict.VERIFIED)
                assert judgement.checked.draws.num_checked
                whole = [replace(token, strata=("all",)) for token in judgement.tokens]
                found = watch.see(whole, greedy=False, drift_tolerance=judgement.drift_tolerance)
                accused += [(name, f"alarm: {alarm.name}") for alarm in found]
        return accused

    def share_found(self, verifier: str, drafted: str, settings: Mapping[str, SamplingParams], each: int) -> float:
        """The share of answers, each with one token replaced by a random other and served without logprobs, that are
        suspect."""
        chance, wrong = random.Random(2), []
        given = answers(self.served.engine(drafted, verifier), settings, each, self.numerics)
        for answer in itertools.chain(*given.values()):
            tokens = list(answer.token_ids)
            index = chance.randrange(len(tokens))
            tokens[index] = chance.choice([token for token in range(VOCAB) if token != tokens[index]])
            wrong.append(replace(answer, token_ids=tuple(tokens), logprobs=()))
        judge, again = Judge(self.tolerance), replayed(self.replayed.engine(drafted, verifier), wrong)
        judged = [judge.judge(*one).checked.verdict for one in zip(wrong, again, strict=True)]
        return sum(one is Verdict.SUSPECT for one in judged) / len(wrong)


def run(engine: EngineCore, requests: Sequence[Request]) -> Iterator[TokenDelta]:
    """Yield what an engine emits until it is idle."""
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            yield delta


def answers(
    engine: EngineCore,
    settings: Mapping[str, SamplingParams],
    each: int,
    numerics: Numerics = UNKNOWN_NUMERICS,
    seed: int = 0,
) -> dict[str, list[Answer]]:
    """Serve requests of each setting; answers by setting."""
    records = Records("r1", 512, MOST_DRAFTS, numerics=numerics)
    requests = {
        name: list(itertools.islice(sampling(VOCAB, params, number), each))
        for number, (name, params) in enumerate(settings.items(), seed * len(settings))
    }
    kept = {one.request_id: records.begin(one) for asked in requests.values() for one in asked}
    for delta in run(engine, [one for asked in requests.values() for one in asked]):
        kept[delta.request_id].take(delta)
    served = {name: [kept[one.request_id].answer() for one in asked] for name, asked in requests.items()}
    return {name: [answer for answer in own if answer is not None] for name, own in served.items()}


def replayed(engine: EngineCore, served: Sequence[Answer]) -> list[Replayed]:
    """Replay each of these answers."""
    found = {}
    for delta in run(engine, [one.scored(one.request.request_id) for one in served]):
        assert delta.logprobs is not None
        logprobs = tuple(entry.logprob for entry in delta.logprobs)
        found[delta.request_id] = Replayed(logprobs, delta.replayed, "p1")
    return [found[one.request.request_id] for one in served]
