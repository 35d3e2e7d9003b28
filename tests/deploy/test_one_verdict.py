"""One answer, one verdict: the service, the watch, the audit and `verify` judge by the same tolerances.

Where they differ, the pair of engines does: a service replays with its own engine, the others in float32.
"""

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from deploy.exchange.exchanges import COMPLETIONS, Exchange
from deploy.faults.tiny import write_tiny_tokenizer
from deploy.probes.lab import EXACT, ROUNDED
from deploy.probes.probes import PROBES, Trial
from deploy.probes.replay import check_greedy
from deploy.run import verify
from deploy.watch.referee import Referee, RefereeOptions
from serve_app.backends.base import ModelInfo, Replayed
from serve_app.referee.judgement import Judge
from serve_app.referee.receipts import Receipt
from serve_app.referee.tolerance import EDGE_NATS, Tolerance
from serve_app.referee.verdicts import Verdict
from speculative.request import ReplayedToken, Request, SamplingParams, TokenKind
from tests.support.referees import recorded

NUM_TOKENS = 64
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True)


@dataclass(frozen=True)
class Recorded:
    """A greedy answer, `num_off` of whose tokens lie `gap` nats below the likeliest in its replay.

    precision: of the server.
    """

    precision: str
    gap: float
    num_off: int = 8

    @property
    def rows(self) -> tuple[ReplayedToken, ...]:
        every = NUM_TOKENS // max(self.num_off, 1)
        off = [self.num_off > 0 and index % every == 0 for index in range(NUM_TOKENS)]
        return tuple(ReplayedToken(0.9, 0.85, 0.1, 0.2, self.gap if one else 0.0, 0.0) for one in off)

    @property
    def replayed(self) -> Replayed:
        return Replayed((-0.1,) * NUM_TOKENS, self.rows, replica="p1")


def by_service(answer: Recorded, tolerance: Tolerance) -> bool:
    """Whether a service suspects it, whose replays are computed by that pair."""
    kinds = (TokenKind.FIRST, *[TokenKind.RECOVERED] * (NUM_TOKENS - 1))
    judged = recorded(
        "cmpl-1",
        request=Request("cmpl-1", (1, 2, 3), GREEDY),
        token_ids=(5,) * NUM_TOKENS,
        logprobs=(-0.1,) * NUM_TOKENS,
        kinds=kinds,
        rounds_since_handoff=(None,) * NUM_TOKENS,
        preempted=(False,) * NUM_TOKENS,
        max_model_len=512,
    )
    return Judge(tolerance).judge(judged, answer.replayed).checked.verdict is Verdict.SUSPECT


def by_watch(answer: Recorded, folder: Path) -> bool:
    """Whether `truespec watch --precision` suspects it."""
    request = {"prompt": [1, 2, 3], "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    logprobs = {"token_logprobs": [-0.1] * NUM_TOKENS}
    choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [5] * NUM_TOKENS, "logprobs": logprobs}
    bodies = (json.dumps(one).encode() for one in (request, {"id": "cmpl-1", "choices": [choice]}))
    exchange = Exchange(COMPLETIONS, *bodies, streamed=False, began_at=1.0, ended_at=2.0)

    async def judged() -> bool:
        options = RefereeOptions(tolerance=Tolerance.against_float32(answer.precision))
        referee = Referee(options, ModelInfo("tiny", 512, 512, "", str(folder), (2,)), Rows(answer))
        running = asyncio.create_task(referee.run())
        (checked,) = await referee.judge(exchange)
        running.cancel()
        return checked.verdict is Verdict.SUSPECT

    return asyncio.run(judged())


def by_audit(answer: Recorded) -> bool:
    """Whether `truespec audit server` finds something in it."""
    tolerance = EXACT if answer.precision == "float32" else ROUNDED
    lab: Any = SimpleNamespace(tolerance=tolerance, distribution=lambda _: _Distribution(answer))
    served: Any = SimpleNamespace(
        attempt=SimpleNamespace(body={}), answer=SimpleNamespace(finish_reason="length"), ids=(5,) * NUM_TOKENS
    )
    trial = Trial(PROBES["distribution of the tokens"], 1e-6)
    return not check_greedy(lab, trial, served, "greedy", ("F8",))


def by_verify(answer: Recorded, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether `truespec verify` refuses its receipt."""
    monkeypatch.setattr(verify, "_wrong_contents", lambda *_: "")
    monkeypatch.setattr(verify, "make_replayer", lambda _: Rows(answer))
    receipt = Receipt(
        format="truespec-receipt-1",
        id="cmpl-1-0",
        created=1,
        model="tiny",
        fingerprint="f",
        weights=answer.precision,
        dtype=answer.precision,
        quantization=None,
        computing="c",
        truespec="0",
        weight_versions=("v",),
        prompt_token_ids=(1, 2, 3),
        token_ids=(5,) * NUM_TOKENS,
        token_kinds=(TokenKind.FIRST, *[TokenKind.RECOVERED] * (NUM_TOKENS - 1)),
        num_delivered=NUM_TOKENS,
        logprobs=None,
        logprobs_mode="raw_logprobs",
        params=GREEDY,
        seed="1",
        rounds=(),
    )
    return bool(verify.verify(receipt, Path(), "torch").reason)


class Rows:
    """The replayer that gives an answer its rows."""

    at_once = 1

    def __init__(self, answer: Recorded) -> None:
        self._answer = answer
        self.info = ModelInfo("tiny", 512, 512, "", "", (2,))

    async def start(self) -> ModelInfo:
        return self.info

    async def replay(self, request: Any) -> Replayed:
        return self._answer.replayed

    async def stop(self) -> None:
        """Nothing was loaded."""


class _Distribution:
    """As the audit's reference gives it."""

    def __init__(self, answer: Recorded) -> None:
        self.gap = np.array([row.gap for row in answer.rows])
        self.outside = np.zeros(NUM_TOKENS)

    def __len__(self) -> int:
        return NUM_TOKENS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(made)
    return made


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("edges", "suspect"), [(0.0, False), (0.8, False), (1.6, True), (8.0, True)])
def test_all_who_replay_in_float32_say_the_same(
    precision: str, edges: float, suspect: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tolerance = Tolerance.against_float32(precision)
    answer = Recorded(precision, edges * tolerance.edge_nats)
    found = {
        "independent check": by_service(answer, tolerance),
        "watch": by_watch(answer, folder),
        "audit": by_audit(answer),
        "verify": by_verify(answer, monkeypatch),
    }
    assert found == dict.fromkeys(found, suspect)


@pytest.mark.parametrize(
    ("gap", "equals", "apart"), [(0.2, False, False), (0.3, True, False), (0.4, True, False), (0.6, True, True)]
)
def test_a_service_that_replays_on_its_own_engine_is_stricter_by_its_pair(
    gap: float, equals: bool, apart: bool
) -> None:
    answer = Recorded("bfloat16", gap)
    own, other = Tolerance.between_equals("bfloat16"), Tolerance.against_float32("bfloat16")
    assert (own.edge_nats, other.edge_nats) == (EDGE_NATS["bfloat16"], 2 * EDGE_NATS["bfloat16"])
    assert (by_service(answer, own), by_service(answer, other)) == (equals, apart)
