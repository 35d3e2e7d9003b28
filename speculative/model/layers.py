"""The layers of a dense decoder, over packed rows: N tokens of any number of sequences, no batch dimension."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.model.config import PLAIN, LayerKind, ModelConfig, ScoreRule
from speculative.model.fp8 import Rows, ScaledRows, quantize_rows
from speculative.model.rotary import Rotary, rotate


class Attend(Protocol):
    """Attention of one layer, given by the caller: it stores key and value, then attends causally.

    query is [N, num_heads, head_dim], key and value are [N, num_kv_heads, head_dim] (views, seldom contiguous); query
    and key are already rotated. `scores` is the layer's rule. Returns [N, num_heads, head_dim].
    """

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule = PLAIN, /
    ) -> Tensor: ...


_pinning = ContextVar("pinning", default=False)


@contextmanager
def pinned_parameters(*, pin: bool) -> Iterator[None]:
    """Keep the parameters of models that are built here in pinned memory, if they are on the host."""
    before = _pinning.set(pin)
    try:
        yield
    finally:
        _pinning.reset(before)


def nan_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter full of NaN, so that a weight nobody loaded is found."""
    full = torch.full(shape, math.nan, dtype=dtype, device=device, pin_memory=_pinning.get())
    return nn.Parameter(full, requires_grad=False)


class Matrix(nn.Module):
    """x W^T + b, with the rows of several projections in one weight where they share their input.

    A subclass adds the weights in a format: parameters with a row for each output. `reads_fp8`: also quantized rows.
    """

    reads_fp8 = False
    weight: nn.Parameter

    def __init__(
        self, num_inputs: int, num_outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.bias = nan_parameter(num_outputs, dtype=dtype, device=device) if bias else None


class Linear(Matrix):
    """A matrix of plain weights."""

    def __init__(
        self, num_inputs: int, num_outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias, dtype=dtype, device=device)
        self.weight = nan_parameter(num_outputs, num_inputs, dtype=dtype, device=device)

    def forward(self, rows: Tensor) -> Tensor:
        """[N, num_inputs] -> [N, num_outputs]."""
        return functional.linear(rows, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm (Zhang and Sennrich, 2019), computed in float32 whatever the weights' type.

    `feeds_fp8`: only matrices with FP8 weights read what is normed, so operations may quantize it at once.
    """

    def __init__(
        self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device, feeds_fp8: bool = False
    ) -> None:
        super().__init__()
        self.weight = nan_parameter(size, dtype=dtype, device=device)
        self.shape, self.eps, self.feeds_fp8 = (size,), eps, feeds_fp8

    @property
    def multipliers(self) -> Tensor:
        """[size] float32, of what is normed."""
        return self.weight.float()

    def forward(self, rows: Tensor) -> Tensor:
        """[N, size] -> [N, size]. torch's rms_norm sums and scales bfloat16 in float32."""
        return functional.rms_norm(rows, self.shape, self.weight, self.eps)


class AddedNorm(RMSNorm):
    """An RMSNorm that multiplies by 1 + w, before it rounds to the rows' type."""

    @property
    def multipliers(self) -> Tensor:
        """[size] float32, of what is normed."""
        return 1 + self.weight.float()

    def forward(self, rows: Tensor) -> Tensor:
        """[N, size] -> [N, size]."""
        return functional.rms_norm(rows.float(), self.shape, self.multipliers, self.eps).to(rows.dtype)


def norm_of(config: ModelConfig, *, dtype: torch.dtype, device: torch.device, feeds_fp8: bool = False) -> RMSNorm:
    """A norm of hidden states."""
    kind = AddedNorm if config.form.norm_adds_one else RMSNorm
    return kind(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device, feeds_fp8=feeds_fp8)


Norm = RMSNorm | nn.Identity
"""Identity where a layer has no norm."""


class HeadNorm(nn.Module):
    """Qwen3's RMSNorm of each head: one weight for all query heads, one for all key heads, kept a row per head."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        num_heads = config.num_heads + config.num_kv_heads
        self.weight = nan_parameter(num_heads, config.head_dim, dtype=dtype, device=device)
        self.shape, self.eps = (config.head_dim,), config.rms_norm_eps
        self._adds_one = config.form.norm_adds_one

    def forward(self, heads: Tensor) -> Tensor:
        """[N, num_heads + num_kv_heads, head_dim], normalised over the last."""
        if self._adds_one:
            normed = functional.rms_norm(heads.float(), self.shape, None, self.eps) * (1 + self.weight.float())
            return normed.to(heads.dtype)
        return functional.rms_norm(heads, self.shape, None, self.eps) * self.weight


class WideNorm(nn.Module):
    """OLMo 2's RMSNorm of all query heads together, and of all key heads."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.counts, self.eps = (config.num_heads, config.num_kv_heads), config.rms_norm_eps
        self.weight = nan_parameter(sum(self.counts) * config.head_dim, dtype=dtype, device=device)

    def forward(self, heads: Tensor) -> Tensor:
        """[N, num_heads + num_kv_heads, head_dim], the two parts normalised apart."""
        weights = self.weight.view(-1, heads.shape[-1]).split(self.counts)
        parts = zip(heads.split(self.counts, dim=1), weights, strict=True)
        return torch.cat([functional.rms_norm(part, part.shape[1:], own, self.eps) for part, own in parts], dim=1)


Rotation = tuple[Tensor, Tensor]
"""Values that `LayerOps` needs to rotate the rows of a forward pass; only the operations that made it read them."""


class LayerOps:
    """Sums, norms, rotations and gates of N rows; here by torch's operators, for any device and with gradients.

    Float32 inside; rounded to the rows' dtype wherever torch rounds.
    """

    def add_norm(self, hidden: Tensor, update: Tensor, norm: Norm) -> tuple[Tensor, Rows]:
        """hidden + update, and the norm of it, quantized or not if it feeds FP8; all [N, hidden_size]."""
        hidden = hidden + update
        return hidden, norm(hidden)

    def gate(self, gate_up: Tensor, *, feeds_fp8: bool = False) -> Rows:
        """[N, 2 * size] -> silu of the first half of each row times the second, [N, size], quantized or not if it
        feeds FP8.
        """
        del feeds_fp8
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def quantize(self, rows: Tensor) -> ScaledRows:
        """Implement `quantize_rows`."""
        return quantize_rows(rows)

    def rotation(self, rotary: Rotary, positions: Tensor, like: Tensor) -> Rotation:
        """Return what `attend` needs of positions [N] int64, for rows as `like`. Once a forward, not once a layer."""
        return rotary(positions, like.dtype)  # type: ignore[no-any-return]

    def attend(self, heads: Tensor, attention: "Attention", rotation: Rotation, attend: Attend, layer: int) -> Tensor:
        """Norm query and key where there is a norm, rotate them, and attend.

        Args:
            heads: [N, num_heads + 2 * num_kv_heads, head_dim] of query, key and value.
            attention: whose heads they are.
            rotation: of these operations' `rotation`.
            attend: given by the caller of the model, for layer `layer`.
            layer: which one.

        Returns:
            [N, num_heads, head_dim].
        """
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        query_key = heads[:, :-num_kv_heads]  # normalised and rotated together
        if attention.qk_norm is not None:
            query_key = attention.qk_norm(query_key)
        if attention.rotated:
            query_key = rotate(query_key, *rotation)
        query, key = query_key[:, :num_heads], query_key[:, num_heads:]
        return attend(layer, query, key, heads[:, -num_kv_heads:], attention.scores)


class FusibleLayer(nn.Module):
    """A module that leaves what lies between its matrix products to `ops`."""

    ops = LayerOps()


def use_layer_ops(model: nn.Module, ops: LayerOps) -> None:
    """Let a whole model compute with these operations from here on, or with torch's if it is not of Llama's shape."""
    layers = (module for module in model.modules() if isinstance(module, DecoderLayer))
    ops = ops if all(layer.has_llama_shape for layer in layers) else LayerOps()
    for module in model.modules():
        if isinstance(module, FusibleLayer):
            module.ops = ops


class Attention(FusibleLayer):
    """Projections around the caller's attention; query, key and value come from one matrix.

    Its input is as wide as its output unless `input_size` says otherwise. `kind`: of its layer; None = a plain one.
    `linear`: the class of its matrices.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        input_size: int | None = None,
        kind: LayerKind | None = None,
        linear: type[Matrix] = Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.sizes = (query_size, kv_size, kv_size)
        hidden_size = config.hidden_size
        num_inputs = input_size or hidden_size
        self.qkv_proj = linear(num_inputs, sum(self.sizes), bias=config.qkv_bias, dtype=dtype, device=device)
        norm = WideNorm if config.form.wide_qk_norm else HeadNorm
        self.qk_norm = norm(config, dtype=dtype, device=device) if config.qk_norm else None
        self.scores, self.rotated = (PLAIN, True) if kind is None else (kind.scores, kind.rope is not None)
        self.o_proj = linear(query_size, hidden_size, bias=config.o_bias, dtype=dtype, device=device)

    def forward(self, rows: Rows, rotation: Rotation, attend: Attend, layer: int) -> Tensor:
        """[N, input_size] -> [N, hidden_size]."""
        heads = self.qkv_proj(rows).unflatten(1, (-1, self.head_dim))
        attended = self.ops.attend(heads, self, rotation, attend, layer)
        return self.o_proj(attended.flatten(1))  # type: ignore[no-any-return]


def gelu(rows: Tensor) -> Tensor:
    """GELU by tanh, computed in float32.

    On a CPU, torch's own rounds some numbers otherwise at the ends of what its threads share out, so that a row would
    differ from batch to batch.
    """
    if rows.is_cuda:
        return functional.gelu(rows, approximate="tanh")
    wide = rows.float()
    inner = (wide + 0.044715 * (wide * wide * wide)) * math.sqrt(2 / math.pi)
    return (0.5 * wide * (1 + inner.tanh())).to(rows.dtype)


class MLP(FusibleLayer):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)), or with tanh's GELU; gate and up come from one matrix.

    `linear`: the class of its matrices.
    """

    def __init__(
        self, config: ModelConfig, *, linear: type[Matrix] = Linear, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.size, self._feeds_fp8, self._gelu = size, linear.reads_fp8, config.form.gate == "gelu_tanh"
        self.gate_up_proj = linear(hidden_size, 2 * size, bias=bias, dtype=dtype, device=device)
        self.down_proj = linear(size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, rows: Rows) -> Tensor:
        """[N, hidden_size] -> [N, hidden_size]."""
        if self._gelu:
            gate, up = self.gate_up_proj(rows).chunk(2, dim=-1)
            return self.down_proj(gelu(gate) * up)  # type: ignore[no-any-return]
        gated = self.ops.gate(self.gate_up_proj(rows), feeds_fp8=self._feeds_fp8)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class DecoderLayer(FusibleLayer):
    """One block: attention, then the MLP, each with its norms before and behind, and added to what came in.

    `kind`: of the layer. `linear`: the class of its matrices.
    """

    def __init__(
        self,
        config: ModelConfig,
        kind: LayerKind,
        *,
        linear: type[Matrix] = Linear,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()

        def norm(place: str, *, feeds_fp8: bool = False) -> Norm:
            if config.form.norms not in (place, "both"):
                return nn.Identity()
            return norm_of(config, dtype=dtype, device=device, feeds_fp8=feeds_fp8)

        feeds_fp8 = linear.reads_fp8
        self.input_norm, self.attention_out_norm = norm("before", feeds_fp8=feeds_fp8), norm("behind")
        self.attention = Attention(config, kind=kind, linear=linear, dtype=dtype, device=device)
        self.mlp_norm, self.mlp_out_norm = norm("before", feeds_fp8=feeds_fp8), norm("behind")
        self.mlp = MLP(config, linear=linear, dtype=dtype, device=device)
        self._multiplier, self.has_llama_shape = config.form.residual_multiplier, config.has_llama_shape

    def forward(
        self, hidden: Tensor, normed: Rows, rotation: Rotation, attend: Attend, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Return what comes in and its `input_norm` -> what the MLP's output is still to be added to, and that output.

        All are [N, hidden_size]: the sum is left to the caller, who can make the next norm of it at once.
        """
        update = self._scaled(self.attention_out_norm(self.attention(normed, rotation, attend, layer)))
        hidden, normed = self.ops.add_norm(hidden, update, self.mlp_norm)
        return hidden, self._scaled(self.mlp_out_norm(self.mlp(normed)))

    def _scaled(self, update: Tensor) -> Tensor:
        return update if self._multiplier == 1 else update * self._multiplier
