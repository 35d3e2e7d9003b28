"""Whoever asks which tokens end an answer gets the same ones: engines, referee, tokenizer, heads, new weights."""

import json
from pathlib import Path

import pytest
import torch

from serve_app.backends.base import ModelInfo, Shard
from serve_app.cluster.desired_state import WeightsRef
from serve_app.cluster.weight_transfer import digest_of, fetched
from serve_app.referee.book.transformers_model import TransformersModel
from serve_app.text.tokenizer import Tokenizer
from speculative.model.config import ModelConfig
from speculative.model.end_tokens import end_tokens
from speculative.model.gguf import convert_gguf
from speculative.model.loading import load_decoder
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import write_tiny_model


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune each of whose files names another end: 5, 0, and <|im_end|>, which is 2."""
    folder = write_tiny_model(tmp_path_factory.mktemp("tuned") / "model", tokenizer=True, num_hidden_layers=4)
    for name, end in (("config.json", 0), ("generation_config.json", [5])):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": end}))
    return folder


async def test_all_agree(tuned: Path) -> None:
    wanted = (5, 0, 2)
    tokenizer, model = Tokenizer.from_folder(tuned), ModelConfig.from_folder(tuned)
    assert tokenizer.eos_token_ids == model.eos_token_ids == tuple(end_tokens(tuned)) == wanted
    assert TransformersModel(tuned).eos_token_ids == wanted
    target = load_decoder(tuned, dtype=torch.float32, device="cpu")
    assert target.config.eos_token_ids == wanted
    content = (tuned / "model.safetensors").read_bytes()
    ref = WeightsRef(1, "new", shards=(Shard(content, digest_of(content), len(content)),))

    async def pull(sent: bytes) -> bytes:
        return sent

    async with fetched(ref, ModelInfo("m", 1, 1, "f", str(tuned), ()), pull) as (folder, _):
        assert ModelConfig.from_folder(Path(folder)) == model


def test_a_gguf_file_names_ends_of_turns_too(tmp_path: Path) -> None:
    origin, made = write_tiny_model(tmp_path / "origin", tokenizer=True), tmp_path / "made"
    ends = {"tokenizer__ggml__eos_token_id": 0, "tokenizer__ggml__eot_token_id": 2, "tokenizer__ggml__eom_token_id": 7}
    made.mkdir()
    convert_gguf(write_tiny_gguf(tmp_path / "model.gguf", origin, **ends), made)
    assert ModelConfig.from_folder(made).eos_token_ids == Tokenizer.from_folder(made).eos_token_ids == (0, 2, 7)
