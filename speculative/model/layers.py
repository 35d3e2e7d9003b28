"""The layers of a Llama-like decoder, over packed rows: N tokens of any number of sequences, no batch dimension."""

import math
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.model.config import Llama3RopeScaling, ModelConfig
from speculative.model.fp8 import E4M3, Fp8Rows, Rows, quantize_rows


class Attend(Protocol):
    """Attention of one layer, given by the caller: it stores key and value, then attends causally.

    query is [N, num_heads, head_dim], key and value are [N, num_kv_heads, head_dim] (views, seldom contiguous); query
    and key are already rotated. Returns [N, num_heads, head_dim].
    """

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor: ...


def nan_parameter(*shape: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    """A parameter full of NaN, so that a weight nobody loaded is found."""
    return nn.Parameter(torch.full(shape, math.nan, dtype=dtype, device=device), requires_grad=False)


class Linear(nn.Module):
    """x W^T + b, with the rows of several projections in one weight where they share their input."""

    def __init__(
        self, num_inputs: int, num_outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nan_parameter(num_outputs, num_inputs, dtype=dtype, device=device)
        self.bias = nan_parameter(num_outputs, dtype=dtype, device=device) if bias else None

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

    def forward(self, rows: Tensor) -> Tensor:
        """[N, size] -> [N, size]. torch's rms_norm sums and scales bfloat16 in float32."""
        return functional.rms_norm(rows, self.shape, self.weight, self.eps)


class HeadNorm(nn.Module):
    """Qwen3's RMSNorm of each head: one weight for all query heads, one for all key heads, kept a row per head."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        num_heads = config.num_heads + config.num_kv_heads
        self.weight = nan_parameter(num_heads, config.head_dim, dtype=dtype, device=device)
        self.shape, self.eps = (config.head_dim,), config.rms_norm_eps

    def forward(self, heads: Tensor) -> Tensor:
        """[N, num_heads + num_kv_heads, head_dim], normalised over the last."""
        return functional.rms_norm(heads, self.shape, None, self.eps) * self.weight


class Rotary(nn.Module):
    """Rotary position embedding (Su et al., 2021) in the rotate-half convention: i turns with i + head_dim/2."""

    table: Tensor  # [P, 2, head_dim/2] float32; cosines, sines

    def __init__(self, config: ModelConfig, *, device: torch.device) -> None:
        super().__init__()
        frequencies = rope_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
        angles = torch.outer(positions, frequencies)  # [P, head_dim/2]
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin()), dim=1).to(device), persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return what `rotate` needs at these positions: two of [N, 1, head_dim]."""
        cos, sin = self.table[positions].to(dtype).unsqueeze(1).unbind(2)  # [N, 1, head_dim/2]
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn heads [N, H, head_dim] to their positions. Rolling swaps the halves; the sign is in the sine."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)


def rope_frequencies(head_dim: int, theta: float, scaling: Llama3RopeScaling | None) -> Tensor:
    """Radians a position, [head_dim/2] float32, in transformers' order of operations.

    Llama 3's stretch divides the frequency of long wavelengths by `factor`, leaves short ones, and blends between.
    """
    frequencies = 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if scaling is None:
        return frequencies
    wavelengths = 2 * math.pi / frequencies
    context, low, high = scaling.original_max_position_embeddings, scaling.low_freq_factor, scaling.high_freq_factor
    share = (context / wavelengths - low) / (high - low)
    blended = (1 - share) * frequencies / scaling.factor + share * frequencies
    stretched = torch.where(wavelengths > context / low, frequencies / scaling.factor, blended)
    return torch.where(wavelengths < context / high, frequencies, stretched)


Rotation = tuple[Tensor, Tensor]
"""Values that `LayerOps` needs to rotate the rows of a forward pass; only the operations that made it read them."""


class LayerOps:
    """Sums, norms, rotations and gates of N rows; here by torch's operators, for any device and with gradients.

    Float32 inside; rounded to the rows' dtype wherever torch rounds.
    """

    def add_norm(self, hidden: Tensor, update: Tensor, norm: RMSNorm) -> tuple[Tensor, Rows]:
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

    def quantize(self, rows: Tensor) -> Fp8Rows:
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
        query_key = rotate(query_key, *rotation)
        return attend(layer, query_key[:, :num_heads], query_key[:, num_heads:], heads[:, -num_kv_heads:])


class FusibleLayer(nn.Module):
    """A module that leaves what lies between its matrix products to `ops`."""

    ops = LayerOps()


def use_layer_ops(model: nn.Module, ops: LayerOps) -> None:
    """Let a whole model compute with these operations from here on."""
    for module in model.modules():
        if isinstance(module, FusibleLayer):
            module.ops = ops


class Fp8Linear(FusibleLayer):
    """A Linear with FP8 weights, a scale for each output, times rows that are quantized here if they are not yet.

    weight: [num_outputs, num_inputs] e4m3. weight_scale: [num_outputs, 1] float32.
    """

    def __init__(
        self, num_inputs: int, num_outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nan_parameter(num_outputs, num_inputs, dtype=E4M3, device=device)
        self.weight_scale = nan_parameter(num_outputs, 1, dtype=torch.float32, device=device)
        self.bias = nan_parameter(num_outputs, dtype=dtype, device=device) if bias else None
        self.dtype = dtype

    def forward(self, rows: Rows) -> Tensor:
        """[N, num_inputs] -> [N, num_outputs]."""
        numbers, scales = rows if isinstance(rows, Fp8Rows) else self.ops.quantize(rows)
        return torch._scaled_mm(  # with `use_fast_accum`, a Hopper GPU would add up in 14 bits
            numbers, self.weight.t(), scales, self.weight_scale.t(), bias=self.bias, out_dtype=self.dtype
        )


class Attention(FusibleLayer):
    """Projections around the caller's attention; query, key and value come from one matrix.

    Its input is as wide as its output unless `input_size` says otherwise. `fp8`: its matrices have FP8 weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        input_size: int | None = None,
        fp8: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        query_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.sizes = (query_size, kv_size, kv_size)
        hidden_size = config.hidden_size
        num_inputs = input_size or hidden_size
        linear = Fp8Linear if fp8 else Linear
        self.qkv_proj = linear(num_inputs, sum(self.sizes), bias=config.qkv_bias, dtype=dtype, device=device)
        self.qk_norm = HeadNorm(config, dtype=dtype, device=device) if config.qk_norm else None
        self.o_proj = linear(query_size, hidden_size, bias=config.o_bias, dtype=dtype, device=device)

    def forward(self, rows: Rows, rotation: Rotation, attend: Attend, layer: int) -> Tensor:
        """[N, input_size] -> [N, hidden_size]."""
        heads = self.qkv_proj(rows).unflatten(1, (-1, self.head_dim))
        attended = self.ops.attend(heads, self, rotation, attend, layer)
        return self.o_proj(attended.flatten(1))  # type: ignore[no-any-return]


class MLP(FusibleLayer):
    """SwiGLU (Shazeer, 2020): down(silu(gate(x)) * up(x)); gate and up come from one matrix.

    `fp8`: its matrices have FP8 weights.
    """

    def __init__(self, config: ModelConfig, *, fp8: bool = False, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        hidden_size, size, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.size, self.fp8 = size, fp8
        linear = Fp8Linear if fp8 else Linear
        self.gate_up_proj = linear(hidden_size, 2 * size, bias=bias, dtype=dtype, device=device)
        self.down_proj = linear(size, hidden_size, bias=bias, dtype=dtype, device=device)

    def forward(self, rows: Rows) -> Tensor:
        """[N, hidden_size] -> [N, hidden_size]."""
        gated = self.ops.gate(self.gate_up_proj(rows), feeds_fp8=self.fp8)
        return self.down_proj(gated)  # type: ignore[no-any-return]


class DecoderLayer(FusibleLayer):
    """One block: attention, then the MLP, each after a norm and added to what came in.

    `fp8`: its matrices have FP8 weights.
    """

    def __init__(self, config: ModelConfig, *, fp8: bool = False, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_norm = RMSNorm(size, eps, dtype=dtype, device=device, feeds_fp8=fp8)
        self.attention = Attention(config, fp8=fp8, dtype=dtype, device=device)
        self.mlp_norm = RMSNorm(size, eps, dtype=dtype, device=device, feeds_fp8=fp8)
        self.mlp = MLP(config, fp8=fp8, dtype=dtype, device=device)

    def forward(
        self, hidden: Tensor, normed: Rows, rotation: Rotation, attend: Attend, layer: int
    ) -> tuple[Tensor, Tensor]:
        """Return what comes in and its `input_norm` -> what the MLP's output is still to be added to, and that output.

        All are [N, hidden_size]: the sum is left to the caller, who can make the next norm of it at once.
        """
        update = self.attention(normed, rotation, attend, layer)
        hidden, normed = self.ops.add_norm(hidden, update, self.mlp_norm)
        return hidden, self.mlp(normed)
