"""A tiny model, and what every command that writes figures would wait for."""

from pathlib import Path

import pytest

from deploy.run import quiet
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def bench_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("bench") / "tiny", tokenizer=True)


@pytest.fixture(autouse=True)
def _no_look_at_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits to see how busy others are; tests that depend on it say how busy."""
    monkeypatch.setattr(quiet, "_LOOK_S", 0.0)
