"""What is reported beside the logprobs: each number is its own token's, and the likeliest tokens are the likeliest."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from serve_app.backends.base import Replayed
from serve_app.referee.judge.alternatives import ComparedAlternatives, compare_place
from serve_app.referee.judge.answer import Alternatives, Answer, KeptAlternatives
from serve_app.referee.judge.draws import DrawTolerance
from serve_app.referee.judge.judgement import Judge
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.judge.verdicts import Checked, Verdict
from serve_app.referee.records.records import Record
from speculative.request import Request, SamplingParams, TokenDelta, TokenKind, TokenLogprobs
from tests.support.engines import NGRAM, tiny_engine
from tests.support.referees import Court, EngineReplay, recorded, serve

PROMPT = (9, 17, 33, 5) * 5
NAMED = (40, 41, 300)
PARAMS = SamplingParams(
    temperature=0.8, max_tokens=24, ignore_eos=True, logprobs=3, logprob_token_ids=NAMED, prompt_logprobs=2
)
Change = Callable[[list[Alternatives]], list[Alternatives]]


@pytest.fixture(scope="module")
def answer(folder: Path) -> Answer:
    return serve(tiny_engine(folder, drafter=NGRAM), Request("cmpl-1-0", PROMPT, PARAMS, seed=3))


@pytest.fixture(scope="module")
def replayed(folder: Path, answer: Answer) -> Replayed:
    replay = EngineReplay(tiny_engine(folder))

    async def both() -> Replayed:
        return (await replay(answer.scored("again"))).after(await replay(answer.scored_prompt("prompt")))

    return asyncio.run(both())


def judged(answer: Answer, replayed: Replayed) -> Checked:
    return Judge(Tolerance.between_equals("float32")).judge(answer, replayed).checked


def test_a_sound_answer_is_verified_and_every_number_is_compared(answer: Answer, replayed: Replayed) -> None:
    checked = judged(answer, replayed)
    assert (checked.verdict, checked.reason) == (Verdict.VERIFIED, "replayed")
    assert "alternatives" in checked.checks
    found = checked.to_wire()["alternatives"]
    assert found["num_compared"] == 24 * (3 + len(NAMED)) + (len(PROMPT) - 1) * 2
    assert found["num_left_out"] == 0 and found["max_drift_nats"] < 1e-4


def other_ids(*, of_prompt: bool) -> Change:
    """Have the likeliest tokens of the prompt, or of the answer, reported under other ids."""

    def changed(one: Alternatives) -> Alternatives:
        return one._replace(top=tuple((token ^ 1, value) for token, value in one.top))

    return lambda places: [changed(one) if (one.place < len(PROMPT)) == of_prompt else one for one in places]


def row_before(places: list[Alternatives]) -> list[Alternatives]:
    output = [one for one in places if one.place >= len(PROMPT)]
    moved = [one._replace(scored=before.scored) for one, before in zip(output, [output[-1], *output[:-1]], strict=True)]
    return [*places[: -len(output)], *moved]


def one_number(places: list[Alternatives]) -> list[Alternatives]:
    last = places[-1]
    (token, value), *rest = last.scored
    return [*places[:-1], last._replace(scored=((token, value - 0.5), *rest))]


def one_too_few(places: list[Alternatives]) -> list[Alternatives]:
    return [*places[:-1], places[-1]._replace(top=places[-1].top[:-1])]


def another_order(places: list[Alternatives]) -> list[Alternatives]:
    return [one._replace(scored=one.scored[::-1]) for one in places]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_ids(of_prompt=False), "was reported among the likeliest"),
        (row_before, "the logprob reported of"),
        (other_ids(of_prompt=True), "alternatives: prompt token 1: "),
        (one_number, "alternatives: token 23: the logprob reported of 40 is 0.5 nats off"),
        (one_too_few, "alternatives: token 23: 2 of the 3 likeliest tokens were reported"),
        (another_order, "are not those that the request names"),
    ],
)
def test_what_is_wrong_beside_right_logprobs_makes_the_answer_suspect(
    answer: Answer, replayed: Replayed, change: Change, said: str
) -> None:
    wrong = replace(answer, alternatives=tuple(change(list(answer.alternatives))))
    checked = judged(wrong, replayed)
    assert checked.verdict is Verdict.SUSPECT
    assert checked.reason.startswith("alternatives: ") and said in checked.reason


def test_a_referee_that_computes_no_prompts_leaves_theirs_out_and_counts_them(
    answer: Answer, replayed: Replayed
) -> None:
    num_prompt = len(PROMPT) - 1
    of_answer = replace(replayed, logprobs=replayed.logprobs[num_prompt:], entries=replayed.entries[num_prompt:])
    checked = judged(replace(answer, prompt_logprobs=()), of_answer)
    assert checked.verdict is Verdict.VERIFIED
    assert checked.alternatives.num_left_out == num_prompt * 2
    last = judged(replace(answer, prompt_logprobs=()), replace(of_answer, entries=replayed.entries))
    assert last.alternatives == checked.alternatives, "entries belong to the last tokens, as logprobs do"
    nothing = judged(replace(answer, prompt_logprobs=()), replace(of_answer, entries=()))
    assert nothing.alternatives.num_compared == 0 and "alternatives" not in nothing.checks
    assert nothing.alternatives.num_left_out == num_prompt * 2 + 24 * (3 + len(NAMED))


ROW = TokenLogprobs(1, -1.0, 1, ((1, -1.0), (2, -1.5), (3, -1.5005), (4, -4.0)), ((9, -7.0),))


@pytest.mark.parametrize(
    ("top", "wrong"),
    [
        ((1, 2, 3), False),
        ((1, 3, 2), False),  # a near-tie
        ((2, 1, 3), True),
        ((1, 2, 4), True),
        ((2, 3, 4), True),  # the likeliest is left out, and each number is its token's
        ((1, 2, 2), True),
    ],
)
def test_the_likeliest_are_the_likeliest_up_to_near_ties(top: tuple[int, ...], wrong: bool) -> None:
    values = dict(ROW.top)
    reported = Alternatives(5, tuple((token, values[token]) for token in top))
    compared = ComparedAlternatives((compare_place(reported, ROW, num_top=3),), 0, 2)
    rounding = DrawTolerance(Tolerance.between_equals("float32").edge_nats)
    assert bool(compared.wrong(rounding, 0.01, 0.1)) is wrong


def test_of_a_token_that_the_replay_does_not_name_it_knows_an_upper_bound() -> None:
    row = replace(ROW, scored=())
    rightly = compare_place(Alternatives(5, scored=((77, -6.0), (78, -9.0))), row)
    assert (rightly.drifts, rightly.num_unknown) == ((), 2)
    (drift,) = compare_place(Alternatives(5, scored=((77, -2.0),)), row).drifts
    assert drift[1].nats == pytest.approx(2.0), "no token behind the fourth can have more than -4"


def test_of_too_many_numbers_places_all_over_the_answer_are_kept_and_the_others_counted() -> None:
    kept = KeptAlternatives(most=100)
    for place in range(1000):
        kept.add(Alternatives(place, ((1, -1.0), (2, -2.0))))
    assert 25 <= len(kept.kept) <= 50
    assert kept.kept[-1].place > 950
    assert 2 * len(kept.kept) + kept.num_left_out == 2000
    whole = KeptAlternatives(most=100)
    whole.add(Alternatives(7, tuple((token, -1.0) for token in range(1000))))
    assert len(whole.kept) == 1, "one place is never taken apart"


def test_nothing_is_kept_of_an_answer_that_is_not_replayed() -> None:
    request = Request("r", (1, 2), SamplingParams(logprobs=1))
    delta = TokenDelta("r", (5,), (TokenKind.FIRST,), (TokenLogprobs(5, -1.0, 1, ((5, -1.0),)),))
    for keeps in (True, False):
        record = Record(request, "r1", 0.0, 64, keeps_alternatives=keeps)
        record.take(delta)
        assert bool(record.alternatives.kept) is keeps


def test_a_logprob_that_goes_by_another_token_is_found_without_a_replay() -> None:
    record = Record(Request("r", (1, 2), SamplingParams(logprobs=0)), "r1", 0.0, 64)
    record.take(TokenDelta("r", (5,), (TokenKind.FIRST,), (TokenLogprobs(6, -1.0, 1),)))
    assert record.broken_limit == "the logprob of the token 5 is said to be that of 6"


async def test_the_replica_that_reports_others_numbers_is_alarmed(court: Court) -> None:
    court.on_heartbeat("r1")
    court.replayer.beside = -3.0
    for number in range(4):
        beside = tuple(Alternatives(3 + place, (), ((7, -2.0),)) for place in range(2))
        own = Request(f"cmpl-{number}-0", (1, 2, number))
        answer = replace(recorded(own.request_id, request=own), logprobs=(-1.0, -1.0), alternatives=beside)
        await court.checker.check(answer)
    assert court.value("truespec_replay_alarms_total", alarm="alternatives") >= 1
    assert court.value("truespec_replay_alarms_total", alarm="drift") == 0
