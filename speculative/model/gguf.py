"""Turns a GGUF file of the Llama architecture into an ordinary Hugging Face folder.

Weights are dequantized to float32 and stored in bfloat16; the four- and eight-bit numbers themselves are kept beside
them, for CPUs. The tokenizer and the chat template come along.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file
from torch import Tensor

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.file_names import WEIGHTS_FILE
from speculative.model.quantized import GROUP, Quantized, save_quantized
from speculative.model.tensor_files import require_finite

_FIX = "convert the original checkpoint instead (a folder with config.json and safetensors)"

_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_MODEL_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_HEADS_OF = {"attn_q.weight": "num_attention_heads", "attn_k.weight": "num_key_value_heads"}
_READ = (
    "llama.vocab_size",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.block_count",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.key_length",
    "llama.attention.value_length",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.dimension_count",
    "llama.rope.freq_base",
    "llama.rope.scaling.original_context_length",  # matters to a scaling alone
    "llama.rope.scaling.finetuned",
)
# What a plain Llama says with the other keys. llama.cpp takes a factor without a type for a linear scaling.
_NEUTRAL_VALUES: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "general.architecture": ("llama",),
        "llama.rope.scaling.type": ("none",),
        "llama.rope.scaling.factor": (1.0,),
        "llama.rope.scaling.attn_factor": (1.0,),
        "llama.rope.scale_linear": (1.0,),
        "llama.expert_count": (0,),
        "llama.expert_used_count": (0,),
        "llama.attention.sliding_window": (0,),
        "llama.attention.causal": (True,),
        "llama.tensor_data_layout": ("Meta AI original pth",),
        "llama.use_parallel_residual": (False,),
    }
)
# GGUF names the splitting rule and leaves it to the reader to know it.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_SINGLE_DIGITS = {"type": "Digits", "individual_digits": True}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {"type": "Sequence", "pretokenizers": [_SINGLE_DIGITS, _BYTE_LEVEL]},
}
_KEPT_TYPES = (GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0)
_CONTROL_TOKEN = 3  # token_type of a special token
_USER_DEFINED_TOKEN = 4  # token_type of an added token that is plain text


def convert_gguf(gguf_path: Path, folder: Path) -> None:
    """Write config, weights and tokenizer of a GGUF file into an existing folder.

    Raises:
        ConfigError: the file is damaged or no GGUF file.
        UnsupportedModel: it holds something other than a dense Llama with a byte-level BPE tokenizer.
    """
    try:
        reader = GGUFReader(gguf_path)
    except (ValueError, IndexError, OverflowError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(
            f"{gguf_path} cannot be read as GGUF ({error}): it is another file, or was cut off; download it again."
        ) from error
    header = GGUFHeader(reader, gguf_path.name)
    config = llama_config(header, tied="output.weight" not in {tensor.name for tensor in reader.tensors})
    _write_json(folder / "config.json", config)
    # The ends of a text, of a turn and of a message that calls a tool.
    stated = (header.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    ends = list(dict.fromkeys(int(token_id) for token_id in stated if token_id is not None))
    token_ids = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": ends if len(ends) > 1 else next(iter(ends), None),
    }
    _write_json(folder / "generation_config.json", token_ids)
    _write_json(folder / "tokenizer.json", byte_level_bpe(header))
    tokenizer: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.require("llama.context_length"),
    }
    for own, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := header.get(f"tokenizer.ggml.{key}_token_id")) is not None:
            tokenizer[f"{own}_token"] = header.require("tokenizer.ggml.tokens")[token_id]
    if (template := header.get("tokenizer.chat_template")) is not None:
        tokenizer["chat_template"] = template
    _write_json(folder / "tokenizer_config.json", tokenizer)
    weights, quantized = dict[str, Tensor](), dict[str, Quantized]()
    for tensor in reader.tensors:
        block, _, of_layer = tensor.name.removeprefix("blk.").partition(".")
        if tensor.name not in _MODEL_TENSORS and of_layer not in _LAYER_TENSORS:
            raise UnsupportedModel(f"The GGUF tensor {tensor.name} is not one of a plain Llama; {_FIX}.")
        name = _MODEL_TENSORS.get(tensor.name) or f"model.layers.{block}.{_LAYER_TENSORS[of_layer]}"
        # Of those whose rows llama.cpp reorders.
        num_heads = config[_HEADS_OF[of_layer]] if of_layer in _HEADS_OF else None
        array = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        require_finite(gguf_path, tensor.name, torch.from_numpy(array))
        weights[name] = torch.from_numpy(_rotate_half_rows(array, num_heads)).to(torch.bfloat16)
        if tensor.tensor_type in _KEPT_TYPES:
            quantized[name] = _quantized(tensor, num_heads)
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / WEIGHTS_FILE).chmod(0o644)  # safetensors makes it readable by its owner only
    if any(weight.bits == 4 for weight in quantized.values()):
        save_quantized(folder, quantized)


class GGUFHeader:
    """The key-value section of a GGUF file."""

    def __init__(self, reader: GGUFReader, file_name: str) -> None:
        self._reader = reader
        self._file_name = file_name

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key, as plain Python."""
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def names(self) -> tuple[str, ...]:
        """All keys."""
        return tuple(self._reader.fields)

    def require(self, key: str) -> Any:
        """The value of a key that must be there.

        Raises:
            ConfigError: it is not.
        """
        value = self.get(key)
        if value is None:
            raise ConfigError(f"{self._file_name} lacks {key}; {_FIX}.")
        return value


def llama_config(header: GGUFHeader, *, tied: bool) -> dict[str, Any]:
    """Return what config.json says of the model in the file."""
    _refuse_unknown(header)
    hidden_size, num_heads = header.require("llama.embedding_length"), header.require("llama.attention.head_count")
    head_dim = header.get("llama.attention.key_length", hidden_size // num_heads)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if header.get(key, head_dim) != head_dim:
            raise UnsupportedModel(f"{key} differs from the head dimension {head_dim}; {_FIX}.")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": header.get("llama.vocab_size", len(header.require("tokenizer.ggml.tokens"))),
        "hidden_size": hidden_size,
        "intermediate_size": header.require("llama.feed_forward_length"),
        "num_hidden_layers": header.require("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": header.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": _shortest(header.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(header.get("llama.rope.freq_base", 10000.0)),
        "max_position_embeddings": header.require("llama.context_length"),
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": header.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": header.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "bfloat16",
    }


def byte_level_bpe(header: GGUFHeader) -> dict[str, Any]:
    """Return what tokenizer.json (of the `tokenizers` library) says of a byte-level BPE tokenizer in the file."""
    kind, split = header.require("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre")
    if kind != "gpt2" or split not in _PRE_TOKENIZERS:
        raise UnsupportedModel(f"The GGUF tokenizer is {kind!r} with pre-tokenizer {split!r}; {_FIX}.")
    tokens, types = header.require("tokenizer.ggml.tokens"), header.require("tokenizer.ggml.token_type")
    # Added tokens are cut out of the text before anything else looks at it, so each always encodes as one id.
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": token_id, "content": token, "special": type_ == _CONTROL_TOKEN, **flags}
            for token_id, (token, type_) in enumerate(zip(tokens, types, strict=True))
            if type_ in (_CONTROL_TOKEN, _USER_DEFINED_TOKEN)
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[split],
        "post_processor": _post_processor(header, tokens),
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "vocab": {token: token_id for token_id, token in enumerate(tokens)},
            "merges": [merge.split(" ", 1) for merge in header.require("tokenizer.ggml.merges")],
        },
    }


def _post_processor(header: GGUFHeader, tokens: list[str]) -> dict[str, Any] | None:
    """Return what puts a token before a text, or behind it, where the file says so."""
    template: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    special: dict[str, Any] = {}
    for name, place in (("bos", 0), ("eos", 1)):
        if header.get(f"tokenizer.ggml.add_{name}_token", False):
            token_id = header.require(f"tokenizer.ggml.{name}_token_id")
            text = tokens[token_id]
            template.insert(place * len(template), {"SpecialToken": {"id": text, "type_id": 0}})
            special[text] = {"id": text, "ids": [token_id], "tokens": [text]}
    if not special:
        return None
    return {"type": "TemplateProcessing", "single": template, "pair": template, "special_tokens": special}


def _refuse_unknown(header: GGUFHeader) -> None:
    for key in ("general.architecture", *header.names()):
        value = header.get(key)
        of_model = key.startswith("llama.") and key not in _READ
        if value not in _NEUTRAL_VALUES.get(key, () if of_model else (value,)):
            raise UnsupportedModel(f"The GGUF file says {key} = {value!r}, which is not converted; {_FIX}.")


def _quantized(tensor: ReaderTensor, num_heads: int | None) -> Quantized:
    """The numbers of a Q4_0, Q4_1 or Q8_0 tensor: blocks of 32 inputs, each with its float16 scale (and least) first.

    A Q4_0 weight is scale * (n - 8); -8 scales is a float16 too.
    """
    num_outputs = tensor.data.shape[0]
    blocks = tensor.data.reshape(num_outputs, int(tensor.shape[0]) // GROUP, -1)
    halves = [blocks[:, :, at : at + 2].copy().view(np.float16)[..., 0] for at in (0, 2)]
    scales, least = halves[0], None
    if tensor.tensor_type == GGMLQuantizationType.Q8_0:
        numbers = blocks[:, :, 2:].view(np.int8)
    else:
        is_q4_1 = tensor.tensor_type == GGMLQuantizationType.Q4_1
        least = halves[1] if is_q4_1 else scales * np.float16(-8)
        pairs = blocks[:, :, 4 if is_q4_1 else 2 :]
        numbers = np.concatenate((pairs & 15, pairs >> 4), axis=-1)  # byte j holds numbers j and j + 16
    parts = (numbers.reshape(num_outputs, -1), scales, least)
    rows = (None if part is None else np.ascontiguousarray(_rotate_half_rows(part, num_heads)) for part in parts)
    return Quantized(*(None if part is None else torch.from_numpy(part) for part in rows))  # type: ignore[arg-type]


def _rotate_half_rows(rows: np.ndarray[Any, Any], num_heads: int | None) -> np.ndarray[Any, Any]:
    """Undo llama.cpp's reordering of query and key rows (`LlamaModel.permute` of its convert_hf_to_gguf.py).

    llama.cpp rotates neighbouring rows of a head (0, 1), (2, 3), ...; Hugging Face rotates row i with row i + D/2.
    """
    if num_heads is None:
        return rows
    pairs = rows.reshape(num_heads, -1, 2, rows.shape[1])  # [heads, D/2, 2, in]
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows.shape)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 is 1e-05 again."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
