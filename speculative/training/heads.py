"""The kinds of head that are trained: where each starts, what it reads, and through which LM head it drafts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Config, Eagle3Head, default_aux_layers, load_eagle3, save_eagle3
from speculative.model.layers import DecoderLayer
from speculative.model.mtp import MtpConfig, MtpHead, load_mtp, save_mtp

DraftHead = Eagle3Head | MtpHead
HeadKind = Literal["eagle3", "mtp"]


@dataclass(frozen=True, slots=True, eq=False)
class LossVocabulary:
    """The tokens that the loss is over.

    ids: [D] int64, ascending: all that an EAGLE-3 head drafts; of the whole vocabulary, which an MTP module drafts, the
        commonest.
    weight: [V, target_hidden] of the target's LM head; its rows give the target's distribution.
    """

    ids: Tensor
    weight: Tensor

    @classmethod
    def of(cls, head: DraftHead, target: Decoder, commonest: Tensor) -> "LossVocabulary":
        """For a head and its target; `commonest` [D]: see `draft_vocabulary`."""
        ids = head.draft_ids if isinstance(head, Eagle3Head) else commonest.to(target.device)
        return cls(ids, _plain(target.lm_head.weight))


def draft_vocabulary(counts: np.ndarray[Any, np.dtype[np.int64]], size: int, always: Sequence[int] = ()) -> Tensor:
    """The `size` most frequent ids, ascending, [min(size, len(counts))] int64; those of `always` come first."""
    ranked = counts.copy()
    ranked[list(always)] = ranked.max() + 1
    kept = np.argsort(-ranked, kind="stable")[:size]
    return torch.from_numpy(np.sort(kept)).long()


def initial_head(kind: HeadKind, target: Decoder, draft_ids: Tensor) -> DraftHead:
    """A float32 head that starts from the target; `draft_ids` [draft_vocab] are an EAGLE-3 head's vocabulary."""
    return _initial_mtp(target) if kind == "mtp" else _initial_eagle3(target, draft_ids)


def load_head(kind: HeadKind, folder: Path, target: Decoder) -> DraftHead:
    """A head to go on from, in float32; raises what `load_eagle3` and `load_mtp` raise."""
    return (load_mtp if kind == "mtp" else load_eagle3)(folder, target, dtype=torch.float32)


def save_head(head: DraftHead, folder: Path) -> None:
    """Write a head in the format of its kind."""
    if isinstance(head, MtpHead):
        save_mtp(head, folder)
    else:
        save_eagle3(head, folder)


def aux_layers(head: DraftHead) -> tuple[int, ...]:
    """The target's layers whose inputs the head reads; () for one that reads what the LM head reads."""
    return head.aux_layers if isinstance(head, Eagle3Head) else ()


def drafted_ids(head: DraftHead) -> Tensor:
    """[W] int64, the tokens that the head drafts when it serves."""
    if isinstance(head, Eagle3Head):
        return head.draft_ids
    return torch.arange(head.config.shape.vocab_size, device=head.embedding.device)


def lm_weight(head: DraftHead, target_rows: Tensor) -> Tensor:
    """The LM head it drafts through, [D, hidden]: its own, or those rows of the target's."""
    return head.lm_head.weight if isinstance(head, Eagle3Head) else target_rows


def _initial_eagle3(target: Decoder, draft_ids: Tensor) -> Eagle3Head:
    """The target's last layer, its norm, and its LM head's rows of the draft vocabulary.

    The hidden state begins as the last of the three features; the token's half of query, key and value begins at zero.
    """
    config = Eagle3Config(
        shape=_shape(target.config, num_layers=1),
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
    qkv = _plain(last.attention.qkv_proj.weight)
    head.attention.qkv_proj.weight.zero_()
    head.attention.qkv_proj.weight[:, size:].copy_(qkv)
    head.input_norm.weight.fill_(1.0)
    for ours, theirs in (
        (head.hidden_norm, last.input_norm),
        (head.mlp_norm, last.mlp_norm),
        (head.norm, target.norm),
        (head.attention.o_proj, last.attention.o_proj),
        (head.mlp.gate_up_proj, last.mlp.gate_up_proj),
        (head.mlp.down_proj, last.mlp.down_proj),
    ):
        ours.weight.copy_(_plain(theirs.weight))
    head.lm_head.weight.copy_(_plain(target.lm_head.weight)[draft_ids])
    return head


def _initial_mtp(target: Decoder) -> MtpHead:
    """The target's last layer and its norm.

    The hidden state begins as the target's, normed; the token's half of eh_proj begins at zero.
    """
    config = MtpConfig(_shape(target.config, num_layers=target.config.num_layers))
    head = MtpHead(config, target.embedding, dtype=torch.float32)
    last, size = target.layers[-1], target.config.hidden_size
    assert isinstance(last, DecoderLayer)
    head.enorm.weight.fill_(1.0)
    head.hnorm.weight.fill_(1.0)
    head.eh_proj.weight.zero_()
    head.eh_proj.weight[:, size:].copy_(torch.eye(size))
    for ours, theirs in (
        (head.layer.input_norm, last.input_norm),
        (head.layer.attention.qkv_proj, last.attention.qkv_proj),
        (head.layer.attention.o_proj, last.attention.o_proj),
        (head.layer.mlp_norm, last.mlp_norm),
        (head.layer.mlp.gate_up_proj, last.mlp.gate_up_proj),
        (head.layer.mlp.down_proj, last.mlp.down_proj),
        (head.norm, target.norm),
    ):
        ours.weight.copy_(_plain(theirs.weight))
    return head


def _shape(target: ModelConfig, *, num_layers: int) -> ModelConfig:
    """A Llama layer of the target's own width; what it does not have (biases, norms of heads) is left out."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=target.intermediate_size,
        num_layers=num_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        rms_norm_eps=target.rms_norm_eps,
        rope_theta=target.rope_theta,
        max_position_embeddings=target.max_position_embeddings,
        rope_scaling=target.rope_scaling,
        bos_token_id=target.bos_token_id,
        eos_token_ids=target.eos_token_ids,
    )


def _plain(weight: Tensor) -> Tensor:
    """A weight as a matrix; those of a decoder packed for a CPU are unpacked."""
    return weight.to_dense() if weight.is_mkldnn else weight
