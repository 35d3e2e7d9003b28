"""Every kind of drafter; and Triton's interpreter, where it runs the kernels."""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from speculative.config import DrafterConfig
from tests.support.engines import NGRAM, NO_DRAFTS
from tests.support.graph_scenes import NUM_DRAFTS
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
def drafters(target: Path, head: Path) -> dict[str, DrafterConfig]:
    return {
        "none": NO_DRAFTS,
        "ngram": NGRAM,
        "suffix": DrafterConfig(kind="suffix", num_draft_tokens=NUM_DRAFTS),
        "draft_model": DrafterConfig(kind="draft_model", model=str(target), num_draft_tokens=NUM_DRAFTS),
        "eagle3": DrafterConfig(kind="eagle3", model=str(head), num_draft_tokens=NUM_DRAFTS),
    }
