"""Kernels as the launchers launch them, compiled for GPUs of several kinds without one, down to machine code."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model
from tests.support.triton_interpreter import needs_triton

pytestmark = [pytest.mark.slow, needs_triton, pytest.mark.timeout(1200)]
OF_DRAFTS = ("_sum_blocks", "_settle_entries", "_compare_blocks", "_report_rows", "_take_terms")
KINDS_OF_DRAFTS = ("point masses", "the vocabulary", "a part of it")
OF_VERIFICATION = {*OF_DRAFTS, "_reduce_blocks", "_find_facts", "_choose_blocks", "_sum_terms"}
OF_ATTENTION = {"_attend_splits", "_attend_packed"}
TO_FP8 = {"_add_norm", "_quantize"}
OTHERS = {
    *(OF_ATTENTION | TO_FP8 | OF_VERIFICATION).difference(OF_DRAFTS),
    *("_merge_parts", "_gate", "_rotate_and_store", "_find_floor", "_write_blocks", "_choose_drafts"),
    *("_copy_allowed", "_add_biases", "_penalise"),
}
CAPABILITIES = (80, 89, 90, 100, 120)
SHARED_MEMORY = 99 << 10  # of a program, on the GPUs since Ampere that have the least
SPILLED = 40  # bytes, at most: on Ampere 36 of attention's
HEADS = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 4}
WIDE = {"hidden_size": 16384, "intermediate_size": 64, "num_hidden_layers": 1}
OF_EIGHT = {"num_attention_heads": 8, "num_hidden_layers": 1}
Engine = tuple[str, dict[str, Any], dict[str, Any], tuple[int, ...]]


class Kernel(NamedTuple):
    """A launch, as it was compiled."""

    name: str
    capability: str
    ttir: str
    ptx: str


class Compiled(NamedTuple):
    """Launches by kernel, sizes by kernel and GPU, as `tests.support.compiled_launches` prints them; all kernels."""

    launched: dict[str, int]
    sizes: dict[str, list[int]]
    kernels: list[Kernel]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> list[Engine]:
    """The model's folder, drafter, settings and GPUs of each: with heads of models that people serve; for one GPU, with
    smaller ones that have a norm, and larger ones that have windows and caps."""
    folder = tmp_path_factory.mktemp("engines")

    def model(name: str, family: str = "llama", **sizes: int) -> str:
        return str(write_tiny_model(folder / name, family, vocab_size=64, **HEADS | sizes))

    target, wide = model("model"), model("wide", **WIDE)
    small, large = model("small", "qwen3", head_dim=64, **OF_EIGHT), model("large", "gemma2", head_dim=256, **OF_EIGHT)
    models = {"ngram": None, "draft_model": target, "eagle3": str(write_tiny_head(folder / "head", Path(target)))}
    drafters = [{"kind": kind, "model": model, "num_draft_tokens": 4} for kind, model in models.items()]  # wide tiles
    return [
        *((target, own, {}, CAPABILITIES) for own in drafters),
        (wide, drafters[0], {"quantization": "fp8"}, CAPABILITIES[1:]),  # since 8.9
        *((name, drafters[0], {}, (90,)) for name in (small, large)),
    ]


def compiled(engines: list[Engine], folder: Path, **faults: dict[str, int]) -> Compiled:
    """`folder` keeps what is compiled."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled_launches", json.dumps(engines), json.dumps(faults)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"},
        cwd=Path(__file__).parents[3],
        check=False,
        timeout=1200,
    )
    assert run.returncode == 0, run.stderr
    launched, sizes = json.loads(run.stdout.splitlines()[-1])
    kernels = []
    for file in folder.glob("*/*.ptx"):
        ptx = file.read_text()
        (capability,) = re.findall(r"^\.target sm_(\d+)", ptx, re.M)
        kernels.append(Kernel(file.stem, capability, file.with_suffix(".ttir").read_text(), ptx))
    return Compiled(launched, sizes, kernels)


@pytest.fixture(scope="module")
def found(engines: list[Engine], tmp_path_factory: pytest.TempPathFactory) -> Compiled:
    return compiled(engines, tmp_path_factory.mktemp("kernels"))


def too_large(sizes: dict[str, list[int]]) -> set[str]:
    return {name for name, (shared, _, spilled) in sizes.items() if shared > SHARED_MEMORY or spilled > SPILLED}


def test_whatever_an_engine_launches_compiles_and_fits_every_gpu(found: Compiled) -> None:
    """And no kernel adds up atomically: results of programs that add to one another's would depend on their order."""
    assert found.launched.keys() == OTHERS | {f"{name} of {kind}" for name in OF_DRAFTS for kind in KINDS_OF_DRAFTS}
    assert {name.split()[1] for name in found.sizes} == set(map(str, CAPABILITIES))
    assert not too_large(found.sizes)
    assert not {kernel.name for kernel in found.kernels if re.search(r"\b(atom|red)\.", kernel.ptx)}
    assert len(found.kernels) > len(found.sizes)


def test_products_run_on_tensor_cores(found: Compiled) -> None:
    for kernel in found.kernels:
        assert ("mma" in kernel.ptx) == (kernel.name in OF_ATTENTION), kernel[:2]


def test_offsets_that_grow_with_the_rows_have_64_bits(found: Compiled) -> None:
    for kernel in found.kernels:
        narrow = narrow_pointers(kernel.ttir)
        if kernel.name in OF_VERIFICATION:  # all but the matrices have a number a row or a token
            assert "logits" not in narrow, kernel[:2]
        else:
            assert narrow <= {"blocks", "spans", "starts", "norm_weight", "ids"}, kernel[:2]


def narrow_pointers(ttir: str) -> set[str]:
    """The arguments that are only ever moved by offsets of 32 bits."""
    root_of: dict[str, str] = {}
    widths: dict[str, set[str]] = {}
    for made, operation, source, types in re.findall(r"(%\w+) = tt\.(\w+) (%\w+)(.*)", ttir):
        root_of[made] = root = root_of.get(source, source)
        if operation == "addptr":
            widths.setdefault(root, set()).add(re.findall(r"i(?:32|64)", types)[-1])
    return {root.removeprefix("%") for root, own in widths.items() if own == {"i32"}}


def test_fp8_is_rounded_to_the_nearest_and_stays_below_its_largest(found: Compiled) -> None:
    assert {kernel.name for kernel in found.kernels if "f8E4M3FN" in kernel.ttir} == TO_FP8
    for kernel in found.kernels:
        assert ("cvt.rn.satfinite.e4m3x2." in kernel.ptx) == ("f8E4M3FN" in kernel.ttir), kernel[:2]


def test_a_rotation_rounds_where_torch_does(found: Compiled) -> None:
    """A thread has four pairs of numbers: their products with cosines, the sums, and a norm's results and products with
    weights are rounded, and at least one cosine and sine. A compiler that dropped one would change results."""
    rotations = [one for one in found.kernels if one.name == "_rotate_and_store" and one.capability == "90"]
    normed = ["rsqrt" in kernel.ttir for kernel in rotations]
    assert {*normed} == {False, True}
    for kernel, has_norm in zip(rotations, normed, strict=True):
        single, double = (len(re.findall(rf"(?:\.rn|mul)\.bf16{one}[.\s]", kernel.ptx)) for one in ("", "x2"))
        assert single + 2 * double >= 2 + 8 * (4 if has_norm else 2)


@pytest.mark.parametrize("fault", [{"num_stages": 5}, {"num_warps": 2}], ids=["five stages", "two warps"])
def test_what_a_launcher_asks_for_beyond_a_gpu_is_found(
    engines: list[Engine], tmp_path: Path, fault: dict[str, int]
) -> None:
    one = (*engines[0][:3], (90,))
    assert too_large(compiled([one], tmp_path, _attend_packed=fault).sizes) == {"_attend_packed 90"}
