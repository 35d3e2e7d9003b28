"""Judging rows from logits: Triton's kernels (in Triton's interpreter) against torch's operators, and enumeration."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from speculative.config import LogprobsMode
from speculative.gpu.row_judge import RowJudge, TorchJudge
from speculative.sampling.rng import gumbel
from speculative.verification.coupled import NoiseRows, choose
from speculative.verification.draft_probs import mass_before
from speculative.vocabulary.ops import TorchOps
from tests.support.judged_rows import (
    COUNTS,
    KINDS,
    VOCABULARY,
    Scene,
    assert_equal,
    filtered,
    padded,
    parts,
    scene,
    torch_judge,
)
from tests.support.pretended_cuda import JUDGE_LAUNCHES

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `pip install triton`"
)

BLOCK = 64  # the last one is not full
NO_FILTER = (0.0, 0, 1.0)  # min_p, top_k, top_p
FILTERS = ((0.0, 5, 1.0), NO_FILTER, (0.0, 0, 0.7), (0.05, 20, 0.9))
COMPILE = """
import subprocess
import tempfile
import triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from speculative.gpu import triton_vocabulary as ours

pointers = dict.fromkeys(("packed", "places", "drafts", "first_rows", "counts", "entries", "offsets"), "*i64")
pointers |= dict.fromkeys(("temperature", "maxima", "facts", "floors", "q", "log_min_ps", "top_ps"), "*fp32")
pointers |= dict.fromkeys(("greedy", "counted", "coupled", "checked", "reported"), "*i1")
pointers |= {"logits": "*bf16", "columns": "*i32"} | dict.fromkeys(("top_ks", "seeds", "positions"), "*i64")
numbers = dict.fromkeys(("stride", "q_stride", "num_rows", "num_entries"), "i32")
numbers["mass_rounding"] = "fp32"
constants = {"VOCABULARY": 128256, "NUM_BLOCKS": 63, "PADDED": 64, "BLOCK": 2048, "LANES": 128}
constants |= {"NUM_STAKES": 12, "PADDED_STAKES": 16}
constants |= dict.fromkeys(("PROCESSED", "NORMALIZED"), True)
tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
for capability in (80, 90, 100):
    for kernel in (value for value in vars(ours).values() if "num_rows" in getattr(value, "do_not_specialize", ())):
        for q in (0, 1, 2) if "Q" in kernel.arg_names and capability == 90 else (2,):
            fixed = {name: value for name, value in (constants | {"Q": q}).items() if name in kernel.arg_names}
            kinds = {name: (pointers | numbers).get(name, "*fp64") for name in kernel.arg_names}
            source = ASTSource(kernel, kinds | dict.fromkeys(fixed, "constexpr"), fixed)
            compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32)).asm
            with tempfile.NamedTemporaryFile() as file:
                file.write(compiled["cubin"])
                file.flush()
                used = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True).stdout
            print(kernel.fn.__name__, capability, q, used.split("REG", 1)[1].split())
            for line in compiled["ttir"].splitlines():
                if "tt.addptr" in line and "!tt.ptr<bf16>" in line:
                    print("offset", line)
"""


MakeJudge = Callable[[LogprobsMode], RowJudge]


@pytest.fixture
def make_judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJudge]:
    """Triton's, with workspaces of NaN: what a program does not write, nobody may read."""
    from speculative.gpu import triton_filters, triton_judge

    real = torch.empty
    monkeypatch.setattr(triton_filters, "_TILE", 256)
    monkeypatch.setattr(triton_judge, "BLOCK", BLOCK)
    monkeypatch.setattr(triton_judge.torch, "empty", lambda *args, **named: real(*args, **named).fill_(torch.nan))
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield triton_judge.TritonJudge


@pytest.fixture
def judge(make_judge: MakeJudge) -> RowJudge:
    return make_judge("raw_logprobs")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_everything_is_torchs_with_filters_beside_rows_without(judge: RowJudge, kind: str, seed: int) -> None:
    given = scene(kind, seed=seed)
    without, found = assert_equal(judge, given), assert_equal(judge, filtered(given, *FILTERS))
    assert 0 < int(without["accepted"].sum()) < sum(COUNTS)
    assert not without["broken"].any() and not found["broken"].any()
    assert found["expected"].tolist() != without["expected"].tolist()
    own = [entry for entry in range(len(COUNTS)) if FILTERS[entry % len(FILTERS)] == NO_FILTER]
    for name in ("accepted", "tokens", "expected"):
        assert torch.equal(found[name][own], without[name][own]), f"{name}: they are their own rows' alone"


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_alone_and_padded_is_judged_alike(make_judge: MakeJudge, kind: str) -> None:
    judge, given = make_judge("processed_logprobs"), filtered(scene(kind, (2, 0, 1)), *FILTERS)
    alone, whole = (parts(judge, one) for one in (given, padded(given)))
    for name, values in alone.items():
        found = whole[name][: len(values)]
        assert torch.equal(found, values) or name not in ("accepted", "tokens", "drafts", "broken", "values")
        torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12, equal_nan=True)


MODES: tuple[LogprobsMode | None, ...] = (None, "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(make_judge: MakeJudge, mode: LogprobsMode | None) -> None:
    """With every kind of drafts, and both of these with self-checks and without."""
    for number, kind in enumerate(KINDS, start=MODES.index(mode)):
        wanted = {"checked": torch.tensor([number % 2 == 0]), "reported": torch.tensor([mode is not None])}
        used = mode or "raw_logprobs"
        given = filtered(scene(kind, (2, 1)), (0.1, 0, 0.8), NO_FILTER)
        assert_equal(make_judge(used), given.with_rows(**wanted), used)


# -- filters -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 1])
def test_filters_around_the_edges_of_blocks(judge: RowJudge, size: int) -> None:
    assert_equal(judge, filtered(scene("dense", (2, 0, 1), size), *FILTERS))


def test_ties_at_the_edge_of_a_filter_stay(judge: RowJudge) -> None:
    """Of five tokens two are likeliest, and two more tie for the third place."""
    given = scene("point mass", (0,) * 12)
    given.logits[:] = -torch.inf
    possible = torch.tensor([3, BLOCK - 1, BLOCK, 2 * BLOCK + 5, VOCABULARY - 2])
    given.logits[:, possible] = torch.tensor([0.0, 3.0, 2.0, 2.0, 1.0])
    given = filtered(given.with_rows(greedy=torch.zeros(12, dtype=torch.bool)), (0.0, 2, 1.0), (0.0, 0, 0.7))
    given.rows.sample_uniforms[:] = (torch.arange(12) + 0.5) / 12
    found = assert_equal(judge, given)
    assert set(found["tokens"].tolist()) == set(possible[1:4].tolist())
    assert not found["broken"].any()


@pytest.mark.parametrize("which", [(0.0, 3, 1.0), (0.0, 0, 0.4), (0.3, 0, 1.0)], ids=["top_k", "top_p", "min_p"])
def test_a_token_outside_its_filters_is_reported(
    judge: RowJudge, monkeypatch: pytest.MonkeyPatch, which: tuple[float, int, float]
) -> None:
    """Where the search for floors finds none: accepted drafts and last tokens alike."""
    from speculative.gpu import triton_judge

    given = filtered(scene("point mass", (4, 0, 0, 0)), which)
    given.rows.accept_uniforms[:], given.rows.temperature[:], given.rows.greedy[:] = 1e-9, 6.0, False
    given.rows.drafts[:2] = given.logits[:2].argsort(dim=-1)[:, 100]  # unlikely, and accepted if they may
    sound = parts(judge, given)
    assert not sound["broken"].any()
    monkeypatch.setattr(triton_judge, "triton_floors", lambda logits, *_: torch.full((len(logits),), -torch.inf))
    found = parts(judge, given)
    outside = found["broken"] == 6
    last = given.rows.offsets == found["accepted"][given.rows.entries]
    assert outside[last].any() and outside[~last].any()
    # Whatever a filter leaves out is unlikely: most tokens are within, and none of theirs is reported.
    processed = given.logits / given.rows.temperature
    emitted = torch.where(last, found["tokens"][given.rows.entries], found["drafts"]).long()
    reached = given.rows.offsets <= found["accepted"][given.rows.entries]
    kept = torch_kept(processed, which).gather(1, emitted.clamp(min=0)[:, None])[:, 0]
    assert (outside == (reached & ~kept & ~given.rows.greedy)).all()


def torch_kept(processed: torch.Tensor, which: tuple[float, int, float]) -> torch.Tensor:
    """[R, V] bool, by definition."""
    min_p, top_k, top_p = which
    probs = torch.softmax(processed, dim=-1)
    likelier = probs[:, None, :] > probs[:, :, None]  # [R, V, V]: the second is likelier than the first
    kept = (probs >= min_p * probs.amax(dim=-1, keepdim=True)) & (likelier.sum(dim=-1) < (top_k or VOCABULARY))
    return kept & ((likelier * probs[:, None]).sum(dim=-1) < top_p)


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_around_the_edges_of_blocks(judge: RowJudge, kind: str, size: int) -> None:
    assert_equal(judge, scene(kind, (2, 0, 1), size))


def test_half_precision_logits_are_read_as_they_are(judge: RowJudge) -> None:
    given = scene("dense", (2, 0, 1, 1))
    for one in (given, filtered(given, *FILTERS)):
        assert_equal(judge, replace(one, logits=one.logits.half()))


def test_nobody_drafted(judge: RowJudge) -> None:
    assert_equal(judge, scene("point mass", (0, 0, 0, 0)))


# -- coupled entries ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [1, 2], ids=["all", "some"])
def test_coupled_entries_are_torchs(judge: RowJudge, kind: str, every: int) -> None:
    given = filtered(scene(kind, (2, 1, 3)), NO_FILTER, (0.0, 5, 1.0))
    given.rows.coupled[:] = torch.arange(3) % every == 0
    given.logits[0, given.rows.drafts[0]] = 9.0  # so that one of them survives
    plain = parts(judge, given.with_rows(coupled=torch.zeros(3, dtype=torch.bool)))
    found = assert_equal(judge, given)
    assert not found["broken"].any() and found["accepted"][0] > 0
    others = ~given.rows.coupled
    for name in ("accepted", "tokens", "expected"):
        assert torch.equal(found[name][others], plain[name][others])
    assert not torch.equal(found["expected"], plain["expected"])


@pytest.mark.parametrize("size", [1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 1])
def test_coupled_choices_around_the_edges_of_blocks(judge: RowJudge, size: int) -> None:
    given = scene("sub-vocabulary", (2, 0, 1), size)
    given.rows.coupled[:] = True
    assert_equal(judge, given)


@pytest.mark.parametrize("part", [False, True], ids=["whole vocabulary", "part of it"])
def test_drafts_are_chosen_with_the_noise_of_their_tokens(monkeypatch: pytest.MonkeyPatch, part: bool) -> None:
    from speculative.gpu import triton_noise

    monkeypatch.setattr(triton_noise, "_BLOCK", BLOCK)
    random = torch.Generator().manual_seed(0)
    ids = torch.randperm(VOCABULARY, generator=random)[:75] if part else None
    probs = torch.softmax(torch.randn((9, 75 if part else VOCABULARY), generator=random), dim=-1)
    probs[:, 3] = 0.0
    columns, coupled = torch.full((9,), -7), torch.arange(9) % 3 != 2
    seeds = torch.randint(-(2**63), 2**63 - 1, (9,), generator=random)
    rows = NoiseRows(coupled, seeds, torch.tensor([0, 1, 2, 3, 2**31 + 1, 2**32 - 1, 6, 7, 8]))
    expected = choose(probs, columns, rows, ids, VOCABULARY)
    with np.errstate(all="ignore"):
        found = triton_noise.triton_choose(probs, columns.clone(), rows, ids, VOCABULARY)
    assert found.tolist() == expected.tolist()
    assert (found[~coupled] == -7).all() and (found[coupled] >= 0).all()


def test_mass_before_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    from speculative.gpu import triton_places

    monkeypatch.setattr(triton_places, "_BLOCK", BLOCK)
    probs = torch.softmax(torch.randn((5, 4 * BLOCK + 3), generator=torch.Generator().manual_seed(0)), dim=-1)
    columns = torch.tensor([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 2])
    rows = torch.tensor([4, 0, 1, 1, 2, 3])
    expected = [float(probs[row, :column].double().sum()) for row, column in zip(rows, columns, strict=True)]
    for found in (triton_places.triton_mass_before(probs, rows, columns), mass_before(probs, rows, columns)):
        assert found.tolist() == pytest.approx(expected, abs=1e-6)


def test_the_kernels_noise_is_that_of_the_host() -> None:
    from speculative.gpu import triton_noise

    seeds, positions = torch.tensor([0, 7, -5, 2**63 - 1, -(2**63)]), torch.tensor([0, 3, 100, 2**31 + 5, 2**32 - 1])
    probs, coupled = torch.ones((5, 9)), torch.ones(5, dtype=torch.bool)
    found, places = torch.empty((5, 9), dtype=torch.float64), torch.empty((5, 9), dtype=torch.int64)
    rows = (coupled, seeds, positions)
    triton_noise._score_blocks[(5, 9)](probs, None, *rows, found, places, 9, WIDTH=9, BLOCK=1)
    torch.testing.assert_close(found, gumbel(seeds, positions, 9), rtol=1e-14, atol=1e-15)


# -- block verification, by torch's operators --------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_block_verification_of_padded_rows_is_that_of_the_rows_alone(kind: str) -> None:
    judge, given = TorchJudge(TorchOps(), "raw_logprobs", block_drafts=max(COUNTS)), scene(kind)
    given.rows.coupled[1] = True
    alone, whole, token_wise = parts(judge, given), parts(judge, padded(given)), parts(torch_judge(), given)
    assert alone["accepted"].sum() > 0 and not torch.equal(alone["expected"], token_wise["expected"])
    for name, values in alone.items():
        torch.testing.assert_close(whole[name][: len(values)], values, rtol=1e-12, atol=1e-12, equal_nan=True)


# -- rows that are not sound -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_distribution_are_reported_and_harm_no_other(judge: RowJudge, kind: str) -> None:
    filters = FILTERS if kind == "dense" else (NO_FILTER, *FILTERS)
    given = filtered(scene(kind, (2, 0, 1, 2)), *filters)
    given = given.with_rows(reported=torch.tensor([False]))
    sound = parts(judge, given)
    for damage, columns, code in ((torch.nan, 70, 1), (torch.inf, 70, 1), (-torch.inf, slice(None), 2)):
        logits = given.logits.clone()
        logits[0, columns] = damage
        damaged = replace(given, logits=logits)
        found, theirs = parts(judge, damaged), parts(torch_judge(), damaged)
        assert found["broken"].tolist() == theirs["broken"].tolist(), damage
        assert found["broken"][0] == code, damage
        assert 0 <= found["tokens"][0] < VOCABULARY, damage
        for name in ("accepted", "tokens", "expected"):
            assert torch.equal(found[name][1:], sound[name][1:]), (damage, name)
        for check in found.keys() - {"accepted", "tokens", "drafts", "broken", "expected"}:
            torch.testing.assert_close(
                found[check], theirs[check], rtol=1e-4, atol=3e-5, equal_nan=True, msg=f"{damage}: {check}"
            )


@pytest.mark.parametrize("kind", ["dense", "sub-vocabulary"])
@pytest.mark.parametrize("damage", ["no number", "negative", "too much", "no mass on the draft"])
def test_a_q_that_is_no_distribution_is_reported(judge: RowJudge, kind: str, damage: str) -> None:
    given = scene(kind, (2, 0, 2))
    assert given.sampled is not None
    place = given.sampled.places[1]
    own = given.sampled.probs[place]
    if damage == "no number":
        own[0 if given.sampled.own_columns[place] else 1] = torch.nan
    elif damage == "negative":
        own[(given.sampled.own_columns[place] + 1) % len(own)] = -1e-6
    elif damage == "too much":
        own *= 1.1
    else:
        own[given.sampled.own_columns[place]] = 0.0
        own /= own.sum()
    given = given.with_rows(reported=torch.tensor([False]))
    found, theirs = (parts(one, given) for one in (judge, torch_judge()))
    assert found["broken"].tolist() == theirs["broken"].tolist()
    assert found["broken"][1] == (4 if damage == "no mass on the draft" else 3)
    for check in found.keys() - {"accepted", "tokens", "drafts", "broken"}:
        torch.testing.assert_close(found[check], theirs[check], rtol=1e-4, atol=3e-5, equal_nan=True)


# -- distributions -----------------------------------------------------------------------------------------------------


def test_one_token_is_left(judge: RowJudge) -> None:
    """Whatever the uniform; the only token lies in a block's first, middle, or last place."""
    for token in (0, BLOCK - 1, BLOCK, VOCABULARY - 1):
        given = scene("point mass", (0, 0, 0))
        given.logits[:] = -torch.inf
        given.logits[:, token] = -30.0
        given.rows.sample_uniforms[:] = torch.tensor([1e-300, 0.5, 1 - 2**-53], dtype=torch.float64)
        found = assert_equal(judge, given)
        assert found["tokens"].tolist() == [token] * 3


def test_a_token_without_mass_is_never_drawn(judge: RowJudge) -> None:
    """Uniforms at and around every edge of the distribution, most tokens of which have no mass."""
    given = scene("point mass", (0,) * 64)
    given.rows.temperature[:], given.rows.greedy[:] = 1.0, False
    possible = torch.tensor([3, BLOCK - 1, BLOCK, 2 * BLOCK + 5, VOCABULARY - 2])
    given.logits[:] = -torch.inf
    given.logits[:, possible] = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]).log()
    p = torch.softmax(given.logits[0], dim=-1).double()
    edges = p[possible].cumsum(0) / p.sum()
    around = torch.cat([edges + step * 2.0**-53 for step in range(-6, 7)])[:64].clamp(2**-60, 1 - 2**-53)
    given.rows.sample_uniforms[: len(around)] = around
    found = parts(judge, given)
    assert set(found["tokens"].tolist()) == set(possible.tolist())
    assert not found["broken"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_emitted_follows_p_exactly(judge: RowJudge, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One draft: over all drafts with their chances, accepted or replaced, tokens come as often as p has it. What
    replaces it is enumerated by uniforms on a grid, so it is exact up to the grid."""
    monkeypatch.setattr("speculative.gpu.triton_judge.BLOCK", 4)
    size, num_draws = 5, 10
    one = scene(kind, (1,), size)
    q, p = one.q_at(0).double(), torch.softmax(one.logits[0] / one.rows.temperature[0], dim=-1).double()
    drafts = q.nonzero()[:, 0].repeat_interleave(num_draws)
    survival = (p / q).clamp(max=1.0)[drafts]
    grid = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
    emitted = torch.zeros(size, dtype=torch.float64)
    for coins, weights, accepted in ((survival * 0.999, survival, 1.0), (survival * 1.001, 1 - survival, 0.0)):
        chosen = (weights > 0).nonzero()[:, 0][:: num_draws if accepted else 1]
        num_entries = len(chosen)
        if num_entries == 0:
            continue
        rows = scene(kind, (1,) * num_entries, size).rows._replace(
            drafts=torch.stack([drafts[chosen], torch.full_like(chosen, -1)], dim=1).flatten(),
            greedy=one.rows.greedy.repeat(num_entries),
            temperature=one.rows.temperature.repeat(num_entries, 1),
            accept_uniforms=coins[chosen].repeat_interleave(2),
            sample_uniforms=grid.repeat(len(drafts))[chosen].repeat_interleave(2),
        )
        sampled = one.sampled and one.sampled._replace(places=one.sampled.places.repeat(num_entries))
        found = parts(judge, Scene(one.logits.repeat(num_entries, 1), rows, sampled))
        assert found["accepted"].tolist() == [accepted] * num_entries
        first = drafts[chosen] if accepted else found["tokens"].long()
        shares = (q[drafts] * weights)[chosen] / (1 if accepted else num_draws)
        emitted.index_add_(0, first, shares)
    assert (emitted - p).abs().max() < 0.5 / num_draws  # half a cell an edge


# -- what it costs -----------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Of kernels, by name: the numbers that they load or store."""

    numbers: dict[str, int] = field(default_factory=dict)
    launched: list[str] = field(default_factory=list)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    from triton.runtime import interpreter

    counted = Traffic()

    def count(name: str, which_mask: int) -> None:
        real = getattr(interpreter.InterpreterBuilder, name)

        def counting(self: Any, *args: Any) -> Any:
            counted.numbers[counted.launched[-1]] += int(args[which_mask].data.sum())
            return real(self, *args)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, counting)

    count("create_masked_load", 1)
    count("create_masked_store", 2)
    real = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **named: Any) -> Any:
        counted.launched.append(self.fn.__name__)
        counted.numbers.setdefault(self.fn.__name__, 0)
        return real(self, *args, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return counted


@pytest.mark.parametrize("which", [NO_FILTER, (0.01, 40, 0.9)], ids=["plain", "filtered and reproducible"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_vocabulary_is_read_a_few_times(
    judge: RowJudge,
    traffic: Traffic,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    which: tuple[float, int, float],
) -> None:
    """At most 6 matrices [R, V] are read or written without self-checks, 8 with: the kernels', and the LM head's. The
    search for floors, which reads a filtered row again and again from the cache, is counted on its own."""
    from speculative.gpu import triton_filters, triton_judge

    monkeypatch.setattr(triton_judge, "BLOCK", 2048)
    monkeypatch.setattr(triton_filters, "_TILE", 4096)
    counts = (4,) if (which == NO_FILTER) == (kind != "sub-vocabulary") else (1,)  # each with each kind, and which
    given = filtered(scene(kind, counts, size=8192), which)
    given = replace(given, logits=given.logits.bfloat16())
    given.rows.coupled[:] = which != NO_FILTER
    # Filters read what logprobs read, and noise is added to logits that are read once more.
    budgets = (4.2, 5.2, 7.2) if which == NO_FILTER else (6, 6, 8)
    for (checked, reported), most in zip(((False, False), (False, True), (True, True)), budgets, strict=True):
        traffic.numbers.clear()
        traffic.launched.clear()
        wanted = {"checked": torch.tensor([checked]), "reported": torch.tensor([reported])}
        parts(judge, given.with_rows(**wanted))
        assert len(traffic.launched) == JUDGE_LAUNCHES
        searched = traffic.numbers.pop("_find_floor") / given.logits.numel()
        assert searched <= (34 if which != NO_FILTER else 0) + 0.01, "the highest, 16 for top-k, and 17 for top-p"
        found = 1 + sum(traffic.numbers.values()) / given.logits.numel()
        assert found < most, traffic.numbers


def test_the_kernels_compile_for_a_gpu() -> None:
    """Without one; in a process of its own, where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    reported = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert reported.returncode == 0, reported.stderr
    stacks = [int(size) for size in re.findall(r"'STACK:(\d+)'", reported.stdout)]
    assert len(stacks) == 2 * 9 + 4 + 5 * 3 and max(stacks) == 0, "registers are spilled"
    rows = re.findall(r"offset .* : !tt.ptr<bf16>, (\w+)", reported.stdout)
    assert rows and set(rows) == {"i64"}, "logits may be more than 2**31 numbers"
