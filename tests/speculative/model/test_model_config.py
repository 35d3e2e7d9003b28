"""config.json is read as transformers reads it, and what the engine does not know is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.config import Llama3RopeScaling, ModelConfig
from tests.support.tiny_models import FAMILIES, write_tiny_model

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 2, "sliding_window": None}
# Says nothing of the window: transformers then assumes 4096.
MISTRAL_V01 = LLAMA | {"architectures": ["MistralForCausalLM"], "max_position_embeddings": 32768}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 2}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 2}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def read(folder: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(folder)


def test_what_a_silent_config_means(tmp_path: Path) -> None:
    model = read(tmp_path, LLAMA)
    assert (model.num_kv_heads, model.head_dim, model.rope_theta, model.rms_norm_eps) == (4, 16, 10000.0, 1e-6)
    assert {model.tie_word_embeddings, model.qkv_bias, model.o_bias, model.mlp_bias, model.qk_norm} == {False}
    assert (model.bos_token_id, model.eos_token_ids, model.rope_scaling) == (None, (), None)


def test_biases_and_norms_follow_the_family(tmp_path: Path) -> None:
    def flags(config: dict[str, Any]) -> tuple[bool, ...]:
        model = read(tmp_path, config)
        return (model.qkv_bias, model.o_bias, model.mlp_bias, model.qk_norm)

    asked = {"attention_bias": True, "mlp_bias": True}
    assert flags(LLAMA | asked) == (True, True, True, False)
    assert flags(MISTRAL | asked) == (False, False, False, False)
    assert flags(QWEN2) == (True, False, False, False)
    assert flags(QWEN3) == (False, False, False, True)
    assert flags(QWEN3 | asked) == (True, True, False, True)
    assert read(tmp_path, QWEN3).head_dim == 128


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3_ROPE},  # transformers 4
        {"rope_parameters": LLAMA3_ROPE | {"rope_theta": 5e5}},  # transformers 5
    ],
)
def test_rope_in_the_spelling_of_transformers_4_and_5(rope: dict[str, Any], tmp_path: Path) -> None:
    model = read(tmp_path, LLAMA | rope)
    assert model.rope_theta == 5e5
    assert model.rope_scaling == Llama3RopeScaling(32.0, 1.0, 4.0, 8192)


def test_every_file_names_stop_tokens(tmp_path: Path) -> None:
    config = LLAMA | {"bos_token_id": 1, "eos_token_id": 2}
    assert read(tmp_path, config).eos_token_ids == (2,)
    model = read(tmp_path, config, {"eos_token_id": [7, 0], "bos_token_id": None})
    assert (model.bos_token_id, model.eos_token_ids) == (1, (7, 0, 2))
    assert read(tmp_path, config, {"eos_token_id": 2}).eos_token_ids == (2,)


@pytest.mark.parametrize("family", FAMILIES)
def test_folders_written_by_transformers(family: str, tmp_path: Path) -> None:
    model = ModelConfig.from_folder(write_tiny_model(tmp_path, family))
    assert (model.vocab_size, model.num_layers, model.eos_token_ids) == (512, 2, (2,))
    assert model.tie_word_embeddings == FAMILIES[family].get("tie_word_embeddings", False)
    assert (model.rope_scaling is not None) == (family == "llama3")


REFUSED = [
    (LLAMA | {"architectures": ["MixtralForCausalLM"]}, "architectures"),
    (LLAMA | {"architectures": ["Qwen3MoeForCausalLM"]}, "architectures"),
    (LLAMA | {"architectures": ["Gemma3ForCausalLM"]}, "architectures"),
    (LLAMA | {"architectures": None}, "architectures"),
    (LLAMA | {"num_local_experts": 8}, "num_local_experts"),
    (LLAMA | {"num_experts": 64}, "num_experts"),
    (MISTRAL | {"sliding_window": 64}, "sliding_window"),
    (MISTRAL_V01, "sliding_window"),
    (MISTRAL | {"sliding_window": 64, "use_sliding_window": False}, "sliding_window"),  # no field of this class
    (QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}, "sliding_window"),
    (QWEN2 | {"use_sliding_window": True, "max_window_layers": 0, "max_position_embeddings": 8192}, "sliding_window"),
    (LLAMA | {"model_type": "mistral"}, "model_type"),
    (LLAMA | {"per_layer_config": {"0": {"intermediate_size": 32}}}, "per_layer_config"),
    (LLAMA | {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type"),
    (LLAMA | {"quantization_config": "fp8"}, "quantization_config"),
    (QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    (LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type"),
    (LLAMA | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type"),
    (LLAMA | {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "rope_type"),
    (LLAMA | {"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "rope_parameters"),
    (LLAMA | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    (LLAMA | {"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
    (LLAMA | {"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config"),
    (LLAMA | {"hidden_act": "gelu"}, "hidden_act"),
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
    "harmless",
    [
        MISTRAL | {"sliding_window": 128},  # as long as the context: hides nothing
        QWEN2 | {"use_sliding_window": False, "sliding_window": 64, "max_window_layers": 1},
        QWEN2 | {"layer_types": ["full_attention", "full_attention"]},
        QWEN2 | {"layer_types": ["attention", "full_attention"], "use_sliding_window": True, "sliding_window": 64},
        QWEN2 | {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2},
        LLAMA | {"sliding_window": 64, "use_sliding_window": True},  # the class knows no window
        LLAMA | {"rope_scaling": None, "quantization_config": None, "partial_rotary_factor": 1.0, "pretraining_tp": 1},
        LLAMA | {"rope_scaling": {"rope_type": "default"}},
    ],
)
def test_settings_that_change_nothing_are_let_pass(harmless: dict[str, Any], tmp_path: Path) -> None:
    assert read(tmp_path, harmless).num_layers == 2


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"hidden_size": None}, "hidden_size"),
        (LLAMA | {"num_hidden_layers": "2"}, "num_hidden_layers"),
        (LLAMA | {"num_key_value_heads": 3}, "num_key_value_heads"),
        (MISTRAL | {"num_key_value_heads": None}, "num_key_value_heads"),
        (QWEN3 | {"head_dim": None}, "head_dim"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "layer_types"),
        (LLAMA | {"head_dim": 64.0}, "head_dim"),
        (LLAMA | {"tie_word_embeddings": "false"}, "tie_word_embeddings"),
        (LLAMA | {"attention_bias": None}, "attention_bias"),
        (LLAMA | {"mlp_bias": 1}, "mlp_bias"),
        (LLAMA | {"rms_norm_eps": None}, "rms_norm_eps"),
        (LLAMA | {"rms_norm_eps": "1e-5"}, "rms_norm_eps"),
        (LLAMA | {"rope_theta": None}, "rope_theta"),
        (LLAMA | {"rope_theta": "10000"}, "rope_theta"),
        (LLAMA | {"rope_theta": 1e4, "rope_parameters": {"rope_theta": None}}, "rope_theta"),
        (LLAMA | {"rope_scaling": "linear"}, "rope_scaling"),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE | {"factor": None}}, "factor"),
        (LLAMA | {"rope_scaling": LLAMA3_ROPE, "original_max_position_embeddings": None}, "original_max_position"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
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
