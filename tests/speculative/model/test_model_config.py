"""config.json is read as transformers reads it, and what the engine does not know is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.config import ModelConfig
from speculative.model.rotary import Rope

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, config: dict[str, Any]) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_folder(folder)


def test_what_a_silent_config_means(tmp_path: Path) -> None:
    model = read(tmp_path, LLAMA)
    assert (model.num_kv_heads, model.head_dim, model.rope.theta, model.rms_norm_eps) == (4, 16, 10000.0, 1e-6)
    assert {model.tie_word_embeddings, model.qkv_bias, model.o_bias, model.mlp_bias, model.qk_norm} == {False}
    assert (model.bos_token_id, model.eos_token_ids, model.rope) == (None, (), Rope.plain(10000.0, 16))
    assert read(tmp_path, LLAMA | {"bos_token_id": 1}).bos_token_id == 1


REFUSED = [  # beside what `test_checkpoint_matrix` has
    (LLAMA | {"architectures": ["MixtralForCausalLM"]}, "architectures"),
    (LLAMA | {"architectures": None}, "architectures"),
    (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
    (LLAMA | {"num_experts": 64}, "num_experts"),
    (LLAMA | {"quantization_config": "fp8"}, "quantization_config"),
    (LLAMA | {"head_dim": 15}, "head_dim"),
    (LLAMA | {"vision_config": {"depth": 2}}, "vision_config"),
]


@pytest.mark.parametrize(("config", "field"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_unknown_is_refused_with_the_field_and_the_fix(
    config: dict[str, Any], field: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedModel, match=f"`{field}`.*engine.kind: vllm"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"hidden_size": None}, "hidden_size"),
        (LLAMA | {"num_hidden_layers": "2"}, "num_hidden_layers"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (LLAMA | {"rope_theta": "10000"}, "rope_theta"),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE | {"factor": None}}, "factor"),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": None}, "original_max_position"),
    ],
)
def test_a_config_that_is_wrong_says_where(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        read(tmp_path, config)


def test_no_config_and_a_broken_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json does not exist"):
        ModelConfig.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"config\.json cannot be read"):
        ModelConfig.from_folder(tmp_path)
