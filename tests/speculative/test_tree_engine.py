"""Engines that draft trees give, bit for bit, what the coupled verifier gives without drafts, whatever happens on the
way. (Torch's arithmetic rounds differently at other batch shapes; there it is the same within rounding.)"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculative.assembly import Assembly
from speculative.config import DrafterConfig
from speculative.drafting.head_drafters import Eagle3DraftModel
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.drafting.tree_drafter import TreeDrafter
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.kernels import chosen
from speculative.request import Request, SamplingParams, Speculation, Structure
from speculative.scheduling import draft_length, step_cost
from speculative.selfcheck.replayed_draws import Rounds
from tests.support.engines import (
    Answer,
    answer_all,
    assert_idle,
    assert_pool_is_whole,
    exported,
    insert,
    load_engine,
    markov_decoder,
    settings,
)
from tests.support.markov_chain import sample, worst_window
from tests.support.tiny_heads import random_head, write_tiny_head
from tests.support.tiny_models import write_tiny_model
from tests.support.vocabulary import needs_kernels
from tools.faults.toy import EvenAndOdd

VOCAB_SIZE, EOS = 64, 2
KINDS = ("eagle3", "draft_model")
NO_DRAFTS = DrafterConfig(kind="none")
PROMPTS = [tuple(3 + (7 * i * j) % 41 for j in range(4 + 9 * i)) for i in range(1, 5)]
LOOP = tuple([5, 9, 17, 33] * 8)
SAID = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
PARAMS = {
    "greedy": replace(SAID, temperature=0),
    "sampled": SAID,
    "filters": replace(SAID, temperature=1.3, top_k=30, top_p=0.9, min_p=0.01),
    "one left": replace(SAID, top_k=1),
    "penalties": replace(SAID, temperature=0.7, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2),
    "greedy penalties": replace(SAID, temperature=0, frequency_penalty=0.8, repetition_penalty=1.3),
    "bad words": replace(SAID, temperature=0.5, bad_words=((9, 9), (17,), (5, 6, 7), (21, 30))),
    "at least": replace(SAID, ignore_eos=False, min_tokens=9, logit_bias=((EOS, 4.0), (5, 2.0), (9, -3.0))),
    "stops": replace(SAID, ignore_eos=False, min_tokens=5, stop_token_ids=tuple(range(0, VOCAB_SIZE, 9))),
    "few allowed": replace(SAID, allowed_token_ids=tuple(range(2, 9))),
    "prompt": replace(SAID, prompt_logprobs=1, repetition_penalty=1.2),
    "structured": replace(SAID, ignore_eos=False, structure=Structure("regex", "(even odd)*"), stop_token_ids=(1,)),
    "no logprobs": replace(SAID, logprobs=None),
}


Answers = dict[str, Answer]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A target, and what drafts for it; the draft model is the target with noise on its weights."""
    folder = tmp_path_factory.mktemp("trees")
    target = write_tiny_model(folder / "target", vocab_size=VOCAB_SIZE, num_hidden_layers=3)
    near = write_tiny_model(folder / "near", vocab_size=VOCAB_SIZE, num_hidden_layers=3)
    noise = torch.Generator().manual_seed(5)
    weights = load_file(near / "model.safetensors")
    for name, values in weights.items():
        weights[name] = values + 0.02 * torch.randn(values.shape, generator=noise)
    save_file(weights, near / "model.safetensors", metadata={"format": "pt"})
    return {"target": target, "draft_model": near, "eagle3": write_tiny_head(folder / "eagle3", target)}


def make_engine(folders: dict[str, Path], drafter: DrafterConfig, **changes: Any) -> EngineCore:
    small = {"verifier": "coupled", "kv_cache_tokens": 4096, "max_batched_tokens": 512, "prefix_caching": False}
    config = settings(**{**small, **changes}, drafter=drafter)
    return load_engine(folders["target"], config, lambda _: EvenAndOdd(VOCAB_SIZE))


def drafting(folders: dict[str, Path], kind: str, tree: tuple[int, ...] = (3, 2), most: int = 4, **changes: Any) -> Any:
    return DrafterConfig.of(kind=kind, model=str(folders[kind]), num_draft_tokens=most, tree=tree, **changes)


def requests() -> list[Request]:
    """All kinds, two of each."""
    return [
        Request(f"{name}-{number}", PROMPTS[(index + number) % len(PROMPTS)], params, seed=2**63 + 17 * index + number)
        for number in range(2)
        for index, (name, params) in enumerate(PARAMS.items())
    ]


def some_requests(**changes: Any) -> list[Request]:
    params = [replace(PARAMS[name], **changes) for name in ("sampled", "greedy", "penalties", "sampled")]
    pairs = enumerate(zip(PROMPTS, params, strict=True))
    return [Request(f"r{index}", prompt, own, seed=index) for index, (prompt, own) in pairs]


def step(engine: EngineCore, answers: Answers, most: int = 2000) -> Answers:
    """Take so many steps, or fewer where no work is left."""
    for _ in range(most):
        if not engine.has_work:
            break
        for delta in engine.step():
            assert delta.error is None, delta.error
            answers.setdefault(delta.request_id, Answer()).take(delta)
        assert_pool_is_whole(engine)
    return answers


def serve(engine: EngineCore, wanted: Sequence[Request]) -> Answers:
    answers = answer_all(engine, wanted)
    assert not [answer.error for answer in answers.values() if answer.error is not None]
    return answers


def seen(answer: Answer) -> tuple[Any, ...]:
    """Return everything of an answer that a client sees."""
    of_prompt = [one for delta in answer.deltas for one in delta.prompt_logprobs or ()]
    return answer.token_ids, answer.logprobs, of_prompt, answer.finish_reason, answer.stop_token_id


def assert_same(found: Answers, reference: Answers) -> None:
    assert found.keys() == reference.keys()
    for name, answer in reference.items():
        assert found[name].token_ids == answer.token_ids, name
        assert seen(found[name]) == seen(answer), name


def count_rows(owner: Any, name: str, count: Callable[..., int]) -> list[int]:
    """Results of `count` for each call of this method from now on."""
    counts, original = list[int](), getattr(owner, name)

    def counting(*args: Any) -> Any:
        counts.append(count(*args))
        return original(*args)

    setattr(owner, name, counting)
    return counts


def count_moves(engine: EngineCore) -> list[int]:
    """Count the rows of paths over siblings of first candidates that are moved from now on."""
    return count_rows(engine.cache, "move", lambda sources, targets: len(sources))


@pytest.fixture(scope="module")
def without_drafts(folders: dict[str, Path]) -> Callable[..., Answers]:
    """Answers to requests of all kinds from an engine without drafts; computed once for each length limit."""
    known: dict[int | None, Answers] = {}

    def answers(max_model_len: int | None = None) -> Answers:
        if max_model_len not in known:
            known[max_model_len] = serve(make_engine(folders, NO_DRAFTS, max_model_len=max_model_len), requests())
        return known[max_model_len]

    return answers


WAYS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "few blocks": {"kv_cache_tokens": 192, "max_model_len": 120},
    "the model's limit": {"max_model_len": 44},
    "prefix cache, larger blocks": {"prefix_caching": True, "block_size": 16},
    "prompts in chunks": {"max_num_seqs": 3, "max_batched_tokens": 66},
    "checked": {"self_check_sample_rate": 1.0},
}


@needs_kernels
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_those_without_drafts(
    folders: dict[str, Path], without_drafts: Callable[..., Answers], kind: str, way: str
) -> None:
    engine = make_engine(folders, drafting(folders, kind), **WAYS[way])
    moved = count_moves(engine)
    assert_same(serve(engine, requests()), without_drafts(WAYS[way].get("max_model_len")))
    stats = engine.take_stats()
    assert (stats.violations, stats.alarms) == ({}, {})
    assert sum(moved) > 20 and 0 < stats.num_accepted < stats.num_drafted
    assert (stats.num_preemptions > 0) == (way == "few blocks")


TREES: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
    "one position": ((6,), 1, {}),
    "late siblings": ((1, 1, 2), 4, {}),
    "all levels": ((2, 2, 2, 2), 4, {}),
    "a chain": ((1,), 4, {}),
    "likeliest candidates": ((3, 2), 3, {"sampled": False}),
    "dynamic length": ((3, 2), 4, {"length": "dynamic"}),
}


@needs_kernels
@pytest.mark.parametrize("name", TREES)
def test_any_shape_will_do(folders: dict[str, Path], without_drafts: Callable[..., Answers], name: str) -> None:
    tree, most, changes = TREES[name]
    drafter = drafting(folders, "draft_model", tree, most, **changes)
    engine = make_engine(folders, drafter, max_batched_tokens=1024)
    assert_same(serve(engine, requests()), without_drafts())
    assert isinstance(engine.drafter, TreeDrafter) and engine.take_stats().num_accepted > 50


@needs_kernels
@pytest.mark.parametrize("room", [4096, 128])
def test_a_policy_may_choose_any_trees_in_any_order(
    folders: dict[str, Path], without_drafts: Callable[..., Answers], room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps seem to take random times, so that it hardly ever chooses the same twice."""
    monkeypatch.setattr(draft_length, "_PROBE_EVERY", 3)
    monkeypatch.setattr(step_cost, "_TRIALS", 4)
    monkeypatch.setattr(step_cost, "_OF_ROWS", 0.5)  # so much do they move what is expected
    drafter = drafting(folders, "eagle3", (4, 2), 3, length="dynamic", suffix_first=6)
    engine = make_engine(folders, drafter, kv_cache_tokens=room, max_num_seqs=3)
    policy, drawn, seen = engine.scheduler.draft_length, random.Random(7), Counter[int]()
    observe = policy.observe

    def at_random(entries: Any, results: Any, step_s: float) -> None:
        seen.update(result.num_drafted for result in results)
        observe(entries, results, drawn.choice((0.001, 0.002, 0.05)))

    monkeypatch.setattr(policy, "observe", at_random)
    assert_same(serve(engine, requests()), without_drafts())
    assert (engine.take_stats().num_preemptions > 0) == (room == 128)
    assert min(seen[levels] for levels in range(4)) > 3
    assert_idle(engine)


@pytest.mark.parametrize("kind", KINDS)
def test_torchs_arithmetic_agrees_within_rounding(
    folders: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chosen, "cpu_kernels", lambda: None)
    found = serve(make_engine(folders, drafting(folders, kind)), some_requests())
    reference = serve(make_engine(folders, NO_DRAFTS), some_requests())
    for name, answer in reference.items():
        assert found[name].token_ids == answer.token_ids
        pairs = zip(found[name].logprobs, answer.logprobs, strict=True)
        assert max(abs(one.logprob - other.logprob) for one, other in pairs) < 1e-4


@needs_kernels
def test_repeated_passages_stand_beside_trees(folders: dict[str, Path]) -> None:
    params = [replace(SAID, temperature=temperature, frequency_penalty=-1.5) for temperature in (0, 0.4, 1)]
    wanted = [Request(f"l{index}", LOOP[index:], own, seed=index) for index, own in enumerate(params)]
    wanted += some_requests()
    for room in (4096, 256):
        sizes = {"max_model_len": 120, "kv_cache_tokens": room}
        engine = make_engine(folders, drafting(folders, "eagle3", suffix_first=12, length="dynamic"), **sizes)
        moved = count_moves(engine)
        found = serve(engine, wanted)
        assert_same(found, serve(make_engine(folders, NO_DRAFTS, **sizes), wanted))
        assert max(len(delta.token_ids) for answer in found.values() for delta in answer.deltas) > 6
        assert sum(moved) > 0


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_handoff_goes_on_with_trees_or_without(folders: dict[str, Path], kind: str) -> None:
    wanted = some_requests(prompt_logprobs=1)
    reference = serve(make_engine(folders, NO_DRAFTS), wanted)
    for tree, said in (((3, 2), 0), ((3, 2), 7), ((), 7)):
        first = make_engine(folders, drafting(folders, kind))
        then = make_engine(folders, drafting(folders, kind, tree))
        for request in wanted:
            first.add(request, prefill_only_after=said)
        answers = step(first, {})
        for request in wanted:
            insert(then, request, exported(first, request.request_id))
        assert_same(step(then, answers), reference)
        assert then.take_stats().num_accepted > 0
        assert_idle(then)


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_shared_hold_the_paths_keys_and_values(folders: dict[str, Path], kind: str) -> None:
    """A second turn finds the first answer in the prefix cache: its blocks were published after the moves."""
    cached = make_engine(folders, drafting(folders, kind), prefix_caching=True)
    moved = count_moves(cached)
    first = serve(cached, some_requests(max_tokens=40))
    assert sum(moved) > 10
    again = [
        replace(
            request, prompt_token_ids=(*request.prompt_token_ids, *first[request.request_id].token_ids, 7, 8), seed=99
        )
        for request in some_requests()
    ]
    found = serve(cached, again)
    assert_same(found, serve(make_engine(folders, NO_DRAFTS), again))
    drafted_again = serve(make_engine(folders, drafting(folders, kind)), again)
    for request in again:
        deltas, later = found[request.request_id].deltas, drafted_again[request.request_id].deltas
        assert deltas[0].num_cached_tokens > len(request.prompt_token_ids) - 10
        assert [delta.rounds for delta in deltas] == [delta.rounds for delta in later], "the drafter's rows, too"


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_company_that_comes_and_goes_changes_nothing(folders: dict[str, Path], kind: str) -> None:
    """Long prompts are computed in chunks beside trees, and a request is aborted among them."""
    params = replace(SAID, max_tokens=10, prompt_logprobs=1)
    long = [Request(f"long{i}", tuple(3 + (11 * i + 5 * j) % 50 for j in range(150)), params, seed=i) for i in range(3)]
    reference = serve(make_engine(folders, NO_DRAFTS), [*some_requests(), *long])
    engine = make_engine(folders, drafting(folders, kind), max_num_seqs=6, max_batched_tokens=132, max_model_len=300)
    num_rows = count_rows(engine.runner, "forward_with_features", lambda rows, capture: len(rows.input_ids))
    for request in some_requests():
        engine.add(request)
    answers = step(engine, {}, most=3)
    for request in [Request("gone", PROMPTS[2], replace(SAID, max_tokens=200), seed=3), *long]:
        engine.add(request)
    step(engine, answers, most=8)
    assert engine.abort("gone")
    step(engine, answers)
    del answers["gone"]
    assert_same(answers, reference)
    assert_idle(engine)
    assert max(num_rows) == 132, "trees and chunks share the token budget"


@needs_kernels
def test_only_those_that_may_speculate_draft_trees(folders: dict[str, Path]) -> None:
    engine = make_engine(folders, drafting(folders, "draft_model"))
    engine.scheduler.speculation = Speculation.CANARY
    wanted = [replace(request, canary=index % 2 == 0) for index, request in enumerate(some_requests())]
    wanted[2] = replace(wanted[2], params=replace(wanted[2].params, speculate=False))
    found = serve(engine, wanted)
    assert_same(found, serve(make_engine(folders, NO_DRAFTS), wanted))
    drafted = [sum(delta.num_drafted for delta in found[request.request_id].deltas) > 0 for request in wanted]
    assert drafted == [True, False, False, False]


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_fails_beside_trees_fails_alone(folders: dict[str, Path], kind: str) -> None:
    """One is left without a token behind two drafts, and one gets a row of NaN."""
    engine, calls = make_engine(folders, drafting(folders, kind)), Counter[str]()
    logits = engine.runner.logits

    def spoiling(hidden: torch.Tensor) -> torch.Tensor:
        calls["logits"] += 1
        rows = logits(hidden)
        return rows.index_fill(0, torch.tensor([0]), torch.nan) if calls["logits"] == 4 else rows

    engine.runner.logits = spoiling  # type: ignore[method-assign]
    spoilt = Request("spoilt", PROMPTS[0], replace(SAID, max_tokens=60), seed=1)
    stuck = Request("stuck", PROMPTS[1], replace(SAID, allowed_token_ids=(5,), bad_words=((5, 5, 5),)), seed=1)
    for request in (spoilt, stuck, *some_requests()):
        engine.add(request)
    answers, errors = Answers(), dict[str, str | None]()
    while engine.has_work:
        for delta in engine.step():
            if delta.error is None:
                answers.setdefault(delta.request_id, Answer()).take(delta)
            else:
                errors[delta.request_id] = delta.broken
    assert errors == {"spoilt": "not_finite", "stuck": "no_token"}
    assert answers.pop("stuck").token_ids == [5, 5] and len(answers.pop("spoilt").token_ids) >= 3
    assert_same(answers, serve(make_engine(folders, NO_DRAFTS), some_requests()))
    assert_idle(engine)


def test_texts_follow_the_chain_and_the_self_checks_are_quiet() -> None:
    """The exact distribution at T = 1, through the real step, with every round checked."""
    distribution = (1.5 * torch.randn(8, 8, generator=torch.Generator().manual_seed(1))).softmax(-1)
    decoder = markov_decoder(distribution, num_layers=3)
    head = random_head(decoder, torch.tensor([0, 2, 3, 5, 7]), embedding=decoder.embedding)
    sizes = {"max_num_seqs": 128, "max_batched_tokens": 4096, "kv_cache_tokens": 8192, "prefix_caching": False}
    drafter = DrafterConfig(kind="eagle3", model="random", num_draft_tokens=3, tree=(3, 2))
    config = settings(drafter=drafter, verifier="coupled", self_check_sample_rate=1.0, **sizes)
    engine = EngineCore(Assembly(Weights(decoder, "markov", Eagle3DraftModel(head, "random")), config))
    samples = sample(engine, (3, 3), 1500, 5)
    assert worst_window(samples, distribution.double().numpy(), 3) < 5.0
    stats = engine.take_stats()
    assert (stats.violations, stats.alarms) == ({}, {})
    assert stats.checks.keys() == {"coupled_d"}, "which of the drafts is judged depends on what was chosen"
    assert stats.checks["coupled_d"].num > 3000 and abs(stats.checks["coupled_d"].z) < 4
    assert 1000 < stats.num_accepted < stats.num_drafted
    assert stats.expected_accepted == stats.num_accepted


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_draws_the_same_tokens(folders: dict[str, Path], kind: str) -> None:
    engine = make_engine(folders, drafting(folders, kind))
    referee = make_engine(folders, NO_DRAFTS, verifier="token_wise")
    wanted = [request for request in requests()[: len(PARAMS)] if not request.params.greedy]
    num_rejected = 0
    answers = serve(engine, wanted)
    for request in wanted:
        answer = answers[request.request_id]
        rounds = tuple(answer.rounds)
        assert {own.verifier for own in rounds} == {"coupled"} and all(own.draft_probs is None for own in rounds)
        for own, delta in zip(rounds, answer.deltas, strict=True):
            assert own.drafts[: delta.num_accepted] == delta.token_ids[: delta.num_accepted]
            num_rejected += len(own.drafts) == delta.num_accepted + 1
        served = Rounds(len(request.prompt_token_ids), rounds, tuple(answer.token_ids), tuple(answer.kinds))
        assert served.complete and not list(served.wrong_drafts(greedy=False))
        whole = (*request.prompt_token_ids, *answer.token_ids)
        params = replace(request.params, prompt_logprobs=None)
        scored = replace(request, request_id="again", prompt_token_ids=whole, params=params)
        referee.add(replace(scored, score_from=len(request.prompt_token_ids), draws=served.draws()))
        (last,) = [delta for delta in step(referee, {})["again"].deltas if delta.replayed is not None]
        assert {check.kind for check in served.check(last.replayed or ())} == {"choice"}
        assert max(check.miss for check in served.check(last.replayed or ())) < 1e-4
    assert num_rejected > 50


@needs_kernels
@pytest.mark.parametrize("kind", KINDS)
def test_a_tree_without_siblings_is_a_chain(folders: dict[str, Path], kind: str) -> None:
    """The same drafts, of which as much is computed: what was right of a round is kept for the next one."""
    reported, work = [], []
    for tree in ((1, 1), ()):
        engine = make_engine(folders, drafting(folders, kind, tree))
        assert isinstance(engine.drafter, ModelDrafter)
        engine.drafter.draft_loop = None
        work.append(count_rows(engine.drafter.model, "run", lambda token_ids, *_: len(token_ids)))
        answers = serve(engine, some_requests())
        reported.append(
            {name: [(own.num_tokens, own.drafts) for own in answer.rounds] for name, answer in answers.items()}
        )
    assert reported[0] == reported[1]
    assert work[0] == work[1]


@needs_kernels
@pytest.mark.parametrize("name", ["greedy", "sampled", "filters", "one left"])
def test_the_first_candidate_is_right_where_the_drafter_is_its_target(folders: dict[str, Path], name: str) -> None:
    """It is chosen with the noise of the target's choice, and without any where the request is greedy."""
    itself = drafting({**folders, "draft_model": folders["target"]}, "draft_model", (2,), 3)
    engine = make_engine(folders, itself)
    moved = count_moves(engine)
    serve(engine, [Request(f"r{index}", prompt, PARAMS[name], seed=index) for index, prompt in enumerate(PROMPTS)])
    stats = engine.take_stats()
    assert stats.num_accepted == stats.num_drafted > 60 and sum(moved) == 0


def test_siblings_are_worth_their_rows(folders: dict[str, Path]) -> None:
    """More drafts are accepted than of a chain. A path along first candidates would show in nothing else: it is
    verified like any drafts."""
    accepted = []
    for tree in ((), (3, 2)):
        engine = make_engine(folders, drafting(folders, "eagle3", tree))
        serve(engine, some_requests(temperature=1))
        accepted.append(engine.take_stats().num_accepted)
    assert accepted[1] > 1.3 * accepted[0]


@pytest.mark.parametrize("tree", [(0,), (2, -1)])
def test_trees_that_cannot_be_are_refused(tree: tuple[int, ...]) -> None:
    """Other rules: tests/serve_app/config/test_config.py."""
    with pytest.raises(ConfigError, match=r"drafter\.tree must hold numbers of candidates, at least 1"):
        DrafterConfig("eagle3", "m", tree=tree)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cuda_graphs": True}, r"drafter\.tree: trees are drafted on a CPU only, without cuda_graphs; remove it"),
        ({"drafter": (25,)}, r"drafter\.tree: must have at most 24 candidates"),
    ],
)
def test_engines_that_cannot_draft_trees_say_so(
    folders: dict[str, Path], changes: dict[str, Any], message: str
) -> None:
    tree = changes.pop("drafter", (3, 2))
    most = 1 if tree == (25,) else 4
    with pytest.raises(ConfigError, match=message):
        make_engine(folders, drafting(folders, "eagle3", tree, most), **changes)
