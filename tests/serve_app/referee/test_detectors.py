"""The referee's detectors over what a sound engine drafts, accepts and recovers: none of them says a word."""

import torch

from serve_app.referee.answer import Answer
from serve_app.referee.detectors import Alarm, ReplicaWatch, SeenToken
from serve_app.referee.drift import TokenDrift
from serve_app.referee.records import Record, Records
from serve_app.referee.strata import KNOWN_AFTERWARDS, STRATA
from speculative.drafting.base import NoDrafter
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams, TokenDelta
from tests.support.referees import TOLERANCE
from tools.faults.toy import TableDrafter, engine_over

VOCAB_SIZE, NUM_DRAFTS, BATCH = 64, 3, 16
PROMPT = (1, 2, 3)


def drained(engine: EngineCore) -> dict[str, list[TokenDelta]]:
    out: dict[str, list[TokenDelta]] = {}
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            out.setdefault(delta.request_id, []).append(delta)
    return out


def answers(engine: EngineCore, records: Records, number: int) -> list[Answer]:
    params = SamplingParams(max_tokens=48, ignore_eos=True, logprobs=0)
    requests = [Request(f"cmpl-{number + i}-0", PROMPT, params, seed=number + i) for i in range(BATCH)]
    kept: dict[str, Record] = {request.request_id: records.begin(request) for request in requests}
    for request in requests:
        engine.add(request)
    for request_id, deltas in drained(engine).items():
        for delta in deltas:
            kept[request_id].take(delta)
    made = [record.answer() for record in kept.values()]
    return [answer for answer in made if answer is not None]


def seen(answer: Answer, referee: EngineCore) -> list[SeenToken]:
    request = Request("replay", (*PROMPT, *answer.token_ids), answer.request.params, score_from=len(PROMPT))
    referee.add(request)
    ((delta,),) = drained(referee).values()
    assert delta.replayed is not None and delta.logprobs is not None
    replayed = (entry.logprob for entry in delta.logprobs)
    drifts = [TokenDrift.between(*pair) for pair in zip(answer.logprobs, replayed, strict=True)]
    rows = zip(answer.strata, drifts, delta.replayed, strict=True)
    return [SeenToken(strata, drift, row, "r1") for strata, drift, row in rows]


def test_a_sound_engine_that_draws_its_drafts_raises_no_alarm_in_any_stratum() -> None:
    """Accepted and recovered tokens each follow a distribution of their own, and only together the target's."""
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 1.5
    draft_probs = 0.5 * table.softmax(-1) + 0.5 * (0.5 * table).softmax(-1)
    engine = engine_over(table, TableDrafter(draft_probs, NUM_DRAFTS))
    referee = engine_over(table, NoDrafter())
    watch, records = ReplicaWatch(TOLERANCE), Records("r1", 512)
    num_seen = dict.fromkeys(STRATA, 0)
    for number in range(0, 20 * BATCH, BATCH):
        for answer in answers(engine, records, number):
            tokens = seen(answer, referee)
            assert watch.see(tokens, greedy=False, drift_tolerance=0.05) == []
            for token in tokens:
                for stratum in token.strata:
                    num_seen[stratum] += 1
    assert num_seen["all"] == 20 * BATCH * 48
    assert min(num_seen[name] for name in ("accepted", "recovered", "bonus", "speculative")) > 300


def test_tokens_that_follow_another_distribution_are_seen_whatever_their_kind() -> None:
    table = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 1.5
    broken = engine_over(1.3 * table, TableDrafter(table.softmax(-1), NUM_DRAFTS))
    referee = engine_over(table, NoDrafter())
    watch, records = ReplicaWatch(TOLERANCE), Records("r1", 512)
    alarms: list[Alarm] = []
    for number in range(0, 5 * BATCH, BATCH):
        for answer in answers(broken, records, number):
            alarms += watch.see(seen(answer, referee), greedy=False, drift_tolerance=10.0)
    of_distribution = {alarm.stratum for alarm in alarms if alarm.name in ("probability", "surprisal")}
    assert {"all", "sampled"} <= of_distribution
    assert not of_distribution & KNOWN_AFTERWARDS
