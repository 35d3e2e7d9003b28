"""Writes tiny checkpoints with random weights, one for each family the engine serves. Their answers mean nothing."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tools.faults.tiny import write_tiny_tokenizer

EOS_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1, "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": EOS_TOKEN_ID,
}  # fmt: skip
_LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "llama_biased": {"model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama3": {"model_type": "llama", "rope_parameters": _LLAMA3_ROPE},
    "smollm": {"model_type": "llama", "tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}
    | {"hidden_size": 48},
    "mistral": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "smollm3": {"model_type": "smollm3", "num_hidden_layers": 3, "no_rope_layers": [1, 1, 0]},
    "olmo2": {"model_type": "olmo2"},
    "olmo3": {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 9, "rope_parameters": None},
    "gemma2": {"model_type": "gemma2", "num_hidden_layers": 3, "sliding_window": 9, "head_dim": 32}
    | {"query_pre_attn_scalar": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0},
    "gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 9, "head_dim": 32}
    | {"query_pre_attn_scalar": 24, "sliding_window_pattern": 3, "rope_parameters": None},
    "granite": {"model_type": "granite", "embedding_multiplier": 3.0, "residual_multiplier": 0.6}
    | {"attention_multiplier": 0.2, "logits_scaling": 0.7},
    "granite4": {"model_type": "granitemoehybrid", "num_local_experts": 0, "shared_intermediate_size": 96}
    | {"layer_types": ["full_attention"] * 2, "position_embedding_type": "rope", "attention_multiplier": 0.2}
    | {"mamba_n_heads": 8, "residual_multiplier": 0.6},
    "phi3": {"model_type": "phi3", "sliding_window": 9},
    "ministral": {
        "model_type": "ministral",
        "head_dim": 16,
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "qwen3_biased": {"model_type": "qwen3", "head_dim": 32, "attention_bias": True},
}


def write_tiny_model(
    folder: Path,
    family: str = "llama",
    vocab_size: int = 512,
    *,
    tokenizer: bool = False,
    seed: int = 0,
    **overrides: Any,
) -> Path:
    """Write config, float32 weights and, if asked, a byte-level tokenizer with a chat template; returns the folder.

    `overrides` are fields of the transformers configuration. Weights are drawn wide enough that logits differ clearly.
    """
    settings = {**_COMMON, **FAMILIES[family], **overrides, "vocab_size": vocab_size}
    config = CONFIG_MAPPING[settings.pop("model_type")](**settings)
    model = AutoModelForCausalLM.from_config(config)
    _randomise(model, seed)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=EOS_TOKEN_ID, pad_token_id=EOS_TOKEN_ID)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if tokenizer:
        write_tiny_tokenizer(folder, vocab_size, chat_template=CHAT_TEMPLATE)
    return folder


def padded(source: Path, folder: Path, vocab_size: int, *, num_tokens: int) -> Path:
    """Write the same model with another number of ids, and a tokenizer.json that has so many tokens: its padding is
    likely everywhere."""
    shutil.copytree(source, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        more = max(0, vocab_size - len(tensors[name]))
        rows = torch.cat([tensors[name], tensors[name][:more]])[:vocab_size].clone()
        rows[num_tokens:] *= 1.5
        tensors[name] = rows
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    model = {"vocab": {f"t{token}": token for token in range(num_tokens - 1)}}
    added = [{"id": num_tokens - 1, "content": "<|end|>"}]
    (folder / "tokenizer.json").write_text(json.dumps({"model": model, "added_tokens": added}))
    return folder


def _randomise(model: torch.nn.Module, seed: int) -> None:
    """Fill every parameter, biases and norms too, from one seed that touches no global state."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.15 * noise)


def greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Decode with a model of transformers; returns its tokens, and their logprobs."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            rows = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
            tokens.append(int(rows[-1].argmax()))
    answer = tokens[len(prompt) :]
    return answer, rows[len(prompt) - 1 :].gather(1, torch.tensor(answer)[:, None])[:, 0].tolist()
