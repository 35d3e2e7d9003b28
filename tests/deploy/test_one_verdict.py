"""One answer, one verdict: the service, the watch and `verify` judge by the same rule and tolerances.

Where they differ, the pair of engines does, since a service replays with its own engine and the others in float32; or
what is known of the answer, since only a service and a receipt have the draws.
"""

import asyncio
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from deploy.exchange.exchanges import COMPLETIONS, Exchange
from deploy.run import verify
from deploy.watch.referee import Referee, RefereeOptions
from serve_app.backends.base import ModelInfo, Replayed
from serve_app.referee.answer import Answer
from serve_app.referee.judgement import Judge
from serve_app.referee.receipts import Ending, Receipt
from serve_app.referee.tolerance import EDGE_NATS, Tolerance
from serve_app.referee.transformers_model import TransformersModel
from serve_app.referee.verdicts import Verdict
from speculative.config import DrafterConfig
from speculative.request import ReplayedToken, Request, SamplingParams, TokenKind
from tests.support.engines import NGRAM, tiny_engine
from tests.support.referees import recorded as recorded_answer
from tests.support.referees import serve
from tools.faults.tiny import VOCAB_SIZE, write_tiny_pair

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
        request, logprobs = (
            self.answer.request,
            {"token_logprobs": self.answer.logprobs} if self.answer.logprobs else None,
        )
        body = {
            "prompt": request.prompt_token_ids,
            "temperature": request.params.temperature,
            "max_tokens": request.params.max_tokens,
            "ignore_eos": True,
            "seed": request.seed,
        }
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": self.answer.token_ids}
        reply = {"id": "cmpl-1", "choices": [choice | {"logprobs": logprobs}]}
        bodies = (json.dumps(one).encode() for one in (body, reply))
        return Exchange(COMPLETIONS, *bodies, streamed=False, began_at=1.0, ended_at=2.0)


@dataclass(frozen=True)
class Found:
    """What somebody says of an answer."""

    suspect: bool
    tme: float | None
    max_drift_nats: float | None


def by_service(recorded: Recorded, tolerance: Tolerance | None = None) -> Found:
    """A service's verdict, whose replays are computed by that pair."""
    checked = Judge(tolerance or recorded.tolerance).judge(recorded.answer, recorded.replayed).checked
    return Found(checked.verdict is Verdict.SUSPECT, checked.tme, checked.max_drift_nats)


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
        return Found(checked.verdict is Verdict.SUSPECT, checked.tme, checked.max_drift_nats)

    return asyncio.run(judged())


def verified(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> verify.ReceiptVerdict:
    """What `truespec verify` says of its receipt."""
    monkeypatch.setattr(verify.Verifier, "_wrong_contents", lambda *_: "")

    async def replayed(*_: object) -> Replayed:
        return recorded.replayed

    monkeypatch.setattr(verify.Verifier, "_replayed", replayed)
    served = recorded.answer
    receipt = Receipt(
        format="truespec-receipt-2",
        id="cmpl-1-0",
        created=1,
        model="tiny",
        fingerprint="f",
        weights=recorded.precision,
        dtype=recorded.precision,
        quantization=None,
        computing="c",
        truespec="0",
        weight_versions=("v",),
        prompt_token_ids=served.request.prompt_token_ids,
        token_ids=served.token_ids,
        token_kinds=served.kinds,
        num_delivered=len(served.token_ids),
        logprobs=served.logprobs or None,  # type: ignore[arg-type]
        logprobs_mode="raw_logprobs",
        params=served.request.params,
        seed=str(served.request.seed),
        rounds=served.rounds,
        ending=Ending("length", (), include_stop=False, shown_special=()),
    )
    return verify.verify(receipt, Path(), "torch")


def by_verify(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Found:
    verdict = verified(recorded, monkeypatch)
    return Found(bool(verdict.reason), verdict.tme, verdict.max_drift_nats)


def made_up(precision: str, gap: float, num_off: int = 8, logprobs: bool = False) -> Recorded:
    """A greedy answer, `num_off` of whose tokens lie `gap` nats below the likeliest in its replay."""
    every = NUM_TOKENS // max(num_off, 1)
    off = [num_off > 0 and index % every == 0 for index in range(NUM_TOKENS)]
    rows = tuple(ReplayedToken(0.9, 0.85, 0.1, 0.2, gap if one else 0.0, 0.0) for one in off)
    served = recorded_answer(
        "cmpl-1",
        request=Request("cmpl-1", (1, 2, 3), GREEDY),
        token_ids=(5,) * NUM_TOKENS,
        logprobs=(-0.1,) * NUM_TOKENS if logprobs else (),
        kinds=(TokenKind.FIRST, *[TokenKind.RECOVERED] * (NUM_TOKENS - 1)),
        rounds_since_handoff=(None,) * NUM_TOKENS,
        preempted=(False,) * NUM_TOKENS,
        max_model_len=512,
    )
    return Recorded(precision, served, Replayed((-0.1,) * NUM_TOKENS, rows, replica="p1"))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("precision", "num_off"), [("float32", 8), ("bfloat16", 1)])
@pytest.mark.parametrize(("edges", "suspect"), [(0.8, False), (1.6, True)])
def test_all_who_replay_in_float32_say_the_same_of_near_ties(
    precision: str,
    num_off: int,
    edges: float,
    suspect: bool,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = made_up(precision, edges * Tolerance.against_float32(precision).edge_nats, num_off)
    found = by_all(recorded, folders[0], monkeypatch)
    assert found == dict.fromkeys(found, Found(suspect, None, None))


@pytest.mark.parametrize(
    ("gap", "equals", "apart"), [(0.2, False, False), (0.3, True, False), (0.4, True, False), (0.6, True, True)]
)
def test_a_service_that_replays_on_its_own_engine_is_stricter_by_its_pair(
    gap: float, equals: bool, apart: bool
) -> None:
    recorded = made_up("bfloat16", gap)
    own, other = Tolerance.between_equals("bfloat16"), Tolerance.against_float32("bfloat16")
    assert (own.edge_nats, other.edge_nats) == (EDGE_NATS["bfloat16"], 2 * EDGE_NATS["bfloat16"])
    assert (by_service(recorded, own).suspect, by_service(recorded, other).suspect) == (equals, apart)


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize(("gap", "suspect"), [(0.3, False), (0.7, True)])
def test_a_receipts_logprobs_do_not_change_its_tolerance(
    gap: float, suspect: bool, logprobs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = made_up("bfloat16", gap, num_off=1, logprobs=logprobs)
    verdict = verified(recorded, monkeypatch)
    assert bool(verdict.reason) is suspect is by_service(recorded).suspect
    assert (verdict.tolerance_nats, verdict.tolerance) == (0.5, "for bfloat16")


# -- answers of an engine, and what faults make of them ---------------------------------------------------------------


_UNLIKELY = 0.02  # chance of a draft to be accepted: to have accepted it is no rounding in any precision


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
        prompt = tuple(range(20, 32)) * 2
        for seed in range(7, 67):  # which drafts are rejected depends on the processor's rounding, too
            found = self.replayed(precision, serve(engine, Request("cmpl-1-0", prompt, params, seed=seed)))
            if params.greedy or any(chance < _UNLIKELY for chance, *_ in rejected_drafts(found)):
                return found
        raise AssertionError("no unlikely draft was rejected")

    def replayed(self, precision: str, served: Answer) -> Recorded:
        def refuse(_: object) -> Any:
            raise AssertionError("no request has a structure")

        return Recorded(precision, served, self._reference.replay(served.scored("replay-1"), refuse))


Fault = Callable[[Answers, Recorded], Recorded]


def sound(_: Answers, recorded: Recorded) -> Recorded:
    return recorded


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


def rejected_drafts(recorded: Recorded) -> list[tuple[float, int, int, int]]:
    """Of each draft that was rejected: its chance p / q, its round, the place of the token that replaced it, its id."""
    served, rows, ends = recorded.answer, recorded.replayed.replayed or (), 0
    rejected = []
    for number, one in enumerate(served.rounds):
        last = ends + one.num_tokens - 1
        if served.kinds[last] is TokenKind.RECOVERED:
            place = one.num_tokens - 1
            q = 1.0 if one.draft_probs is None else one.draft_probs[place]
            chance = rows[last].redrawn.rejected_probability / q  # type: ignore[union-attr]
            rejected.append((chance, number, last, one.drafts[place]))
        ends += one.num_tokens
    return rejected


def wrongly_accepted(answers: Answers, recorded: Recorded) -> Recorded:
    """The answer ends in the one with the least chance of the drafts that were rejected, as if it had been accepted."""
    served = recorded.answer
    _, number, last, draft = min(rejected_drafts(recorded))
    changes: dict[str, Any] = {name: getattr(served, name)[: last + 1] for name in PER_TOKEN}
    changes["token_ids"] = (*served.token_ids[:last], draft)
    changes["kinds"] = (*served.kinds[:last], TokenKind.ACCEPTED)
    forged = replace(served, rounds=served.rounds[: number + 1], **changes)
    found = answers.replayed(recorded.precision, forged)
    logprobs = (*forged.logprobs[:-1], found.replayed.logprobs[-1])
    return replace(found, answer=replace(forged, logprobs=logprobs))


PER_TOKEN = ("logprobs", "made_by", "rounds_since_handoff", "preempted", "strata")
FAULTS: dict[str, tuple[Fault, bool, bool]] = {  # whether those see it who know the draws, and those who do not
    "sound": (sound, False, False),
    "logprob 0 for every token": (of_logprobs(lambda one: [0.0] * len(one.answer.logprobs)), True, True),
    "logprobs of another row": (of_logprobs(lambda one: [*one.answer.logprobs[1:], -1.0]), True, True),
    "one logprob two jumps off": (_one_off(2.0), False, False),
    "one logprob five jumps off": (_one_off(5.0), True, True),
    "a forged token": (of_tokens(_forged), True, True),
    "tokens of another row": (of_tokens(lambda tokens: [*tokens[:10], *tokens[11:], tokens[10]]), True, True),
    "tokens of garbage with their right logprobs": (of_tokens(_garbage, right_logprobs=True), True, True),
    "a rejected draft is accepted": (wrongly_accepted, True, False),
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
    for name, (fault, with_draws, without) in FAULTS.items():
        if fault is wrongly_accepted and params.greedy:
            continue  # its token is not the likeliest, as that of any forgery
        changed = fault(answers, recorded)
        found = by_all(changed, folders[0], monkeypatch)
        assert [one.suspect for one in found.values()] == [with_draws, with_draws, without], (name, found)
        first = found["independent check"]
        assert first.tme is not None and first.max_drift_nats is not None
        for one in found.values():
            assert (one.tme, one.max_drift_nats) == pytest.approx((first.tme, first.max_drift_nats), rel=1e-9), name


def by_all(changed: Recorded, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Found]:
    """What each says of an answer; those who know the draws come first."""
    return {
        "independent check": by_service(changed),
        "verify": by_verify(changed, monkeypatch),
        "watch": by_watch(changed, folder),
    }


@pytest.mark.parametrize(("nats", "params"), [(-0.04, GREEDY), (0.005, GREEDY), (0.0, SAMPLED), (-0.002, SAMPLED)])
def test_everybody_sees_a_shift_of_all_logprobs_in_float32(
    nats: float, params: SamplingParams, answers: Answers, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = answers.sound("float32", "n-gram", params)
    shifted = of_logprobs(lambda one: [min((own or 0.0) + nats, 0.0) for own in one.answer.logprobs])
    found = by_all(shifted(answers, recorded), folders[0], monkeypatch)
    assert {one.suspect for one in found.values()} == {nats != 0}


def test_in_bfloat16_a_shift_shows_where_tokens_are_nearly_certain(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many tokens of a language model are; logits of the tiny model's are nearly equal, and move with rounding."""
    draw = random.Random(4)
    sound = made_up("bfloat16", 0.0, 0, logprobs=True)
    again = tuple(-math.exp(draw.uniform(-7.0, 0.5)) for _ in range(NUM_TOKENS))
    tokens = tuple(range(5, 5 + NUM_TOKENS))
    for nats in (0.0, 0.04):
        served = replace(sound.answer, token_ids=tokens, logprobs=tuple(own - nats for own in again))
        recorded = replace(sound, answer=served, replayed=replace(sound.replayed, logprobs=again))
        found = by_all(recorded, folders[0], monkeypatch)
        assert {one.suspect for one in found.values()} == {nats > 0}
