"""An EAGLE-3 head to be trained: where it starts, which tokens it drafts, and the folder that it is written to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers
from speculative.model.head_checkpoint import HELD_OUT_RATES
from speculative.model.layers import DecoderLayer, RMSNorm
from speculative.model.rotary import Rope


def draft_vocabulary(counts: np.ndarray[Any, np.dtype[np.int64]], size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` most frequent ids, ascending, [min(size, len(counts))] int64; those of `always` come first."""
    ranked = counts.copy()
    ranked[list(always)] = ranked.max() + 1
    kept = np.argsort(-ranked, kind="stable")[:size]
    return torch.from_numpy(np.sort(kept)).long()


def llama_layer(model: ModelConfig) -> ModelConfig:
    """One Llama layer of a model's sizes, rotated by its theta."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=1,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_norm_eps=model.rms_norm_eps,
        rope=Rope.plain(model.rope.theta, model.head_dim),
        max_position_embeddings=model.max_position_embeddings,
    )


def initial_head(target: Decoder, draft_ids: Tensor) -> Eagle3Head:
    """The target's last layer without biases or norms of heads, its norm, and its LM head's rows of the draft
    vocabulary, in float32.

    The hidden state begins as the last of the three features; the token's half of query, key and value begins at zero.
    """
    config = Eagle3Config(
        shape=llama_layer(target.config),
        draft_vocab_size=len(draft_ids),
        target_hidden_size=target.config.hidden_size,
        aux_layers=default_aux_layers(target.config.num_layers),
    )
    head = Eagle3Head(config, draft_ids.to(target.device), target.embedding, dtype=torch.float32)
    last = target.layers[-1]
    assert isinstance(last, DecoderLayer)
    size = target.config.hidden_size
    head.fc.weight.zero_()
    head.fc.weight[:, -size:].copy_(torch.eye(size))
    head.attention.qkv_proj.weight.zero_()
    head.attention.qkv_proj.weight[:, size:].copy_(last.attention.qkv_proj.weight)
    head.input_norm.weight.fill_(1.0)
    for ours, theirs in (
        (head.hidden_norm, last.input_norm),
        (head.mlp_norm, last.mlp_norm),
        (head.norm, target.norm),
        (head.attention.o_proj, last.attention.o_proj),
        (head.mlp.gate_up_proj, last.mlp.gate_up_proj),
        (head.mlp.down_proj, last.mlp.down_proj),
    ):
        if isinstance(theirs, nn.Identity):
            ours.weight.fill_(1.0)
        else:
            ours.weight.copy_(theirs.multipliers if isinstance(theirs, RMSNorm) else theirs.weight)
    head.lm_head.weight.copy_(target.lm_head.weight[draft_ids])
    return head


def save_head(head: Eagle3Head, folder: Path, held_out: Mapping[str, Sequence[float]] | None = None) -> None:
    """Write the head as a folder that `load_eagle3`, vLLM and SGLang read; bfloat16, whatever it was trained in.

    `held_out` says how often drafts were accepted, by position, `sampled` at T = 1 and in `greedy` answers.
    """
    shape, draft_ids = head.config.shape, head.draft_ids.cpu()
    tensors = {name: slot.detach().bfloat16().cpu().contiguous() for name, slot in head.checkpoint_slots().items()}
    tensors["d2t"] = draft_ids - torch.arange(len(draft_ids))
    tensors["t2d"] = torch.zeros(shape.vocab_size, dtype=torch.bool).scatter_(0, draft_ids, True)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_json(shape),
        "num_hidden_layers": 1,
        "target_hidden_size": head.config.target_hidden_size,
        "draft_vocab_size": head.config.draft_vocab_size,
        "tie_word_embeddings": False,
        "norm_before_residual": head.config.norm_before_residual,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(head.aux_layers), "use_aux_hidden_state": True},
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
    }
    if held_out is not None:
        config[HELD_OUT_RATES] = {kind: [round(rate, 3) for rate in rates] for kind, rates in held_out.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it readable by its owner only
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _layer_json(shape: ModelConfig) -> dict[str, Any]:
    """What config.json says of a Llama layer; the inverse of `ModelConfig.from_json`, as far as a head needs it."""
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": shape.rms_norm_eps,
        "rope_theta": shape.rope.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope.theta},
        "rope_scaling": None,
        "max_position_embeddings": shape.max_position_embeddings,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": shape.mlp_bias,
        "vocab_size": shape.vocab_size,
        "bos_token_id": shape.bos_token_id,
        "eos_token_id": list(shape.eos_token_ids) or None,
    }
