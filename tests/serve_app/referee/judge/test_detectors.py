"""The referee's detectors over what a sound engine drafts, accepts and recovers: none of them says a word."""

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from serve_app.referee.judge.detectors import Alarm, ReplicaWatch, SeenToken
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.strata import KNOWN_AFTERWARDS
from speculative.drafting.base import Drafter
from speculative.engine import EngineCore
from speculative.request import SamplingParams
from tests.support.perturbed_engines import MOST_DRAFTS, VOCAB, answers, replayed
from tests.support.referees import TOLERANCE
from tools.faults.toy import TableDrafter, engine_over

TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1)) * 1.5
PARAMS = SamplingParams(max_tokens=48, ignore_eos=True, logprobs=0)


def seen(engine: EngineCore, count: int) -> Iterator[Sequence[SeenToken]]:
    """What a referee with the right table sees of so many answers of an engine."""
    served = answers(engine, {"sampled": PARAMS}, count)["sampled"]
    judge = Judge(TOLERANCE)
    for answer, again in zip(served, replayed(engine_over(TABLE, Drafter()), served), strict=True):
        yield judge.judge(answer, again).tokens


def test_a_sound_engine_that_draws_its_drafts_raises_no_alarm_in_any_stratum() -> None:
    """Accepted and recovered tokens each follow a distribution of their own, and only together the target's."""
    draft_probs = 0.5 * TABLE.softmax(-1) + 0.5 * (0.5 * TABLE).softmax(-1)
    watch, num_seen = ReplicaWatch(TOLERANCE), Counter[str]()
    for tokens in seen(engine_over(TABLE, TableDrafter(draft_probs, MOST_DRAFTS)), 320):
        assert watch.see(tokens, greedy=False, drift_tolerance=0.05) == []
        for token in tokens:
            num_seen.update(token.strata)
    assert min(num_seen[name] for name in ("accepted", "recovered", "bonus", "speculative")) > 300


def test_tokens_that_follow_another_distribution_are_seen_whatever_their_kind() -> None:
    broken = engine_over(1.3 * TABLE, TableDrafter(TABLE.softmax(-1), MOST_DRAFTS))
    watch, alarms = ReplicaWatch(TOLERANCE), list[Alarm]()
    for tokens in seen(broken, 80):
        alarms += watch.see(tokens, greedy=False, drift_tolerance=10.0)
    of_distribution = {alarm.stratum for alarm in alarms if alarm.name in ("probability", "surprisal")}
    assert {"all", "sampled"} <= of_distribution
    assert not of_distribution & KNOWN_AFTERWARDS
