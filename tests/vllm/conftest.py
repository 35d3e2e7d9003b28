"""What vLLM's tests share: a tiny model for each module, and one cluster for those on Ray: a process joins but one."""

from pathlib import Path

import pytest

from tests.support.services import ray_port
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_engines import TARGET

__all__ = ["ray_port"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("vllm") / "m", vocab_size=512, tokenizer=True, **TARGET)
