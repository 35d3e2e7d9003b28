"""A tiny model."""

from pathlib import Path

import pytest

from tools.faults.tiny import write_tiny_pair


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_pair(tmp_path_factory.mktemp("tiny"))[0]
