"""Every draw of an answer, made again: sound answers follow from their seeds, and each kind of wrong draw is found."""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.assembly import Assembly
from speculative.drafting.head_drafters import Eagle3DraftModel
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.errors import InvalidRequest
from speculative.request import Draw, Redrawn, ReplayedToken, Request, Round, SamplingParams, TokenKind
from speculative.sampling.probs import SamplingRows
from speculative.sampling.rng import Purpose, gumbel, uniforms
from speculative.selfcheck.draw_margins import Distributions, redraw
from speculative.selfcheck.replayed_draws import DrawCheck, Rounds
from speculative.selfcheck.replayed_tokens import replayed_tokens
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.engines import answer_all, settings
from tests.support.pretended_cuda import PretendedCuda
from tests.support.tiny_heads import random_head
from tools.faults.toy import EvenAndOdd, table_engine, tiny_engine, tiny_weights
from tools.faults.traffic import FILTERED, PLAIN, mixed, sampling

NUM_TOKENS = 256
STOPPING = replace(PLAIN, stop_token_ids=tuple(range(0, NUM_TOKENS, 8)))
ROUNDING = 1e-4  # nats; a replay computes other batch shapes


def serve(engine: EngineCore, requests: list[Request]) -> dict[str, Rounds]:
    answers = answer_all(engine, requests)
    assert {answer.error for answer in answers.values()} == {None}
    starts = {one.request_id: len(one.prompt_token_ids) for one in requests}
    return {
        name: Rounds(starts[name], tuple(own.rounds), tuple(own.token_ids), tuple(own.kinds))
        for name, own in answers.items()
    }


def replay(engine: EngineCore, request: Request, answer: Rounds) -> list[DrawCheck]:
    assert answer.complete
    whole = (*request.prompt_token_ids, *answer.tokens)
    params = replace(request.params, prompt_logprobs=None)
    scored = {"score_from": len(request.prompt_token_ids), "draws": answer.draws()}
    engine.add(replace(request, request_id="replay", prompt_token_ids=whole, params=params, **scored))
    while engine.has_work:
        for delta in engine.step():
            assert delta.replayed is not None, delta.error
            return answer.check(delta.replayed)
    raise AssertionError


def sampled(requests: Iterator[Request], count: int = 16) -> list[Request]:
    return list(itertools.islice((one for one in requests if not one.params.greedy), count))


def head_engine(drafted: range, verifier: str) -> EngineCore:
    """A tiny decoder with random weights, for which a random head drafts; its cache is too small for all."""
    decoder = tiny_weights().decoder
    model = decoder.config
    head = random_head(decoder, torch.tensor(drafted), embedding=decoder.embedding, aux_layers=(0, 1))
    small = settings(verifier=verifier, kv_cache_tokens=256, block_size=8)
    structure = EvenAndOdd(model.vocab_size)
    drafts = Eagle3DraftModel(head, "")
    return EngineCore(Assembly(Weights(decoder, draft_model=drafts), small, lambda _: structure))


ENGINES: dict[str, Callable[[str], EngineCore]] = {
    "sampled drafts": lambda verifier: table_engine(NUM_TOKENS, verifier=verifier),
    "deterministic drafts": lambda verifier: table_engine(NUM_TOKENS, deterministic=True, verifier=verifier),
    "n-grams": lambda verifier: tiny_engine(verifier=verifier),
    "a head": lambda verifier: head_engine(range(2, 42), verifier),
    "a head over the whole vocabulary": lambda verifier: head_engine(range(64), verifier),
    "a drafter of its own": lambda verifier: tiny_engine(verifier=verifier, own_drafts=True),
    "preempted": lambda verifier: tiny_engine(verifier=verifier, own_drafts=True, kv_cache_tokens=256),
}


def traffic(name: str) -> list[Request]:
    if "drafts" not in name:
        return sampled(mixed(64))
    kinds = enumerate((PLAIN, FILTERED, STOPPING))
    return [one for seed, params in kinds for one in sampled(sampling(NUM_TOKENS, params, seed), 6)]


@pytest.mark.parametrize("name", ENGINES)
@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
def test_what_was_served_follows_from_its_seed_and_a_token_that_was_changed_by_hand_is_named(
    verifier: str, name: str
) -> None:
    engine, seen, chance, named = ENGINES[name](verifier), Counter[str](), random.Random(1), 0
    requests = traffic(name)
    answers = serve(engine, requests)
    assert name != "preempted" or engine.stats.num_preemptions
    for request in requests:
        answer = answers[request.request_id]
        for check in replay(engine, request, answer):
            assert check.miss < ROUNDING, check
            seen[check.kind] += 1
        index, tokens = chance.randrange(len(answer.tokens)), list(answer.tokens)
        tokens[index] = chance.choice([token for token in range(2, 60) if token != tokens[index]])
        checks = replay(engine, request, replace(answer, tokens=tuple(tokens)))
        named += index == min((check.token_index for check in checks if check.miss > ROUNDING), default=-1)
    assert named >= 0.8 * len(requests), f"{named} of {len(requests)}"
    expected = {"choice"} if verifier == "coupled" else {"interval", "accepted", "rejected"}
    known = {"interval", "residual", "support", "recovered", "accepted", "rejected", "choice"}
    assert expected <= seen.keys() <= known
    if verifier != "coupled":
        assert ("residual" if name in ("deterministic drafts", "n-grams") else "support") in seen
    if name == "sampled drafts":  # whose q does not follow every request's parameters
        assert 0 < seen["recovered"] < seen["support"] or verifier == "coupled"
    else:
        assert seen["recovered"] == seen["support"]


def test_a_head_that_read_features_of_another_position_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its drafts are verified, so nothing but acceptance suffers, and the replay that has a sound one."""
    sound, faulty = head_engine(range(2, 42), "token_wise"), head_engine(range(2, 42), "token_wise")
    drafter = faulty.parts.eager.drafter
    assert isinstance(drafter, ModelDrafter)
    fuse = drafter.model.fuse
    monkeypatch.setattr(drafter.model, "fuse", lambda features: fuse(features.roll(1, 0)))
    requests = traffic("a head")
    answers = serve(faulty, requests)
    found = Counter(
        check.kind
        for request in requests
        for check in replay(sound, request, answers[request.request_id])
        if check.miss > ROUNDING
    )
    assert found["recovered"] > len(requests) and found.keys() == {"recovered"}


def one_row(
    logits: list[float], token: int, draw: Draw, params: SamplingParams, drafter: list[float] | None = None
) -> Redrawn:
    def distributions(logits: list[float]) -> Distributions:
        rows = SamplingRows.build([params], len(logits), torch.device("cpu"))
        return Distributions.of(torch.tensor([logits]), rows, VocabularyOps().process)

    known = {} if drafter is None else dict(enumerate(distributions(drafter).each()))
    (redrawn,) = redraw(distributions(logits), [token], [draw], Request("r", (1,), params, 7), known)
    return redrawn


def log_odds(share: float) -> float:
    return math.log(share / (1 - share))


def test_a_miss_is_what_the_logits_would_have_to_move() -> None:
    draw = Draw("bonus", 5, 0)
    (uniform,) = uniforms(*np.array([[7], [5], [0], [Purpose.BONUS]], np.uint64)).tolist()
    p = uniform + 0.05  # of two tokens the first should have been drawn
    logits = [math.log(p / (1 - p)), 0.0]
    assert one_row(logits, 0, draw, PLAIN)[:2] == (0, 0)
    redrawn = one_row(logits, 1, draw, PLAIN)
    # Its log odds move by as much as one logit against the other: sqrt(2) as much for two that move by themselves.
    assert redrawn.miss == pytest.approx((log_odds(p) - log_odds(uniform)) / math.sqrt(2), rel=1e-3)
    assert redrawn.loose == redrawn.miss


def test_a_miss_behind_a_sampled_draft_is_what_the_logits_of_both_would_have_to_move() -> None:
    """Against the standard deviation of the edge, with a little noise on the logits of both."""
    noise = torch.Generator().manual_seed(3)
    target = torch.randn(12, generator=noise) * 1.5
    logits = torch.stack([target, target + torch.tensor([1.0, -1.0] * 6)])
    draw = Draw("recovered", 5, 0, rejected=4)
    (uniform,) = uniforms(*np.array([[7], [5], [0], [Purpose.RESIDUAL]], np.uint64)).tolist()

    def edges(rows: Tensor) -> Tensor:
        """[..., 12] of the cumulative residual, given logits [2, ..., 12]."""
        target, drafter = rows.double().softmax(-1)
        left = (target - drafter).clamp(min=0)
        return (left / left.sum(-1, keepdim=True)).cumsum(-1)

    exact = edges(logits)
    moved = edges(logits[:, None] + 1e-3 * torch.randn(2, 20_000, 12, generator=noise)).std(0) / 1e-3
    demanded = int((exact < uniform).sum())
    for token in range(12):
        redrawn = one_row(logits[0].tolist(), token, draw, PLAIN, drafter=logits[1].tolist())
        assert redrawn.rejected_draft_probability == pytest.approx(float(logits[1].softmax(-1)[draw.rejected]))
        if token == demanded:
            assert redrawn.miss == 0
        elif exact[token] > (exact[token - 1] if token else 0):
            edge = token if token < demanded else token - 1
            place = float(exact[edge])
            expected = abs(log_odds(place) - log_odds(uniform)) * place * (1 - place) / float(moved[edge])
            assert redrawn.miss == pytest.approx(expected, rel=0.03)
        else:
            assert redrawn.miss > 0


def test_a_miss_of_a_choice_by_noise_is_the_gap_to_the_winner() -> None:
    logits = [0.3, -0.2, 1.0, 0.0]
    scores = torch.tensor(logits).double().log_softmax(-1) + gumbel(torch.tensor([7]), torch.tensor([9]), 4)[0]
    draw = Draw("noise", 8, 1)
    for token, score in enumerate(scores.tolist()):
        assert one_row(logits, token, draw, PLAIN).miss == pytest.approx(float(scores.max()) - score, abs=1e-6)


@pytest.mark.parametrize("params", [PLAIN, FILTERED])
def test_a_vocabulary_comes_to_the_host_only_for_a_draw_that_misses(params: SamplingParams) -> None:
    """The copy of 64 distributions over a usual vocabulary would take longer than their computation."""
    num_tokens, size, request = 16, 5000, Request("r", (1,), params, 7)
    logits = torch.randn(num_tokens, size, generator=torch.Generator().manual_seed(1)) * 3
    draws = [Draw("bonus", place, 0) for place in range(num_tokens)]
    keys = np.array([(7, place, 0, Purpose.BONUS) for place in range(num_tokens)], np.uint64)
    drawn = torch.from_numpy(uniforms(*keys.T))[:, None]

    def target(device: str) -> Distributions:
        rows = SamplingRows.build([params] * num_tokens, size, torch.device(device))
        return Distributions.of(logits.to(device), rows, VocabularyOps().process)

    tokens = torch.searchsorted(target("cpu").probs.double().cumsum(-1), drawn)[:, 0].tolist()
    on_host = redraw(target("cpu"), tokens, draws, request, {})
    assert {one.miss for one in on_host} == {0}
    with PretendedCuda() as device:
        computed = target("cuda")
        device.clear()
        assert redraw(computed, tokens, draws, request, {}) == on_host
        assert device.num_copied < size and sum(device.waits.values()) < 8, device.waits
        device.clear()
        others = target("cpu").probs.argmax(-1).tolist()
        redrawn = redraw(computed, others, draws, request, {})
        num_missed = sum(0 < one.miss < math.inf for one in redrawn)
        assert 0 < num_missed <= device.num_copied // size <= 2 * num_missed


def test_tokens_near_an_edge_of_the_filters_may_be_on_either_side() -> None:
    draw = Draw("bonus", 5, 0)
    params = replace(PLAIN, top_k=2)
    outside = one_row([2.0, 1.0, 0.99, -3.0], 2, draw, params)
    assert outside.miss == math.inf and outside.loose == 0
    far = one_row([2.0, 1.0, 0.5, -3.0], 2, draw, params)
    assert far.miss == far.loose == math.inf


@pytest.mark.parametrize("rule", ["bonus", "noise"])
@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.3}])
def test_of_tokens_that_tie_at_an_edge_either_may_have_been_outside(
    filters: dict[str, float], rule: Literal["bonus", "noise"]
) -> None:
    draw, params = Draw(rule, 5, 0), replace(PLAIN, **filters)
    assert [one_row([1.0, 1.0, -3.0], token, draw, params).loose for token in range(2)] == [0, 0]
    without = [one_row([1.0, 1.0, -3.0], token, draw, PLAIN).loose for token in range(2)]
    assert min(without) == 0 < max(without), "unless nothing is filtered: of two one was drawn"


def test_a_draw_for_each_scored_token_or_none() -> None:
    draw = Draw("bonus", 2, 0)
    with pytest.raises(InvalidRequest, match="draws must be one for each scored token"):
        Request("r", (1, 2, 3, 4), score_from=2, draws=(draw,))
    answer = Rounds(3, (Round("token_wise", 1),), (5,), (TokenKind.FIRST,))
    with pytest.raises(ValueError, match="1 tokens were served, and 0 replayed"):
        answer.check([])
    assert not replace(answer, rounds=()).complete


@pytest.mark.parametrize("temperature", [1e-9, 1e-7, 1e-6, 1e-3, 0.05, 1.0, 50.0])
def test_nothing_that_is_replayed_ends_the_engine(temperature: float) -> None:
    """An exception would be the engine's end, and that of the next one which the answer is replayed by."""
    chance = torch.Generator().manual_seed(int(1e9 * temperature))
    rules = (("bonus", -1), ("residual", 3), ("recovered", 3), ("noise", -1), ("none", -1))
    draws = [Draw(rule, 2, 0, rejected) for rule, rejected in rules]  # type: ignore[arg-type]
    filters = (
        {},
        {"top_k": 1},
        {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.05},
        {"min_p": 1.0},
        {"top_p": 0.9, "min_p": 0.3},
    )
    for spread in (0.0, 1e-3, 1.0, 30.0, 1e4):
        logits = torch.randn(len(draws), 40, generator=chance) * spread
        logits[:, :4] = torch.tensor([0.0, 20.0, 19.8, 3.0]) * spread
        logits[:, 30:] = -torch.inf  # what a rule forbids
        for fields in filters:
            params = SamplingParams(temperature=temperature, **fields)
            rows = SamplingRows.build([params] * len(draws), 40, logits.device)
            target = Distributions.of(logits, rows, VocabularyOps().process)
            drafter = dict(enumerate(Distributions.of(logits.roll(1, 1), rows, VocabularyOps().process).each()))
            for token in (0, 1, 2, 3, 35):
                redrawn = redraw(target, [token] * len(draws), draws, Request("r", (1,), params, 7), drafter)
                for one in redrawn:
                    assert one.miss >= one.loose >= 0
                    for least, most in (one.bounds, one.rejected_bounds):
                        assert 0 <= least <= most <= 1 + 1e-5
                row = ReplayedToken(0.0, 0.0, 0.0, 0.0, 0.0, math.inf)
                answer = Rounds(2, (Round("token_wise", 1, 1, (3,), (0.0,), 0.0),), (token,), (TokenKind.RECOVERED,))
                for check in answer.check([replace(row, redrawn=redrawn[2])]):
                    assert check.miss >= check.loose >= 0


@pytest.mark.parametrize("fields", [{"top_p": 0.5}, {"min_p": 0.3}, {"top_k": 5}])
@pytest.mark.parametrize("kind", [TokenKind.RECOVERED, TokenKind.ACCEPTED])
def test_a_token_that_a_filter_excludes_is_no_draft_and_comes_in_no_drafts_stead(
    kind: TokenKind, fields: dict[str, Any]
) -> None:
    """Whatever its q is said to be."""
    logits = torch.linspace(5.0, 0.0, 100)[None]
    params = SamplingParams(**fields)
    token, rejected = 60, 1 if kind is TokenKind.RECOVERED else -1
    draw = Draw("recovered" if rejected == 1 else "none", 2, 0, rejected)
    request = Request("r", (1, 2, token), params, score_from=2, draws=(draw,), replay=True)
    (row,) = replayed_tokens(logits, request, 2, None, (), VocabularyOps())
    assert row.outside > 0
    drafted = (1,) if rejected == 1 else (token,)
    for q in (1.0, 1e-30, 0.0):
        answer = Rounds(2, (Round("token_wise", 1, 1, drafted, (q,), 0.0),), (token,), (kind,))
        assert max(check.loose for check in answer.check([row])) == math.inf
