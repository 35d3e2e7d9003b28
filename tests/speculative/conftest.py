"""Tiny checkpoints, written once a session, and one thread for torch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with 64 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), vocab_size=64)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with as many layers as a head reads the features of."""
    return write_tiny_model(tmp_path_factory.mktemp("target") / "model", vocab_size=64, num_hidden_layers=4)


@pytest.fixture(scope="session")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An EAGLE-3 head for it."""
    return write_tiny_head(tmp_path_factory.mktemp("head") / "head", target)
