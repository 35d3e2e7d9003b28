"""Writes tiny models as GGUF files."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from gguf.quants import quantize
from safetensors.torch import load_file

from tests.support.tiny_models import CHAT_TEMPLATE, EOS_TOKEN_ID
from tools.faults.tiny import SPECIAL_TOKENS

_ALL_FLOAT: Mapping[str, GGMLQuantizationType] = MappingProxyType({})
_GGUF_LAYER_NAMES = {
    "input_layernorm": "attn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm", "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down",
}  # fmt: skip


def write_tiny_gguf(
    path: Path, model_folder: Path, types: Mapping[str, GGMLQuantizationType] = _ALL_FLOAT, **changes: Any
) -> Path:
    """Write a tiny Llama with its tokenizer as llama.cpp's converter would, query and key rows reordered for its RoPE.

    `types` are those of the GGUF modules that are not float32. `changes` replace or (None) drop header fields, spelled
    with `__` for a dot.
    """
    config = json.loads((model_folder / "config.json").read_text(encoding="utf-8"))
    tokenizer = json.loads((model_folder / "tokenizer.json").read_text(encoding="utf-8"))
    fields = _gguf_fields(config, tokenizer) | {name.replace("__", "."): value for name, value in changes.items()}
    writer = GGUFWriter(path, fields.pop("general.architecture"))
    for name, value in fields.items():
        if value is not None:
            writer.add_key_value(name, value, *_gguf_types(value))
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for name, tensor in load_file(model_folder / "model.safetensors").items():
        gguf_name = _gguf_tensor_name(name)
        array = tensor.float().numpy()
        module = gguf_name.split(".")[-2]
        if module in heads:  # the converter's `permute`
            array = array.reshape(heads[module], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
        array, kind = np.ascontiguousarray(array), types.get(module)
        writer.add_tensor(gguf_name, array if kind is None else quantize(array, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _gguf_fields(config: dict[str, Any], tokenizer: dict[str, Any]) -> dict[str, Any]:
    tokens = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    tokens += [f"<unused{index}>" for index in range(config["vocab_size"] - len(tokens))]
    return {
        "general.architecture": "llama",
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.block_count": config["num_hidden_layers"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_parameters"]["rope_theta"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.vocab_size": config["vocab_size"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL_TOKENS else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": EOS_TOKEN_ID,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _gguf_types(value: Any) -> tuple[GGUFValueType, ...]:
    kinds = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32}
    if isinstance(value, list):
        return GGUFValueType.ARRAY, kinds.get(type(value[0]), GGUFValueType.STRING)
    return (kinds.get(type(value), GGUFValueType.STRING),)


def _gguf_tensor_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, block, *_, module, kind = name.split(".")
        return f"blk.{block}.{_GGUF_LAYER_NAMES[module]}.{kind}"
    return {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }[name]
