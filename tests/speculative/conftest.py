"""Tiny checkpoints, written once a session, and one thread for torch."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

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
def tiny16_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with 16 tokens: its distribution can be enumerated."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny16"), vocab_size=16, seed=3)
