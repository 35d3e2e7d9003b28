"""What the launchers launch, compiled for a GPU of Hopper's kind without one."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from speculative.config import DrafterConfig
from tests.support.triton_interpreter import needs_triton

pytestmark = [pytest.mark.slow, needs_triton]
OF_DRAFTS = ("_sum_blocks", "_settle_entries", "_compare_blocks", "_report_rows", "_take_terms")
KINDS_OF_DRAFTS = ("point masses", "the vocabulary", "a part of it")
OTHERS = {
    *("_attend_splits", "_merge_parts", "_attend_packed", "_add_norm", "_gate", "_rotate_and_store", "_find_floor"),
    *("_reduce_blocks", "_find_facts", "_choose_blocks", "_sum_terms", "_write_blocks", "_choose_drafts"),
    *("_copy_allowed", "_add_biases", "_penalise"),
}


def test_whatever_an_engine_launches_compiles(target: Path, drafters: dict[str, DrafterConfig], tmp_path: Path) -> None:
    """And no kernel adds up atomically: results of programs that add to one another's would depend on their order."""
    chosen = [drafters[kind] for kind in ("ngram", "draft_model", "eagle3")]
    own = [{"kind": one.kind, "model": one.model, "num_draft_tokens": one.num_draft_tokens} for one in chosen]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.compiled_launches", target, json.dumps(own)],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        check=False,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    launched = json.loads(run.stdout.splitlines()[-1]).keys()
    assert launched == OTHERS | {f"{name} of {kind}" for name in OF_DRAFTS for kind in KINDS_OF_DRAFTS}
    compiled = list(tmp_path.glob("*/*.ptx"))
    atomic = {path.name for path in compiled if re.search(r"\b(atom|red)\.", path.read_text())}
    assert not atomic and len(compiled) > len(OTHERS)
