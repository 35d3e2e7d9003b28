"""Captured steps whose drafts are trees, on a pretended CUDA device and on a CPU: token for token what trees give on a
CPU, which is what plain decoding gives."""

import dataclasses
import importlib.util
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from speculative.config import DrafterConfig
from speculative.drafting.tree_drafter import TreeDrafter
from speculative.engine import EngineCore
from speculative.gpu import target_graph
from speculative.gpu.graph_step import GraphStep
from speculative.gpu.logit_edits import FOLLOWED
from speculative.gpu.target_graph import TargetPass
from speculative.gpu.tree_graph import LeafPaths
from speculative.lookup.suffix import SuffixOptions
from speculative.request import Request, SamplingParams, Structure
from speculative.state.draft_tree import DraftTree
from speculative.warm_up import warm_up
from tests.speculative.gpu.test_graph_step import poison
from tests.support.engines import NO_DRAFTS, Answer, load_engine, run, settings, take
from tests.support.graph_scenes import (
    EDITED,
    MIXED,
    PLAIN,
    PROMPTS,
    Alternating,
    add_all,
    answers,
    answers_over_a_handoff,
    answers_over_a_switch,
    assert_same,
)
from tests.support.pretended_cuda import PretendedCuda
from tests.support.torch_operators import captured_on_a_cpu

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `pip install triton`"
)
KINDS = ("draft_model", "eagle3", "mtp")
SHORT = [dataclasses.replace(one, max_tokens=10) for one in PLAIN]
STRUCTURED = SamplingParams(max_tokens=12, structure=Structure("choice", "[]"))

Load = Callable[..., EngineCore]
Scene = Callable[[Load], dict[str, Answer]]


@pytest.fixture(scope="module")
def near(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft model: the target with noise on its weights."""
    folder = tmp_path_factory.mktemp("trees") / "near"
    shutil.copytree(target, folder)
    noise, weights = torch.Generator().manual_seed(5), load_file(target / "model.safetensors")
    for name, values in weights.items():
        weights[name] = values + 0.02 * torch.randn(values.shape, generator=noise)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture
def load(target: Path, near: Path, drafters: dict[str, DrafterConfig]) -> Load:
    """An engine that drafts trees with one of the drafters."""

    def load(
        kind: str = "mtp", tree: tuple[int, ...] = (3, 2), drafts: dict[str, Any] | None = None, **changes: Any
    ) -> Any:
        drafter = dataclasses.replace(drafters[kind], tree=tree, **(drafts or {}))
        if kind == "draft_model":
            drafter = dataclasses.replace(drafter, model=str(near))
        sizes = {"max_num_seqs": 4, "max_batched_tokens": 256, "verifier": "coupled"}
        config = settings(**{**sizes, "drafter": drafter, **changes})
        return load_engine(target, config, make_constraint=lambda _: Alternating())

    return load


def in_both(scene: Scene, load: Load, *, capture_beforehand: bool = False) -> dict[str, Answer]:
    """What a scene gives on the pretended device: the same as trees on the CPU, and no other tokens than without."""
    plain, expected = (
        scene(lambda *_, **changes: load(**{**changes, "drafter": NO_DRAFTS, "tree": (), "drafts": None})),
        scene(load),
    )
    with PretendedCuda(capture_beforehand=capture_beforehand) as device:
        found = scene(lambda *given, **changes: load(*given, device="cuda", **changes))
        assert device.num_replays > 5
    assert_same(found, expected)
    assert {name: one.token_ids for name, one in found.items()} == {name: one.token_ids for name, one in plain.items()}
    assert sum(one.num_accepted for one in found.values()) > 0
    return found


# -- token for token ------------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_every_drafter_with_plain_requests_and_with_all_others(load: Load, kind: str) -> None:
    """Greedy and sampled, with every logprob, prompt logprobs, filters, biases, penalties and a structure."""

    def scene(load: Load) -> dict[str, Answer]:
        engine = load(kind=kind, self_check_sample_rate=1.0)
        found = answers(engine, SHORT)
        add_all(engine, [*(dataclasses.replace(one, max_tokens=10) for one in MIXED), STRUCTURED], prefix="mixed")
        found |= run(engine)
        stats = engine.take_stats()
        assert (stats.violations, stats.alarms) == ({}, {})
        assert stats.checks.keys() <= {"coupled_d"} or engine.config.drafter.kind == "none"
        return found

    in_both(scene, load, capture_beforehand=True)


@needs_triton
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_requests_that_change_logits(load: Load, kind: str) -> None:
    """The host sees the drafts of every path while the target runs; nothing decodes eagerly."""

    def scene(load: Load) -> dict[str, Answer]:
        engine = load(kind=kind, max_num_seqs=7)
        if engine.graphs is not None:
            takes = engine.eager.takes

            def watched(entries: Any) -> list[bool]:
                assert all(one.num_known > 1 or one.sequence.num_output == 0 for one in entries), "it decodes"
                return takes(entries)

            engine.eager.takes = watched  # type: ignore[method-assign]
        return answers(engine, [*EDITED, *SHORT[:3]])

    in_both(scene, load)


SHAPES: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "one position": ((6,), {"num_draft_tokens": 1}),
    "late siblings": ((1, 1, 2), {}),
    "all levels": ((2, 2, 2), {}),
    "a chain": ((1,), {}),
    "likeliest candidates": ((3, 2), {"sampled": False}),
    "the most rows": ((4, 3, 4), {}),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_any_shape_will_do(load: Load, name: str, kind: str) -> None:
    """With NaN wherever a step may not look."""
    tree, drafts = SHAPES[name]

    def scene(load: Load, before_step: Any = None) -> dict[str, Answer]:
        engine = load(kind=kind, tree=tree, drafts=drafts, max_batched_tokens=512, max_num_seqs=6)
        return answers(engine, PLAIN, before_step=before_step)

    expected = scene(load)
    with captured_on_a_cpu():
        assert_same(scene(lambda **given: load(cuda_graphs=True, **given), poison), expected)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_a_handoff(load: Load, kind: str) -> None:
    in_both(lambda load: answers_over_a_handoff(lambda: load(kind=kind, max_num_seqs=2), SHORT), load)


@needs_triton
@pytest.mark.parametrize("kind", ["draft_model", "mtp"])
def test_preemptions(load: Load, kind: str) -> None:
    def scene(load: Load) -> dict[str, Answer]:
        engine = load(kind=kind, kv_cache_tokens=96, max_model_len=80)
        found = answers(engine, PLAIN)
        assert engine.take_stats().num_preemptions > 0
        return found

    in_both(scene, load)


@pytest.mark.parametrize("kind", KINDS)
def test_siblings_near_the_models_limit_have_room(load: Load, kind: str) -> None:
    for room in (1, 2, 3, 5, 8):
        limit = max(map(len, PROMPTS)) + room
        expected = answers(load(kind=kind, max_model_len=limit, block_size=8), PLAIN)
        with captured_on_a_cpu():
            engine = load(kind=kind, max_model_len=limit, block_size=8, cuda_graphs=True)
            assert_same(answers(engine, PLAIN, before_step=poison), expected)


@needs_triton
@pytest.mark.parametrize("kind", ["draft_model", "eagle3"])
def test_a_switch_of_weights(load: Load, target: Path, kind: str) -> None:
    def scene(load: Load) -> dict[str, Answer]:
        return answers_over_a_switch(load(kind=kind, max_num_seqs=2), SHORT, target)

    expected = scene(load)
    with PretendedCuda():
        assert_same(scene(lambda **changes: load(device="cuda", **changes)), expected)


@needs_triton
def test_repeated_passages_are_drafted_beside_trees(load: Load) -> None:
    """Those that captured steps cannot take draft passages, and no trees."""
    drafts = {"length": "dynamic", "options": (SuffixOptions(suffix_first=12),)}
    loops = [tuple([5, 9, 17, 33] * 8)[index:] for index in range(3)]
    params = [dataclasses.replace(one, frequency_penalty=-1.5, max_tokens=20) for one in SHORT[:3]]
    wanted = [Request(f"l{i}", loops[i], own, seed=i) for i, own in enumerate(params)]

    def scene(load: Load, **changes: Any) -> dict[str, Answer]:
        engine = load(max_model_len=120, **changes)
        for request in wanted:
            engine.add(request)
        add_all(engine, SHORT)
        return run(engine)

    expected = scene(load, drafter=NO_DRAFTS)
    with PretendedCuda():
        found = scene(load, device="cuda", drafts=drafts)
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    assert max(max(one.round_sizes) for one in found.values()) > 6


def test_requests_that_no_graph_can_hold_are_served_without_trees(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculative.gpu.logit_edits.FOLLOWED", FOLLOWED - {"logit_bias"})
    expected = answers(load(drafter=NO_DRAFTS, max_num_seqs=12), MIXED)
    with captured_on_a_cpu():
        engine = load(kind="eagle3", max_num_seqs=12, cuda_graphs=True)
        found = answers(engine, MIXED, before_step=poison)
    for name, answer in found.items():
        assert answer.token_ids == expected[name].token_ids
        assert (answer.num_drafted == 0) == (
            MIXED[int(name[1:])].logit_bias != () or not MIXED[int(name[1:])].speculate
        )


@needs_triton
def test_without_graphs_trees_are_drafted_by_torchs_operators(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(load(), SHORT)
    with PretendedCuda():
        found = answers(load(device="cuda", cuda_graphs=False), SHORT)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert_same(found, expected)


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_fails_fails_alone(load: Load, kind: str) -> None:
    """One is left without a token behind two drafts, and one has keys that are no numbers."""
    stuck = SamplingParams(max_tokens=20, ignore_eos=True, allowed_token_ids=(5,), bad_words=((5, 5, 5),))
    params = [*SHORT[:2], dataclasses.replace(SHORT[2], max_tokens=40), stuck]
    expected = answers(load(drafter=NO_DRAFTS), SHORT[:2])
    with PretendedCuda():
        engine, found = load(kind=kind, device="cuda", prefix_caching=False), defaultdict[str, Answer](Answer)
        add_all(engine, params)
        for _ in range(3):
            take(found, engine.step())
        victim = engine.scheduler.find("r2")
        assert victim is not None
        with torch.inference_mode():
            engine.cache.data[:, :, victim.blocks[0] * engine.config.block_size] = torch.nan
        while engine.has_work:
            take(found, engine.step())
        stats = engine.take_stats()
    assert stats.violations == {"not_finite": 1, "no_token": 1}
    assert found["r3"].token_ids == [5, 5] and len(found["r2"].token_ids) >= 2
    assert {name: found[name].token_ids for name in expected} == {n: one.token_ids for n, one in expected.items()}


@needs_triton
def test_an_abort_among_trees_changes_nothing(load: Load) -> None:
    expected = answers(load(drafter=NO_DRAFTS), SHORT[:3])
    with PretendedCuda():
        engine, found = load(kind="eagle3", device="cuda"), defaultdict[str, Answer](Answer)
        add_all(engine, [*SHORT[:3], PLAIN[3]])
        for _ in range(4):
            take(found, engine.step())
        assert engine.abort("r3")
        while engine.has_work:
            take(found, engine.step())
    assert {name: found[name].token_ids for name in expected} == {n: one.token_ids for n, one in expected.items()}


# -- what a step costs ----------------------------------------------------------------------------------------------


@needs_triton
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_waits_once_and_captures_nothing(load: Load, kind: str) -> None:
    """Its keys and values are moved, and its features found, without another wait; also in batches of several parts."""
    moved = []
    with pytest.MonkeyPatch.context() as patch, PretendedCuda(capture_beforehand=True) as device:
        patch.setattr("speculative.gpu.buckets.MAX_CAPTURED_SEQS", 2)
        engine = load(kind=kind, device="cuda", max_num_seqs=3)
        captured, move = len(device.graphs), engine.cache.move
        engine.cache.move = lambda *places: moved.append(move(*places))  # type: ignore[method-assign]
        add_all(engine, PLAIN[:3])
        for _ in range(4):
            engine.step()
        while engine.has_work:
            num_parts = -(-engine.usage().num_running // 2)
            device.waits.clear()
            engine.step()
            assert dict(device.waits) == {("cpu", "gpu/verify_graph.py:_read"): num_parts}
        assert len(device.graphs) == captured
    assert len(moved) > 2


def test_levels_that_do_not_pay_are_left_out(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every number of levels, for each sequence its own, in shapes that were captured beforehand."""
    monkeypatch.setattr("speculative.gpu.buckets._CHEAP_ROWS", 0)
    expected = answers(load(drafter=NO_DRAFTS), PLAIN)
    for kind in KINDS:
        with captured_on_a_cpu():
            engine = load(kind=kind, cuda_graphs=True, drafts={"length": "dynamic"})
        assert engine.graphs is not None
        captured, calls = engine.graphs.capture_all(), [0]
        warm_up(engine)

        def levels(sequence: Any, wanted: int, calls: list[int] = calls) -> int:
            calls[0] += 1
            return min(wanted, calls[0] * 7 % 5)

        engine.scheduler.draft_length.max_drafts = levels  # type: ignore[method-assign]
        found = answers(engine, PLAIN, before_step=poison)
        assert {name: one.token_ids for name, one in found.items()} == {
            name: one.token_ids for name, one in expected.items()
        }
        assert engine.graphs.capturer.num_captured == captured


# -- what these tests find ------------------------------------------------------------------------------------------


def stay(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GraphStep, "_move", lambda *_: None)


def chain_positions(patch: pytest.MonkeyPatch) -> None:
    fill = target_graph.fill_trees

    def faulty(host: Any, step_input: Any, places: Any) -> None:
        by_row = host["positions"].copy()
        fill(host, step_input, places)
        host["positions"][:] = by_row

    patch.setattr(target_graph, "fill_trees", faulty)


def see_siblings(patch: pytest.MonkeyPatch) -> None:
    compute = TargetPass._compute

    def faulty(self: Any, inputs: Any) -> None:
        compute(self, inputs | {"roots": inputs["visible"].view(-1)})

    patch.setattr(TargetPass, "_compute", faulty)


def last_path(patch: pytest.MonkeyPatch) -> None:
    best = LeafPaths.best
    patch.setattr(LeafPaths, "best", lambda paths, accepted: best(paths, accepted) + 1 - (len(accepted) == 1))


def features_by_row(patch: pytest.MonkeyPatch) -> None:
    observe = TreeDrafter.observe_in_buffer
    patch.setattr(
        TreeDrafter,
        "observe_in_buffer",
        lambda self, batch, rows, places: observe(self, batch, rows, places[0] + rows.positions - rows.positions[0]),
    )


@pytest.mark.parametrize("fault", [stay, chain_positions, see_siblings], ids=lambda fault: fault.__name__)
def test_faults_of_trees_change_what_is_emitted(
    load: Load, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(**changes: Any) -> dict[str, list[int]]:
        wanted = [dataclasses.replace(one, max_tokens=24, temperature=0.6) for one in PLAIN]
        return {name: one.token_ids for name, one in answers(load(kind="draft_model", **changes), wanted).items()}

    plain = tokens(drafter=NO_DRAFTS)
    with captured_on_a_cpu():
        assert tokens(cuda_graphs=True) == plain
        fault(monkeypatch)
        assert tokens(cuda_graphs=True) != plain


def test_features_of_other_rows_cost_acceptance(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts differ from those on a CPU; the text stays."""
    expected = answers(load(kind="eagle3"), PLAIN)
    features_by_row(monkeypatch)
    with captured_on_a_cpu():
        found = answers(load(kind="eagle3", cuda_graphs=True), PLAIN)
    assert {name: one.token_ids for name, one in found.items()} == {
        name: one.token_ids for name, one in expected.items()
    }
    assert [one.rounds for one in found.values()] != [one.rounds for one in expected.values()]


# -- shapes ---------------------------------------------------------------------------------------------------------


def test_the_best_path_is_the_first_of_the_longest() -> None:
    paths = LeafPaths(torch.tensor([0, 3]).numpy(), torch.tensor([0, 0, 0, 1, 1, 1]).numpy(), *([None] * 3))  # type: ignore[arg-type, list-item]
    assert paths.best(torch.tensor([0, 2, 2, 1, 0, 1]).numpy()).tolist() == [1, 3]
    assert paths.best(torch.zeros(6, dtype=torch.int64).numpy()).tolist() == [0, 3]


def test_a_tree_of_64_drafts_has_a_bit_for_each() -> None:
    tree = DraftTree.of_widths((1,) * 64)
    assert tree.ancestors.view("uint64").tolist() == [2**depth - 1 for depth in range(65)]
    tree = DraftTree.of_widths((2, 2))
    assert tree.ancestors.tolist() == [0, 0b1, 0b11, 0b101, 0b1000, 0b11000, 0b101000]
    assert tree.ranks.tolist() == [0, 0, 0, 1, 1, 2, 3] and tree.leaves == (2, 3, 5, 6)
