"""Judging rows from logits: Triton's kernels (in Triton's interpreter) against torch's operators, and enumeration."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from speculative.config import LogprobsMode
from speculative.gpu.row_judge import RowJudge, TorchJudge, Wanted
from speculative.vocabulary.ops import TorchOps
from tests.support.judged_rows import COUNTS, KINDS, VOCABULARY, Scene, assert_equal, padded, parts, scene
from tests.support.pretended_cuda import judge_launches

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `pip install triton`"
)

BLOCK = 64  # the last one is not full
COMPILE = """
import subprocess
import tempfile
import triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from speculative.gpu import triton_vocabulary as ours

pointers = dict.fromkeys(("packed", "places", "drafts", "first_rows", "counts", "entries", "offsets"), "*i64")
pointers |= dict.fromkeys(("temperature", "maxima", "facts", "q"), "*fp32") | {"logits": "*bf16", "columns": "*i32"}
pointers |= dict.fromkeys(("greedy", "counted"), "*i1")
numbers = dict.fromkeys(("stride", "q_stride", "num_rows", "num_entries"), "i32")
numbers |= dict.fromkeys(("mass_rounding", "least_residual", "least_spread"), "fp32")
constants = {"VOCABULARY": 128256, "NUM_BLOCKS": 63, "PADDED": 64, "BLOCK": 2048, "LANES": 128}
constants |= {"NUM_STAKES": 12, "PADDED_STAKES": 16}
constants |= dict.fromkeys(("CHECKED", "RANKED", "OVERLAPPED", "PROCESSED", "NORMALIZED"), True)
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


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[RowJudge]:
    """Triton's, with workspaces of NaN: what a program does not write, nobody may read."""
    from speculative.gpu import triton_judge

    real = torch.empty
    monkeypatch.setattr(triton_judge, "BLOCK", BLOCK)
    monkeypatch.setattr(triton_judge.torch, "empty", lambda *args, **named: real(*args, **named).fill_(torch.nan))
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield triton_judge.TritonJudge()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_everything_is_torchs(judge: RowJudge, kind: str, seed: int) -> None:
    given = scene(kind, seed=seed)
    found = assert_equal(judge, given, Wanted(checked=True, logprobs="raw_logprobs"))
    assert 0 < int(found["accepted"].sum()) < sum(COUNTS)
    assert not found["broken"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_alone_and_padded_is_judged_alike(judge: RowJudge, kind: str) -> None:
    wanted = Wanted(checked=True, logprobs="processed_logprobs")
    alone, whole = (parts(judge, given, wanted) for given in (scene(kind, (2, 0, 1)), padded(scene(kind, (2, 0, 1)))))
    for name, values in alone.items():
        found = whole[name][: len(values)]
        assert torch.equal(found, values) or name not in ("accepted", "tokens", "drafts", "broken", "values")
        torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("mode", [None, "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_every_mode(judge: RowJudge, checked: bool, mode: LogprobsMode | None) -> None:
    for kind in KINDS:
        assert_equal(judge, scene(kind, (2, 1)), Wanted(checked, mode))


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_around_the_edges_of_blocks(judge: RowJudge, kind: str, size: int) -> None:
    assert_equal(judge, scene(kind, (2, 0, 1), size), Wanted(checked=True, logprobs="raw_logprobs"))


def test_half_precision_logits_are_read_as_they_are(judge: RowJudge) -> None:
    given = scene("dense")
    assert_equal(judge, replace(given, logits=given.logits.half()), Wanted(checked=True, logprobs="raw_logprobs"))


def test_nobody_drafted(judge: RowJudge) -> None:
    assert_equal(judge, scene("point mass", (0, 0, 0, 0)), Wanted(checked=True, logprobs="raw_logprobs"))


# -- rows that are not sound -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_distribution_are_reported_and_harm_no_other(
    judge: RowJudge, kind: str, damage: float
) -> None:
    given, wanted = scene(kind, (2, 0, 1, 2)), Wanted(checked=True, logprobs=None)
    sound = parts(judge, given, wanted)
    logits = given.logits.clone()
    if damage == -torch.inf:
        logits[0] = damage
    else:
        logits[0, 70] = damage
    given = replace(given, logits=logits)
    found, theirs = parts(judge, given, wanted), parts(TorchJudge(TorchOps()), given, wanted)
    assert found["broken"].tolist() == theirs["broken"].tolist()
    assert found["broken"][0] == (2 if damage == -torch.inf else 1)
    assert 0 <= found["tokens"][0] < VOCABULARY
    for name in ("accepted", "tokens", "expected"):
        assert torch.equal(found[name][1:], sound[name][1:])
    for check in found.keys() - {"accepted", "tokens", "drafts", "broken", "expected"}:
        torch.testing.assert_close(found[check], theirs[check], rtol=1e-4, atol=3e-5)


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
    found, theirs = (parts(one, given, Wanted(checked=True, logprobs=None)) for one in (judge, TorchJudge(TorchOps())))
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
        found = assert_equal(judge, given, Wanted(checked=True, logprobs="raw_logprobs"))
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
    found = parts(judge, given, Wanted(checked=False, logprobs=None))
    assert set(found["tokens"].tolist()) == set(possible.tolist())
    assert not found["broken"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_emitted_follows_p_exactly(judge: RowJudge, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """One draft: over all drafts with their chances, accepted or replaced, tokens come as often as p has it. What
    replaces it is enumerated by uniforms on a grid, so it is exact up to the grid."""
    monkeypatch.setattr("speculative.gpu.triton_judge.BLOCK", 2)
    size, num_draws = 5, 20
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
        found = parts(judge, Scene(one.logits.repeat(num_entries, 1), rows, sampled), Wanted(False, None))
        assert found["accepted"].tolist() == [accepted] * num_entries
        first = drafts[chosen] if accepted else found["tokens"].long()
        shares = (q[drafts] * weights)[chosen] / (1 if accepted else num_draws)
        emitted.index_add_(0, first, shares)
    assert (emitted - p).abs().max() < 0.5 / num_draws  # half a cell an edge


# -- what it costs -----------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    launches: int = 0
    numbers: int = 0


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Counts kernels, and the numbers that they load or store."""
    from triton.runtime import interpreter

    counted = Traffic()

    def count(name: str, which_mask: int) -> None:
        real = getattr(interpreter.InterpreterBuilder, name)

        def counting(self: Any, *args: Any) -> Any:
            counted.numbers += int(args[which_mask].data.sum())
            return real(self, *args)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, counting)

    count("create_masked_load", 1)
    count("create_masked_store", 2)
    real = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **named: Any) -> Any:
        counted.launches += 1
        return real(self, *args, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return counted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(4,), (1,)])
def test_the_vocabulary_is_read_a_few_times(
    judge: RowJudge, traffic: Traffic, monkeypatch: pytest.MonkeyPatch, kind: str, counts: tuple[int, ...]
) -> None:
    """At most 6 matrices [R, V] are read or written without self-checks, 8 with: the kernels', and the LM head's."""
    from speculative.gpu import triton_judge

    monkeypatch.setattr(triton_judge, "BLOCK", 2048)
    given = scene(kind, counts, size=8192)
    for checked, mode, most in ((False, None, 4.2), (False, "raw_logprobs", 5.2), (True, "raw_logprobs", 7.2)):
        traffic.launches = traffic.numbers = 0
        wanted = Wanted(checked, mode)
        parts(judge, given, wanted)
        assert traffic.launches == judge_launches(wanted, sampled=given.sampled is not None)
        assert 1 + traffic.numbers / given.logits.numel() < most


def test_the_kernels_compile_for_a_gpu() -> None:
    """Without one; in a process of its own, where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    reported = subprocess.run(
        [sys.executable, "-c", COMPILE], capture_output=True, text=True, env=environment, check=False, timeout=300
    )
    assert reported.returncode == 0, reported.stderr
    stacks = [int(size) for size in re.findall(r"'STACK:(\d+)'", reported.stdout)]
    assert len(stacks) == 2 * 8 + 3 + 5 * 3 and max(stacks) <= 16, "registers are spilled"
    rows = re.findall(r"offset .* : !tt.ptr<bf16>, (\w+)", reported.stdout)
    assert rows and set(rows) == {"i64"}, "logits may be more than 2**31 numbers"
