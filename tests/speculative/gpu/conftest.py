"""One target, and every kind of drafter for it; and Triton's interpreter, where it runs the kernels."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from speculative.config import DrafterConfig
from tests.support.engines import NGRAM, NO_DRAFTS
from tests.support.graph_scenes import NUM_DRAFTS, VOCABULARY
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model
from tests.support.triton_interpreter import poisoned_workspaces, strict_interpreter


@pytest.fixture(scope="session", autouse=True)
def interpreter() -> Iterator[None]:
    if importlib.util.find_spec("triton") is None or "TRITON_INTERPRET" not in os.environ:
        yield
        return
    with strict_interpreter():
        yield


@pytest.fixture
def poisoned() -> Iterator[None]:
    with poisoned_workspaces():
        yield


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("graphs") / "target"
    return write_tiny_model(folder, vocab_size=VOCABULARY, num_hidden_layers=4)


@pytest.fixture(scope="session")
def drafters(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, DrafterConfig]:
    folder = tmp_path_factory.mktemp("graphs")

    def with_model(kind: Any, folder: Path) -> DrafterConfig:
        return DrafterConfig(kind=kind, model=str(folder), num_draft_tokens=NUM_DRAFTS)

    return {
        "none": NO_DRAFTS,
        "ngram": NGRAM,
        "suffix": DrafterConfig(kind="suffix", num_draft_tokens=NUM_DRAFTS),
        "draft_model": with_model("draft_model", target),
        "eagle3": with_model("eagle3", write_tiny_head(folder / "head", target)),
    }
