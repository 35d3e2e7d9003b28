"""Checkpoints of all families, field by field and tensor by tensor: computed as transformers computes them,
logit for logit, or refused by name.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculative.errors import ConfigError
from speculative.model.loading import load_decoder
from speculative.model.rotary import Rope
from tests.speculative.model.test_decoder import LENGTHS, own_logits, reference_logits
from tests.support.tiny_models import write_tiny_model

_ROUNDING = 1e-4
_CLEARLY = 0.05  # what reading a case wrongly shifts a logit by, at least
_IDS = torch.randint(64, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
_ABSENT = object()

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
_STRETCHED = {"rope_type": "llama3", **_LLAMA3}
_OLD = {"rope_parameters": _ABSENT, "rope_theta": 500.0}  # transformers 4 has no rope_parameters

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """A checkpoint as transformers writes it, and what is then changed in its files.

    made: fields of the configuration that it is written with. says: fields that config.json then has instead.
    moves: whether that changes transformers' logits, so that an engine which overlooks it is found out.
    """

    family: str
    says: dict[str, Any] = field(default_factory=dict)
    made: dict[str, Any] = field(default_factory=dict)
    edit: Callable[[Weights], object] | None = None
    moves: bool = False
    shard: str = ""  # the size of the files that it is written in


def _rope(says: dict[str, Any], *, moves: bool = True) -> Case:
    return Case("llama", says, moves=moves)


def _refused(name: str, tensor: Tensor, message: str) -> tuple[Case, str]:
    """A Llama whose last layer has a tensor more."""
    return Case("llama", edit=lambda weights: weights.update({f"model.layers.1.{name}": tensor})), message


def _own_head(weights: Weights) -> None:
    weights[_HEAD] = weights[_EMBEDDING].flip(0).contiguous()


def _frequencies(weights: Weights) -> None:
    frequencies = torch.tensor(Rope.plain(10000.0, 16).frequencies)
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = frequencies.bfloat16()
    weights["model.rotary_emb.inv_freq"] = frequencies.half()
    angles = torch.outer(torch.arange(128.0), frequencies).repeat(1, 2)
    weights["model.layers.0.self_attn.rotary_emb.cos_cached"] = angles.cos()[None, None].bfloat16()
    weights["model.layers.0.self_attn.rotary_emb.sin_cached"] = angles.sin()
    weights["model.layers.0.self_attn.masked_bias"] = torch.tensor(-1e9)


def _in(dtype: torch.dtype) -> Callable[[Weights], object]:
    return lambda weights: weights.update({name: tensor.to(dtype) for name, tensor in weights.items()})


_BIASED = {"attention_bias": True, "mlp_bias": True}
_WINDOW = {"sliding_window": 4}
_SLIDES = {"use_sliding_window": True, "sliding_window": 4}

_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
_LAYERED = {"layer_types": ["full_attention", "sliding_attention"]}
_LONG = {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.5, 1.7, 2.0], "long_factor": [4.0] * 6}

COMPUTED = {
    # Families with layers of several kinds, over the edge of their windows.
    "SmolLM3": Case("smollm3"),
    "SmolLM3, rotated by name": Case("smollm3", {"no_rope_layers": [0, 1, 1]}, moves=True),
    "OLMo 2": Case("olmo2"),
    "OLMo 3": Case("olmo3"),
    "OLMo 3, stretched": Case("olmo3", {"rope_scaling": _YARN, "rope_theta": 500.0}, moves=True),
    "Gemma 2": Case("gemma2"),
    "Gemma 2 without caps": Case(
        "gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}, moves=True
    ),
    "Gemma 3": Case("gemma3"),
    "Gemma 3, other layers": Case("gemma3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    "Gemma 3 as Google wrote it": Case(
        "gemma3",
        {"rope_parameters": _ABSENT, "rope_theta": 500.0, "rope_local_base_freq": 50.0}
        | {"rope_scaling": {"rope_type": "linear", "factor": 8.0}, "layer_types": _ABSENT, "sliding_window_pattern": 2},
        moves=True,
    ),
    "Granite": Case("granite"),
    "Granite 4": Case("granite4"),
    "Granite 4, not rotated": Case("granite4", {"position_embedding_type": None}, moves=True),
    "Phi-3": Case("phi3"),
    "Phi-3, a part of heads": Case("phi3", {"partial_rotary_factor": 0.5, "rope_parameters": _ABSENT}, moves=True),
    "Phi-4-mini": Case(
        "phi3",
        {"partial_rotary_factor": 0.75, "rope_parameters": _ABSENT, "rope_scaling": _LONG}
        | {"original_max_position_embeddings": 64},
        moves=True,
    ),
    "Ministral": Case("ministral"),
    "Mistral with a window": Case("mistral", _WINDOW, moves=True),
    "Mistral, a window that others deny": Case("mistral", _WINDOW | {"use_sliding_window": False}, moves=True),
    "Qwen2, a window behind the first": Case("qwen2", _SLIDES | {"layer_types": _ABSENT, "max_window_layers": 1}),
    "Qwen3, a layer with a window": Case("qwen3", _SLIDES | _LAYERED, moves=True),
    "yarn": _rope({"rope_parameters": _YARN | {"rope_theta": 500.0}}),
    "yarn beside": Case("qwen3", {"rope_scaling": _YARN | {"beta_fast": 8.0, "truncate": False}}, moves=True),
    "linear": _rope({"rope_scaling": {"rope_type": "linear", "factor": 3.0}}),
    # Shapes, biases and norms.
    "Llama": Case("llama"),
    "Llama with biases": Case("llama", made=_BIASED),
    "Llama of wider heads": Case("llama", made={"head_dim": 32}),
    "Llama, head_dim null": Case("llama", {"head_dim": None}),
    "Llama of one key head": Case("llama", made={"num_key_value_heads": 1}),
    "Llama, as many key heads, null": Case("llama", {"num_key_value_heads": None}, {"num_key_value_heads": 4}),
    "Llama, another eps": Case("llama", {"rms_norm_eps": 0.5}, moves=True),
    "Llama, no eps": Case("llama", {"rms_norm_eps": _ABSENT}),
    "Llama, the eps of other models": Case("llama", {"layer_norm_eps": 0.5}),
    "Llama, swish": Case("llama", {"hidden_act": "swish"}),
    "SmolLM": Case("smollm"),
    "SmolLM with a copy of the embedding": Case(
        "smollm", edit=lambda weights: weights.update({_HEAD: weights[_EMBEDDING].clone()})
    ),
    "SmolLM whose embedding is called head": Case(
        "smollm", edit=lambda weights: weights.update({_HEAD: weights.pop(_EMBEDDING)})
    ),
    "SmolLM, untied": Case("smollm", {"tie_word_embeddings": False}, edit=_own_head, moves=True),
    "Llama, silent on tying": Case("llama", {"tie_word_embeddings": _ABSENT}),
    "Mistral": Case("mistral"),
    "Mistral, a bias that its class knows nothing of": Case("mistral", {"attention_bias": True}),
    "Mistral, silent on key heads": Case(
        "mistral", {"num_key_value_heads": _ABSENT}, {"num_attention_heads": 8, "num_key_value_heads": 8}
    ),
    "Qwen2": Case("qwen2"),
    "Qwen2, no attention_bias": Case("qwen2", {"attention_bias": False}),
    "Qwen2 with head_dim": Case("qwen2", {"head_dim": 32}, {"head_dim": 32}),
    "Qwen3": Case("qwen3"),
    "Qwen3 with biases": Case("qwen3_biased"),
    "Qwen3, untied": Case("qwen3", made={"tie_word_embeddings": False}),
    "Qwen3, silent on head_dim": Case("qwen3", {"head_dim": _ABSENT}, {"head_dim": 128}),
    # Rotary settings, in the old and the new spelling, in both, and beside each other.
    "theta in rope_parameters": _rope({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "theta alone": _rope(_OLD),
    "theta in both, different": _rope({"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 500.0}}),
    "theta beside, null": _rope({"rope_theta": None, "rope_parameters": {"rope_theta": 500.0}}),
    "theta nowhere": _rope({"rope_parameters": {"rope_type": "default"}}, moves=False),
    "theta from beside": _rope({"rope_theta": 500.0, "rope_parameters": {"rope_type": "default"}}),
    "rope_scaling null": _rope(_OLD | {"rope_scaling": None}),
    "rope_scaling, default": _rope(_OLD | {"rope_scaling": {"rope_type": "default"}}),
    "stretched in rope_scaling": _rope(_OLD | {"rope_scaling": _STRETCHED}),
    "stretched in rope_scaling, by its old name": _rope(_OLD | {"rope_scaling": {"type": "llama3", **_LLAMA3}}),
    "stretched in rope_parameters": _rope({"rope_parameters": _STRETCHED | {"rope_theta": 500.0}}),
    "stretched in rope_scaling, not in rope_parameters": _rope(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}, "rope_scaling": _STRETCHED}
    ),
    "stretched in rope_parameters, not in rope_scaling": _rope(
        {
            "rope_parameters": _STRETCHED | {"rope_theta": 10000.0},
            "rope_scaling": {"rope_type": "default"},
            "rope_theta": 500.0,
        }
    ),
    "a type, and another by its old name": _rope(
        {"rope_parameters": {"rope_type": "default", "type": "linear", "factor": 2.0, "rope_theta": 500.0}}
    ),
    "stretched, of all positions": _rope(
        _OLD | {"rope_scaling": {name: value for name, value in _STRETCHED.items() if not name.startswith("orig")}}
    ),
    "stretched, of positions beside": _rope(_OLD | {"rope_scaling": _STRETCHED, "original_max_position_embeddings": 8}),
    "stretched without a blend": _rope(_OLD | {"rope_scaling": _STRETCHED | {"low_freq_factor": 4.0}}),
    "rotated whole": _rope({"partial_rotary_factor": 1.0}, moves=False),
    "theta of Qwen3": Case("qwen3", {"rope_theta": 7.0, "rope_parameters": {"rope_theta": 500.0}}, moves=True),
    # Windows that are not in use.
    "Llama with a window": Case("llama", _WINDOW | {"use_sliding_window": True, "max_window_layers": 0}),
    "Mistral, window null": Case("mistral", {"sliding_window": None}),
    "Mistral, window as long as its context": Case("mistral", {"sliding_window": 512}),
    "Mistral, silent on the window": Case("mistral", {"sliding_window": _ABSENT}),
    "Qwen2, window not used": Case("qwen2", _SLIDES | {"use_sliding_window": False, "max_window_layers": 0}),
    "Qwen2, silent on its use": Case("qwen2", {"use_sliding_window": _ABSENT, "sliding_window": 4}),
    "Qwen2, window behind the last layer": Case("qwen2", _SLIDES | {"layer_types": _ABSENT, "max_window_layers": 2}),
    "Qwen3, window behind the 28th": Case("qwen3", _SLIDES | {"layer_types": _ABSENT, "max_window_layers": _ABSENT}),
    "Qwen3, layers without": Case("qwen3", _SLIDES | {"layer_types": ["full_attention"] * 2, "max_window_layers": 0}),
    "Qwen2, layers by their old name": Case("qwen2", {"layer_types": ["attention"] * 2}),
    # Types, files and tensors that follow from others.
    "bfloat16 in the files": Case("llama", {"dtype": "bfloat16"}, edit=_in(torch.bfloat16)),
    "no quantization": Case("llama", {"quantization_config": None, "compression_config": None}),
    "fields of other models": Case("llama", {"n_positions": 8, "n_ctx": 8, "num_kv_heads": 1, "pretraining_tp": 2}),
    "frequencies in the files": Case("llama", edit=_frequencies),
    "shards": Case("qwen3", shard="30KB"),
}

REFUSED = {
    "another form": (_rope({"rope_scaling": _YARN | {"rope_type": "dynamic"}}), "`rope_type` is 'dynamic'"),
    "type null": (_rope({"rope_parameters": {"rope_type": None}}), "`rope_type` is None"),
    "theta null": (_rope({"rope_parameters": {"rope_type": "default"}, "rope_theta": None}), "`rope_theta`"),
    "theta null inside": (_rope({"rope_theta": 500.0, "rope_parameters": {"rope_theta": None}}), "`rope_theta`"),
    "theta 0": (_rope(_OLD | {"rope_theta": 0}), "`rope_theta`"),
    "factor, a text": (_rope(_OLD | {"rope_scaling": _STRETCHED | {"factor": "8"}}), "`factor`"),
    "a stretch that lacks a factor": (_rope({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}), "low_freq"),
    "a stretch from high to low": (
        _rope(_OLD | {"rope_scaling": _STRETCHED | {"low_freq_factor": 5}}),
        "`low_freq_factor` is 5.0, above `high_freq_factor`, 4.0",
    ),
    "an encoder": (Case("llama", {"is_causal": False}), "`is_causal` is False"),
    "rotary settings, a text": (_rope({"rope_scaling": "linear"}), "`rope_scaling`"),
    "by layer": (_rope({"rope_parameters": {"full_attention": _STRETCHED}}), "`rope_parameters` differ"),
    "no settings of a layer": (Case("gemma3", {"rope_parameters": {"full_attention": 5}}), "`full_attention` is 5"),
    "rotated in part": (_rope({"partial_rotary_factor": 0.5}), "`partial_rotary_factor`"),
    "rotated in part, inside": (_rope({"rope_parameters": {"partial_rotary_factor": 0.5}}), "`partial_rotary_factor`"),
    "layers with a window that is not in use": (
        Case("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}),
        "`sliding_window` is null or not in use",
    ),
    "a capped layer of another kind": (Case("gemma3", {"attn_logit_softcapping": 5.0}), "`attn_logit_softcapping`"),
    "both ways": (Case("gemma2", {"use_bidirectional_attention": True}), "`use_bidirectional_attention`"),
    "experts": (Case("granite4", {"num_local_experts": 4}), "`num_local_experts`"),
    "layers of another kind": (Case("granite4", {"layer_types": ["mamba", "attention"]}), "`layer_types`"),
    "layers of another model": (Case("qwen3", {"layer_types": ["full_attention"] * 3}), "`layer_types`"),
    "another model": (Case("llama", {"model_type": "mistral"}), "`model_type` is 'mistral'"),
    "gelu": (Case("llama", {"hidden_act": "gelu"}), "`hidden_act`"),
    "a size, a fraction": (Case("llama", {"head_dim": 16.0}), "`head_dim`"),
    "head_dim null where it has a default": (Case("qwen3", {"head_dim": None}), "`head_dim`"),
    "key heads null where they have a default": (Case("mistral", {"num_key_value_heads": None}), "`num_key_value"),
    "eps null": (Case("llama", {"rms_norm_eps": None}), "`rms_norm_eps`"),
    "tied, a text": (Case("llama", {"tie_word_embeddings": "false"}), "`tie_word_embeddings`"),
    "a bias, null": (Case("llama", {"attention_bias": None}), "`attention_bias`"),
    "layers of their own shape": (Case("llama", {"per_layer_config": {"0": {"head_dim": 8}}}), "`per_layer_config`"),
    "quantized": (Case("llama", {"quantization_config": {"quant_method": "awq"}}), "`quantization_config`"),
    "quantized, by its old name": (Case("llama", {"compression_config": {"format": "dense"}}), "`compression_config`"),
    "tied, and a head of its own": (Case("smollm", edit=_own_head), f"{_HEAD} .*`tie_word_embeddings`"),
    "untied, and no head": (Case("llama", edit=lambda weights: weights.pop(_HEAD)), f"lacks the tensors {_HEAD}"),
    "biases that are not there": (Case("llama", {"attention_bias": True}), r"lacks the tensors .*_proj\.bias"),
    "biases that are not spoken of": (
        Case("llama", {"attention_bias": False}, _BIASED),
        r"unexpected tensor .*_proj\.bias",
    ),
    "a bias on the output": _refused("self_attn.o_proj.bias", torch.ones(64), r"unexpected tensor .*o_proj\.bias"),
    "a layer fewer": (Case("llama", {"num_hidden_layers": 3}), r"lacks the tensors model\.layers\.2"),
    "norms of heads": _refused("self_attn.q_norm.weight", torch.ones(16), "unexpected tensor .*q_norm"),
    "a mask": _refused("self_attn.bias", torch.ones(1, 1, 8, 8), r"unexpected tensor .*self_attn\.bias"),
    "other frequencies": _refused(
        "self_attn.rotary_emb.inv_freq",
        torch.tensor(Rope.plain(500.0, 16).frequencies),
        r"model\.safetensors: tensor .*inv_freq is not what the rotary settings",
    ),
    "other cosines": _refused(
        "self_attn.rotary_emb.cos_cached", torch.zeros(128, 16), "cos_cached is not what the rotary settings"
    ),
}


def _write(folder: Path, case: Case) -> Path:
    write_tiny_model(folder, case.family, vocab_size=64, **case.made)
    file = folder / "model.safetensors"
    if case.edit is not None:
        weights = load_file(file)
        case.edit(weights)
        save_file(weights, file, {"format": "pt"})
    if case.shard:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size=case.shard)
        file.unlink()
        assert len(list(folder.glob("model-*.safetensors"))) > 2
    config = json.loads((folder / "config.json").read_text()) | case.says
    kept = {name: value for name, value in config.items() if value is not _ABSENT}
    (folder / "config.json").write_text(json.dumps(kept))
    return folder


def test_what_a_checkpoint_says_is_what_transformers_computes(tmp_path: Path) -> None:
    wrong: dict[str, object] = {}
    unedited: dict[str, Tensor] = {}
    for number, (name, case) in enumerate(COMPUTED.items()):
        folder = _write(tmp_path / str(number), case)
        expected = reference_logits(folder, _IDS, torch.float32)
        assert expected.std() > 0.5, "the reference must say something"
        if case.moves:
            if case.family not in unedited:
                unedited[case.family] = reference_logits(
                    _write(tmp_path / case.family, Case(case.family)), _IDS, torch.float32
                )
            assert (expected - unedited[case.family]).abs().max() > _CLEARLY, name
        try:
            logits = own_logits(load_decoder(folder, dtype=torch.float32, device="cpu"), _IDS)
        except ConfigError as error:
            wrong[name] = error
            continue
        error = (logits - expected).abs().max().item()
        if not error < _ROUNDING:
            wrong[name] = error
    assert not wrong


def test_what_cannot_be_computed_so_is_refused_by_name(tmp_path: Path) -> None:
    wrong: dict[str, object] = {}
    for number, (name, (case, message)) in enumerate(REFUSED.items()):
        folder = _write(tmp_path / str(number), case)
        try:
            load_decoder(folder, dtype=torch.float32, device="cpu")
        except ConfigError as error:
            if not re.search(message, str(error)):
                wrong[name] = error
        else:
            wrong[name] = "was loaded"
    assert not wrong
