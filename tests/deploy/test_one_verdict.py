"""One answer, one verdict: the service, the watch and `verify` judge by the same rule and tolerances.

Only what is known of the answer differs, since a service and a receipt have the draws.
"""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deploy.run import verify
from deploy.watch.referee import Referee, RefereeOptions
from serve_app.backends.base import ModelInfo, Replayed
from serve_app.referee.book.transformers_model import TransformersModel
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.records.receipts import Ending, Receipt
from serve_app.referee.wire.exchange import COMPLETIONS, Exchange
from speculative.config import DrafterConfig
from speculative.request import Request, SamplingParams
from tests.support.engines import NGRAM, tiny_engine
from tests.support.referees import serve
from tools.faults.tiny import VOCAB_SIZE, write_tiny_pair

pytestmark = pytest.mark.slow

NUM_TOKENS = 64
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=0)
SAMPLED = replace(GREEDY, temperature=0.9)


@dataclass(frozen=True)
class Recorded:
    """An answer of a server in this precision, and its replay in float32."""

    precision: str
    answer: Answer
    replayed: Replayed

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance.against_float32(self.precision)

    @property
    def without_draws(self) -> Replayed:
        """As those see it who do not know them."""
        rows = tuple(replace(row, redrawn=None) for row in self.replayed.replayed or ())
        return replace(self.replayed, replayed=rows)

    @property
    def exchange(self) -> Exchange:
        """As a server that is not ours reports it."""
        request = self.answer.request
        logprobs = {"token_logprobs": self.answer.logprobs} if self.answer.logprobs else None
        asked = {"temperature": request.params.temperature, "max_tokens": request.params.max_tokens}
        body = {"prompt": request.prompt_token_ids, "seed": request.seed, "ignore_eos": True, **asked}
        choice = {"index": 0, "finish_reason": "length", "token_ids": self.answer.token_ids}
        reply = {"id": "cmpl-1", "choices": [choice | {"logprobs": logprobs}]}
        bodies = (json.dumps(one).encode() for one in (body, reply))
        return Exchange(COMPLETIONS, *bodies, streamed=False, began_at=1.0, ended_at=2.0)


Found = tuple[bool, float | None, float | None]
"""Whether an answer is suspect, its TME, and its largest drift."""


def by_service(recorded: Recorded) -> Found:
    """The verdict of a service's independent check."""
    return found_of(Judge(recorded.tolerance).judge(recorded.answer, recorded.replayed).checked)


def found_of(checked: Checked) -> Found:
    return checked.verdict is Verdict.SUSPECT, checked.tme, checked.max_drift_nats


def by_watch(recorded: Recorded, folder: Path) -> Found:
    """What `truespec watch --precision` says."""

    class Rows:
        at_once = 1

        async def replay(self, request: Any) -> Replayed:
            return recorded.without_draws

    async def judged() -> Found:
        model = ModelInfo("tiny", 512, 512, "", str(folder), (2,))
        referee = Referee(RefereeOptions(tolerance=recorded.tolerance), model, Rows())  # type: ignore[arg-type]
        running = asyncio.create_task(referee.run())
        (checked,) = await referee.judge(recorded.exchange)
        running.cancel()
        return found_of(checked)

    return asyncio.run(judged())


def by_verify(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Found:
    """What `truespec verify` says of its receipt."""

    async def replayed(*_: object) -> Replayed:
        return recorded.replayed

    monkeypatch.setattr(verify.Verifier, "_wrong_contents", lambda *_: "")
    monkeypatch.setattr(verify.Verifier, "_replayed", replayed)
    served = recorded.answer
    claimed: dict[str, Any] = {
        "format": "truespec-receipt-2", "id": "cmpl-1-0", "created": 1, "model": "tiny", "fingerprint": "f",
        "quantization": None, "computing": "c", "truespec": "0", "weight_versions": ("v",),
        "logprobs_mode": "raw_logprobs", "weights": recorded.precision, "dtype": recorded.precision,
    }  # fmt: skip
    receipt = Receipt(
        **claimed,
        prompt_token_ids=served.request.prompt_token_ids,
        token_ids=served.token_ids,
        token_kinds=served.kinds,
        num_delivered=len(served.token_ids),
        logprobs=served.logprobs or None,  # type: ignore[arg-type]
        params=served.request.params,
        seed=str(served.request.seed),
        rounds=served.rounds,
        ending=Ending("length", (), include_stop=False, shown_special=()),
    )
    verdict = asyncio.run(verify.Verifier(Path(), "torch", receipt.num_tokens).check(receipt))
    assert (verdict.tolerance_nats, verdict.tolerance) == (recorded.tolerance.edge_nats, f"for {recorded.precision}")
    return bool(verdict.reason), verdict.tme, verdict.max_drift_nats


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))


# -- answers of an engine, and what faults make of them ---------------------------------------------------------------


class Answers:
    """What tiny engines answer, and what `transformers` makes of it."""

    def __init__(self, target: Path, draft: Path) -> None:
        self._target = target
        self._drafters = {
            "n-gram": NGRAM,
            "draft model": DrafterConfig(kind="draft_model", model=str(draft), num_draft_tokens=3),
        }
        self._reference = TransformersModel(target)
        self.sound = cache(self._sound)

    def _sound(self, precision: str, drafter: str, params: SamplingParams) -> Recorded:
        engine = tiny_engine(self._target, dtype=precision, drafter=self._drafters[drafter])
        request = Request("cmpl-1-0", tuple(range(20, 32)) * 2, params, seed=7)
        return self.replayed(precision, serve(engine, request))

    def replayed(self, precision: str, served: Answer) -> Recorded:
        def refuse(_: object) -> Any:
            raise AssertionError("no request has a structure")

        return Recorded(precision, served, self._reference.replay(served.scored("replay-1"), refuse))


Fault = Callable[[Answers, Recorded], Recorded]


def of_logprobs(change: Callable[[Recorded], list[float | None]]) -> Fault:
    def fault(_: Answers, recorded: Recorded) -> Recorded:
        return replace(recorded, answer=replace(recorded.answer, logprobs=tuple(change(recorded))))

    return fault


def _one_off(jumps: float) -> Fault:
    """The logprob of one token is so many jumps from where it was."""

    def change(recorded: Recorded) -> list[float | None]:
        given = list(recorded.answer.logprobs)
        given[20] = (given[20] or 0.0) - jumps * recorded.tolerance.jump_nats
        return given

    return of_logprobs(change)


def of_tokens(change: Callable[[list[int]], list[int]], *, right_logprobs: bool = False) -> Fault:
    def fault(answers: Answers, recorded: Recorded) -> Recorded:
        forged = replace(recorded.answer, token_ids=tuple(change(list(recorded.answer.token_ids))))
        found = answers.replayed(recorded.precision, forged)
        return replace(found, answer=replace(forged, logprobs=found.replayed.logprobs)) if right_logprobs else found

    return fault


def _forged(tokens: list[int]) -> list[int]:
    tokens[20] = (tokens[20] + VOCAB_SIZE // 2) % VOCAB_SIZE
    return tokens


def _garbage(tokens: list[int]) -> list[int]:
    return [3 + (101 * index + 7 * index * index) % (VOCAB_SIZE - 3) for index, _ in enumerate(tokens)]


FAULTS: dict[str, tuple[Fault, bool]] = {  # and whether it is one
    "sound": (lambda _, recorded: recorded, False),
    "logprob 0 for every token": (of_logprobs(lambda one: [0.0] * len(one.answer.logprobs)), True),
    "logprobs of another row": (of_logprobs(lambda one: [*one.answer.logprobs[1:], -1.0]), True),
    "one logprob two jumps off": (_one_off(2.0), False),
    "one logprob five jumps off": (_one_off(5.0), True),
    "a forged token": (of_tokens(_forged), True),
    "tokens of garbage with their right logprobs": (of_tokens(_garbage, right_logprobs=True), True),
}


@pytest.fixture(scope="module")
def answers(folders: tuple[Path, Path]) -> Answers:
    return Answers(*folders)


@pytest.mark.parametrize(
    ("precision", "drafter", "params"),
    [
        ("float32", "n-gram", SAMPLED),
        ("float32", "draft model", GREEDY),
        ("bfloat16", "n-gram", GREEDY),
        ("bfloat16", "draft model", SAMPLED),
    ],
)
def test_everybody_says_the_same_of_what_an_engine_answered(
    precision: str,
    drafter: str,
    params: SamplingParams,
    answers: Answers,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = answers.sound(precision, drafter, params)
    assert recorded.answer.num_drafted and recorded.answer.logprobs
    for name, (fault, suspect) in FAULTS.items():
        changed = fault(answers, recorded)
        first = by_service(changed)
        assert first[0] is suspect and None not in first
        for found in (by_verify(changed, monkeypatch), by_watch(changed, folders[0])):
            assert found == pytest.approx(first, rel=1e-9), name
