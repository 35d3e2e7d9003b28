"""Kernels as the launchers launch them, compiled for GPUs of several kinds without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model
from tests.support.triton_interpreter import needs_triton

pytestmark = [pytest.mark.slow, needs_triton]
OF_DRAFTS = ("_sum_blocks", "_settle_entries", "_compare_blocks", "_report_rows", "_take_terms")
KINDS_OF_DRAFTS = ("point masses", "the vocabulary", "a part of it")
OTHERS = {
    *("_attend_splits", "_merge_parts", "_attend_packed", "_add_norm", "_gate", "_rotate_and_store", "_find_floor"),
    *("_reduce_blocks", "_find_facts", "_choose_blocks", "_sum_terms", "_write_blocks", "_choose_drafts"),
    *("_copy_allowed", "_add_biases", "_penalise", "_quantize"),
}


CAPABILITIES = (80, 89, 90, 100, 120)
SHARED_MEMORY = 99 << 10  # of a program, on the GPUs since Ampere that have the least
SPILLED = 40  # bytes, at most: on Ampere 36 of attention's
HEADS = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1, "num_hidden_layers": 4}
Engine = tuple[str, dict[str, Any], dict[str, Any]]


@pytest.fixture
def engines(tmp_path: Path) -> list[Engine]:
    """The model's folder, drafter and settings of each; the attention's heads are those of models that people serve."""
    target = write_tiny_model(tmp_path / "model", vocab_size=64, **HEADS)
    models = {"ngram": None, "draft_model": str(target), "eagle3": str(write_tiny_head(tmp_path / "head", target))}
    drafters = [{"kind": kind, "model": model, "num_draft_tokens": 4} for kind, model in models.items()]  # wide tiles
    return [*((str(target), own, {}) for own in drafters), (str(target), drafters[0], {"quantization": "fp8"})]


def compiled(
    engines: list[Engine], capabilities: tuple[int, ...], folder: Path, **faults: dict[str, int]
) -> tuple[dict[str, int], dict[str, list[int]]]:
    """Return the launches and sizes that `tests.support.compiled_launches` prints; `folder` keeps what it compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled_launches", *map(json.dumps, (engines, capabilities, faults))],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(folder), "TRITON_DUMP_PTXAS_LOG": "1"},
        cwd=Path(__file__).parents[3],
        check=False,
        timeout=600,
    )
    assert run.returncode == 0, run.stderr
    launched, sizes = json.loads(run.stdout.splitlines()[-1])
    return launched, sizes


def too_large(sizes: dict[str, list[int]]) -> set[str]:
    return {name for name, (shared, _, spilled) in sizes.items() if shared > SHARED_MEMORY or spilled > SPILLED}


def test_whatever_an_engine_launches_compiles_and_fits_every_gpu(engines: list[Engine], tmp_path: Path) -> None:
    """And no kernel adds up atomically: results of programs that add to one another's would depend on their order."""
    launched, sizes = compiled(engines, CAPABILITIES, tmp_path / "kernels")
    assert launched.keys() == OTHERS | {f"{name} of {kind}" for name in OF_DRAFTS for kind in KINDS_OF_DRAFTS}
    assert {name.split()[1] for name in sizes} == set(map(str, CAPABILITIES))
    assert not too_large(sizes)
    files = list((tmp_path / "kernels").glob("*/*.ptx"))
    atomic = {path.name for path in files if re.search(r"\b(atom|red)\.", path.read_text())}
    assert not atomic and len(files) > len(sizes)


@pytest.mark.parametrize("fault", [{"num_stages": 5}, {"num_warps": 2}], ids=["five stages", "two warps"])
def test_what_a_launcher_asks_for_beyond_a_gpu_is_found(
    engines: list[Engine], tmp_path: Path, fault: dict[str, int]
) -> None:
    _, sizes = compiled(engines[:1], (90,), tmp_path / "kernels", _attend_packed=fault)
    assert too_large(sizes) == {"_attend_packed 90"}
