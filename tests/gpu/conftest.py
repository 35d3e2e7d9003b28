"""Tests that need a CUDA device: `make test-gpu` fails where there is none, any other run skips them."""

from pathlib import Path

import pytest
import torch

from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("there is no CUDA device here")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def gpu_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama with 512 tokens, whose heads are wide enough for tensor cores; an EAGLE-3 head lies beside it."""
    folder = _write(tmp_path_factory.mktemp("gpu") / "target", seed=0)
    write_tiny_head(folder.parent / "head", folder)
    return folder


@pytest.fixture(scope="session")
def stranger_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one, of other weights."""
    return _write(tmp_path_factory.mktemp("gpu") / "stranger", seed=5)


def _write(folder: Path, seed: int) -> Path:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
    return write_tiny_model(folder, seed=seed, num_key_value_heads=2, max_position_embeddings=4096, **sizes)
