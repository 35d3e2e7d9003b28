"""A decoder's layers, or a draft head's, in one call of our CPU kernels, with nothing of torch between them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from speculative.cache.kv_cache import KVCache
from speculative.kernels.bindings import DraftHeadStruct, DraftRoundStruct, LayerStruct, ShapeStruct
from speculative.model.attention import NativeStep, cache_shape
from speculative.model.config import ModelConfig
from speculative.model.cpu.native import NativeAttention, NativeLinear, NativeMLP, NativeNorm
from speculative.model.layers import MLP, Attention, DecoderLayer, Linear, RMSNorm, Rotary


class FusedLayers:
    """All layers of a decoder whose weights are packed for our kernels. The modules own the memory it points at."""

    def __init__(self, layers: nn.ModuleList, rotary: Rotary, config: ModelConfig) -> None:
        self._structs = (LayerStruct * len(layers))(*(_struct(layer) for layer in layers))
        self._rotary = rotary.table.float().contiguous()
        self._config = config
        self._keep = layers

    @classmethod
    def of(cls, layers: nn.ModuleList, rotary: Rotary, config: ModelConfig) -> "FusedLayers | None":
        """None where the layers are not packed for our kernels."""
        packed = all(isinstance(linear, NativeLinear) for layer in layers for linear in _linears(layer))
        return cls(layers, rotary, config) if packed and config.head_dim % 16 == 0 else None

    @property
    def addresses(self) -> bytes:
        """Return where the weights lie that it computes with."""
        return bytes(self._structs)

    def reads(self, layers: nn.ModuleList) -> bool:
        """Return whether it computes with the weights of these layers."""
        return self.addresses == b"".join(bytes(_struct(layer)) for layer in layers)

    def run(
        self, hidden: Tensor, positions: Tensor, step: NativeStep, capture: tuple[int, ...]
    ) -> tuple[Tensor, list[Tensor]]:
        """hidden [N, hidden_size] float32 (written to), positions [N] -> hidden after the last layer, and what enters
        the layers of `capture`.
        """
        struct, shape = step.struct, step.shape
        struct.positions = positions.data_ptr()
        _fill(shape, self._config, self._rotary)
        captures = sorted({layer for layer in capture if layer < len(self._structs)})
        features = step.kernels.layers(self._structs, shape, struct, step.cache, hidden, captures)
        return hidden, [features] if captures else []


@dataclass(frozen=True, slots=True)
class HeadParts:
    """The modules of a draft head that reads a token and a hidden state side by side.

    embedding: [vocab, hidden], bfloat16 or float32.
    draft_ids: [draft_vocab] int64, the target's tokens.
    residual_is_normed: whether it goes on from the normed hidden state.
    """

    embedding: Tensor
    token_norm: RMSNorm | NativeNorm
    hidden_norm: RMSNorm | NativeNorm
    attention: Attention
    mlp_norm: RMSNorm | NativeNorm
    mlp: MLP | NativeMLP
    norm: RMSNorm | NativeNorm
    lm_head: Linear | NativeLinear
    draft_ids: Tensor
    rotary: Rotary
    residual_is_normed: bool


class FusedHead:
    """A draft head's layer in one call, and its logits in another. The modules own the memory it points at."""

    def __init__(self, parts: HeadParts, config: ModelConfig) -> None:
        attention, mlp, lm_head = parts.attention, parts.mlp, parts.lm_head
        assert isinstance(attention, NativeAttention) and isinstance(mlp, NativeMLP)
        assert isinstance(lm_head, NativeLinear)
        self._struct = DraftHeadStruct(
            embedding=parts.embedding.data_ptr(),
            embedding_is_bfloat16=parts.embedding.dtype == torch.bfloat16,
            residual_is_normed=parts.residual_is_normed,
            token_norm=parts.token_norm.weight.data_ptr(),
            hidden_norm=parts.hidden_norm.weight.data_ptr(),
            layer=LayerStruct(
                mlp_norm=parts.mlp_norm.weight.data_ptr(),
                head_norm=attention.struct.head_norm,
                qkv=attention.struct.qkv,
                output=attention.struct.output,
                gate_up=mlp.struct.gate_up,
                down=mlp.struct.down,
            ),
            norm=parts.norm.weight.data_ptr(),
            lm_head=lm_head.struct,
            ids=parts.draft_ids.data_ptr(),
        )
        self._rotary = parts.rotary.table.float().contiguous()
        self._config = config
        self._parts = parts
        self._kernels = lm_head.kernels

    @property
    def addresses(self) -> bytes:
        """Return where the weights lie that it computes with."""
        return bytes(self._struct)

    @classmethod
    def of(cls, parts: HeadParts, config: ModelConfig) -> "FusedHead | None":
        """None where the head is not packed for our kernels."""
        norms = (parts.token_norm, parts.hidden_norm, parts.mlp_norm, parts.norm)
        packed = all(isinstance(norm, NativeNorm) for norm in norms) and isinstance(parts.lm_head, NativeLinear)
        packed &= isinstance(parts.attention, NativeAttention) and isinstance(parts.mlp, NativeMLP)
        readable = parts.embedding.dtype in (torch.bfloat16, torch.float32) and parts.embedding.is_contiguous()
        readable &= parts.draft_ids.is_contiguous()
        return cls(parts, config) if packed and readable and config.head_dim % 16 == 0 else None

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, step: NativeStep) -> Tensor:
        """token_ids, positions [N] int64 and hidden [N, hidden_size] float32 -> [N, hidden_size]."""
        struct, shape = step.struct, step.shape
        struct.positions = positions.data_ptr()
        _fill(shape, self._config, self._rotary)
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        return step.kernels.draft_layer(self._struct, token_ids.contiguous(), hidden, (shape, struct, step.cache))

    def shape_with(self, cache: KVCache) -> ShapeStruct:
        """The head and its cache, as `draft` takes them."""
        shape = cache_shape(cache)
        _fill(shape, self._config, self._rotary)
        return shape

    def draft(
        self, draft_round: DraftRoundStruct, num_drafts: int, hidden: Tensor, place: tuple[ShapeStruct, Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Implement `Kernels.draft_round`; hidden is [E, hidden_size] float32."""
        hidden = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
        return self._kernels.draft_round(self._struct, draft_round, num_drafts, hidden, place)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [R, hidden_size], each of them contiguous -> [R, draft_vocab] float32."""
        norm, lm_head = self._parts.norm, self._parts.lm_head
        assert isinstance(norm, NativeNorm) and isinstance(lm_head, NativeLinear)
        return lm_head.after_norm(hidden, norm)


def _fill(shape: ShapeStruct, config: ModelConfig, rotary: Tensor) -> None:
    """Fill in the facts of a model that the kernels need beside its cache."""
    shape.hidden_size, shape.intermediate_size = config.hidden_size, config.intermediate_size
    shape.num_heads, shape.eps, shape.rotary = config.num_heads, config.rms_norm_eps, rotary.data_ptr()


def _linears(layer: nn.Module) -> tuple[nn.Module, ...]:
    assert isinstance(layer, DecoderLayer)
    return (layer.attention.qkv_proj, layer.attention.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj)


def _struct(layer: nn.Module) -> LayerStruct:
    assert isinstance(layer, DecoderLayer)
    head_norm = layer.attention.qk_norm
    qkv, output, gate_up, down = (linear.struct for linear in _linears(layer))
    return LayerStruct(
        input_norm=layer.input_norm.weight.data_ptr(),
        mlp_norm=layer.mlp_norm.weight.data_ptr(),
        head_norm=None if head_norm is None else head_norm.weight.data_ptr(),
        qkv=qkv,
        output=output,
        gate_up=gate_up,
        down=down,
    )
