"""Judging rows from logits: Triton's kernels (in Triton's interpreter) against torch's operators, and enumeration."""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from speculative.config import LogprobsMode
from speculative.gpu.row_judge import RowJudge
from speculative.sampling.rng import gumbel
from speculative.verification.draft_probs import mass_before
from tests.support.judged_rows import (
    KINDS,
    VOCABULARY,
    filtered,
    padded,
    parts,
    scene,
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `pip install triton`"
)

BLOCK = 64  # the last one is not full
NO_FILTER = (0.0, 0, 1.0)  # min_p, top_k, top_p
FILTERS = ((0.0, 5, 1.0), NO_FILTER, (0.0, 0, 0.7), (0.05, 20, 0.9))
COMPILE = """
import subprocess
import sys
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
capability = int(sys.argv[1])
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
def make_judge(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> MakeJudge:
    from speculative.gpu import triton_filters, triton_judge

    monkeypatch.setattr(triton_filters, "_TILE", 256)
    monkeypatch.setattr(triton_judge, "BLOCK", BLOCK)
    return triton_judge.TritonJudge


@pytest.fixture
def judge(make_judge: MakeJudge) -> RowJudge:
    return make_judge("raw_logprobs")


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_alone_and_padded_is_judged_alike(make_judge: MakeJudge, kind: str) -> None:
    judge, given = make_judge("processed_logprobs"), filtered(scene(kind, (2, 0, 1)), *FILTERS)
    alone, whole = (parts(judge, one) for one in (given, padded(given)))
    for name, values in alone.items():
        found = whole[name][: len(values)]
        assert torch.equal(found, values) or name not in ("accepted", "tokens", "drafts", "broken", "values")
        torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12, equal_nan=True)


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


def test_mass_before_drafts() -> None:
    probs = torch.softmax(torch.randn((5, 4 * BLOCK + 3), generator=torch.Generator().manual_seed(0)), dim=-1)
    columns = torch.tensor([0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK + 2])
    rows = torch.tensor([4, 0, 1, 1, 2, 3])
    expected = [float(probs[row, :column].double().sum()) for row, column in zip(rows, columns, strict=True)]
    assert mass_before(probs, rows, columns).tolist() == pytest.approx(expected, abs=1e-6)


def test_the_kernels_noise_is_that_of_the_host() -> None:
    from tests.support.noise_kernel import store_noise

    seeds, positions = torch.tensor([0, 7, -5, 2**63 - 1, -(2**63)]), torch.tensor([0, 3, 100, 2**31 + 5, 2**32 - 1])
    found = torch.empty((5, 9), dtype=torch.float64)
    store_noise[(5,)](found, seeds, positions, WIDTH=9, BLOCK=16)
    torch.testing.assert_close(found, gumbel(seeds, positions, 9), rtol=1e-14, atol=1e-15)


# -- what it costs -----------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """Of kernels, by name: the numbers that they load or store."""

    numbers: dict[str, int] = field(default_factory=dict)
    launched: list[str] = field(default_factory=list)


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    from triton.runtime import interpreter

    from tests.support import triton_interpreter

    monkeypatch.setattr(triton_interpreter, "SHUFFLED", 0)
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
        assert len(traffic.launched) == 10
        searched = traffic.numbers.pop("_find_floor") / given.logits.numel()
        assert searched <= (14 if which != NO_FILTER else 0) + 0.01, "the highest, 6 for top-k, and 7 for top-p"
        found = 1 + sum(traffic.numbers.values()) / given.logits.numel()
        assert found < most, traffic.numbers


@pytest.mark.parametrize(
    "capability", [pytest.param(80, marks=pytest.mark.slow), 90, pytest.param(100, marks=pytest.mark.slow)]
)
def test_the_kernels_compile_for_a_gpu(capability: int) -> None:
    """Without one; in a process of its own, where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    reported = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=300,
    )
    assert reported.returncode == 0, reported.stderr
    stacks = [int(size) for size in re.findall(r"'STACK:(\d+)'", reported.stdout)]
    assert len(stacks) == (4 + 5 * 3 if capability == 90 else 9) and max(stacks) == 0, "registers are spilled"
    rows = re.findall(r"offset .* : !tt.ptr<bf16>, (\w+)", reported.stdout)
    assert rows and set(rows) == {"i64"}, "logits may be more than 2**31 numbers"
