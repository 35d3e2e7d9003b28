"""Other weights while the engine runs: what follows is what a fresh engine with them says, and nothing old is left."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.weights import Weights, load_weights
from speculative.engine import EngineCore
from speculative.errors import HandoffRefused
from speculative.request import Request, SamplingParams, Speculation
from tests.support.engines import (
    NGRAM,
    NO_DRAFTS,
    Answer,
    assert_idle,
    exported,
    insert,
    run,
    settings,
    take,
    teacher_forced,
)
from tests.support.tiny_models import write_tiny_model
from tools.faults.mutants import MUTANTS
from tools.faults.toy import table_engine
from tools.faults.traffic import PLAIN, sampling

PROMPT = tuple(3 + (7 * index) % 41 for index in range(30))
CPU = torch.device("cpu")
PARAMS = SamplingParams(max_tokens=12, temperature=0.8, logprobs=0, ignore_eos=True)


@pytest.fixture(scope="module")
def old(target: Path) -> Path:
    return target


@pytest.fixture(scope="module")
def new(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("weights") / "new", vocab_size=64, num_hidden_layers=4, seed=9)


@pytest.fixture(scope="module", params=["none", "ngram", "draft_model", "eagle3", "a tree"])
def drafter(request: pytest.FixtureRequest, old: Path, head: Path) -> DrafterConfig:
    return {
        "none": NO_DRAFTS,
        "ngram": NGRAM,
        "draft_model": DrafterConfig(kind="draft_model", model=str(old), num_draft_tokens=3),
        "eagle3": DrafterConfig(kind="eagle3", model=str(head), num_draft_tokens=3),
        "a tree": DrafterConfig(kind="draft_model", model=str(old), num_draft_tokens=3, tree=(3, 2)),
    }[request.param]


def updated(engine: EngineCore, folder: Path, version: str = "v1", drafter: Path | None = None) -> EngineCore:
    engine.switch(load_weights(folder, engine.config, CPU, drafter), version)
    return engine


def asked(name: str = "r", seed: int = 5, params: SamplingParams = PARAMS) -> Request:
    return Request(name, PROMPT, params, seed)


def answer(engine: EngineCore, request: Request) -> Answer:
    engine.add(request)
    return run(engine)[request.request_id]


def config(drafter: DrafterConfig = NO_DRAFTS, **changes: object) -> EngineConfig:
    of_trees = {"verifier": "coupled", "max_batched_tokens": 128} if drafter.tree else {}
    return settings(drafter=drafter, **{**of_trees, **changes})


def assert_follows(engine: EngineCore, given: Answer, tokens: slice = slice(None)) -> None:
    """These tokens' logprobs are what the engine's present weights say, computed without a cache."""
    expected = teacher_forced(engine, PROMPT, given.token_ids)
    reported = torch.tensor(given.values)[tokens]
    wanted = expected[range(len(given.token_ids)), given.token_ids][tokens]
    torch.testing.assert_close(reported, wanted, atol=2e-5, rtol=0)


def test_after_an_update_the_engine_is_a_fresh_one_with_the_new_weights(
    old: Path, new: Path, drafter: DrafterConfig
) -> None:
    engine = EngineCore.load(old, config(drafter))
    before = answer(engine, asked("before"))
    assert before.num_cached_tokens == 0 and answer(engine, asked("again")).num_cached_tokens > 0
    updated(engine, new)
    fresh = EngineCore.load(new, config(drafter))
    got, wanted = answer(engine, asked()), answer(fresh, asked())
    assert got.token_ids == wanted.token_ids != before.token_ids
    assert got.values == wanted.values
    assert got.num_cached_tokens == 0, "a prefix that the old weights computed was found"
    assert (got.num_drafted, got.num_accepted) == (wanted.num_drafted, wanted.num_accepted)
    assert engine.manifest == fresh.manifest
    assert_idle(engine)


def test_target_and_drafter_change_together(old: Path, new: Path) -> None:
    # A target that drafts for itself has every draft accepted, for as long as the drafter is the target.
    engine = EngineCore.load(old, config(DrafterConfig(kind="draft_model", model=str(old), num_draft_tokens=3)))
    assert_all_accepted(answer(engine, asked("before")))
    updated(engine, new, drafter=new)
    assert_all_accepted(answer(engine, asked("after")))
    updated(engine, old)
    assert_all_accepted(answer(engine, asked("configured again")))
    updated(engine, new)
    stale = answer(engine, asked("of another drafter"))
    assert stale.num_accepted < stale.num_drafted
    assert_follows(engine, stale)


def assert_all_accepted(given: Answer) -> None:
    assert given.num_drafted > 4
    assert given.num_drafted - given.num_accepted <= 3, "more than the last round's surplus was rejected"


def test_requests_under_way_are_computed_again_and_say_which_weights_made_a_token(
    old: Path, new: Path, drafter: DrafterConfig
) -> None:
    engine, reference = EngineCore.load(old, config(drafter)), EngineCore.load(old, config(drafter))
    requests = [asked(f"r{seed}", seed) for seed in range(3)]
    for request in requests:
        engine.add(request)
    answers: dict[str, Answer] = defaultdict(Answer)
    while min(len(answers[request.request_id].token_ids) for request in requests) < 4:
        take(answers, engine.step())
    updated(engine, new, "v1")
    answers = run(engine, answers)
    for request in requests:
        given = answers[request.request_id]
        reported = [delta.weight_version for delta in given.deltas for _ in delta.token_ids]
        assert len(given.token_ids) == len(reported) == 12
        num_old = reported.count("default")
        assert reported == ["default"] * num_old + ["v1"] * (12 - num_old) and 4 <= num_old < 12
        assert_follows(reference, given, slice(num_old))
        assert_follows(engine, given, slice(num_old, None))
    assert_idle(engine)


def test_what_came_by_handoff_and_waits_is_computed_again(old: Path, new: Path, drafter: DrafterConfig) -> None:
    prefill, decode = (EngineCore.load(old, config(drafter)) for _ in range(2))
    prefill.add(asked(), prefill_only_after=0)
    run(prefill)
    insert(decode, asked(), exported(prefill, "r"))
    updated(decode, new)
    assert_follows(decode, run(decode)["r"])
    assert decode.stats.num_prompt_tokens >= len(PROMPT), "keys and values of the old weights were put to use"


def test_what_is_held_for_export_is_computed_again(old: Path, new: Path, drafter: DrafterConfig) -> None:
    prefill = EngineCore.load(old, config(drafter))
    prefill.add(asked(), prefill_only_after=0)
    run(prefill)
    assert prefill.held_ids == ("r",)
    updated(prefill, new)
    assert prefill.held_ids == ()
    run(prefill)
    decode = EngineCore.load(new, config(drafter))
    insert(decode, asked(), exported(prefill, "r"))
    assert_follows(decode, run(decode)["r"])
    assert_idle(prefill)


def test_a_teacher_forced_request_under_way_is_scored_by_one_set_of_weights(old: Path, new: Path) -> None:
    engine = EngineCore.load(old, config(max_batched_tokens=40))
    engine.add(replace(asked(params=SamplingParams()), prompt_token_ids=PROMPT * 3, score_from=1))
    assert engine.step() == [], "it needs more than one step"
    updated(engine, new)
    deltas = [delta for _ in range(4) for delta in engine.step()]
    (last,) = deltas
    expected = teacher_forced(engine, PROMPT[:1], (PROMPT * 3)[1:])
    assert last.weight_version == "v1" and last.logprobs is not None
    reported = torch.tensor([entry.logprob for entry in last.logprobs])
    torch.testing.assert_close(reported, expected[range(len(reported)), (PROMPT * 3)[1:]], atol=2e-5, rtol=0)


@pytest.mark.parametrize("step", ["_model_drafter", "_make_steps"])
def test_an_engine_whose_switch_fails_does_not_say_that_it_has_the_new_weights(
    old: Path, new: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    drafter = DrafterConfig(kind="draft_model", model=str(old), num_draft_tokens=3)
    prefill, decode = EngineCore.load(new, config(drafter)), EngineCore.load(old, config(drafter))
    manifest = decode.manifest
    monkeypatch.setattr(decode.parts, step, fails)
    with pytest.raises(torch.OutOfMemoryError):
        updated(decode, new)
    assert (decode.manifest, decode.weight_version) == (manifest, "default")
    prefill.add(asked(), prefill_only_after=0)
    run(prefill)
    with pytest.raises(HandoffRefused, match="fingerprint"):
        insert(decode, asked(), exported(prefill, "r"))


def test_self_checks_go_on_through_updates_and_so_does_the_breakers_word() -> None:
    """Cut drafts take 3,983 positions without an update; evidence that began anew every 500 took six times as many."""
    name = "F7 drafts cut short by the token that was sampled"
    engine, found = table_engine(1024), 0
    MUTANTS[name].install(engine)
    requests, runner = sampling(1024, PLAIN), engine.parts.eager.runner
    for num_emitted in range(0, 8000, 500):
        while engine.stats.num_emitted < num_emitted + 500:
            engine.add(next(requests))
            engine.step()
        found = found or sum(engine.stats.alarms.values())
        engine.scheduler.speculation = Speculation.OFF if found else Speculation.ON
        engine.switch(Weights(runner.decoder, "", None), f"v{num_emitted}")
        engine.parts.eager.runner = runner
    assert found and engine.stats.evidence
    assert engine.scheduler.speculation is Speculation.OFF, "an update switched speculation on"
