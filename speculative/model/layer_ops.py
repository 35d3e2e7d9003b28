"""What a decoder layer does between its matrix products; torch's operators are the reference of fused kernels."""

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from speculative.model.layers import Attend, Attention, RMSNorm, Rotary

Rotation = tuple[Tensor, Tensor]
"""What the operations that made it need to rotate the rows of a forward pass."""


class LayerOps(Protocol):
    """Sums, norms, rotations and gates of N rows. Float32 inside; rounded to the rows' dtype wherever torch rounds."""

    def add_norm(self, hidden: Tensor, update: Tensor, norm: "RMSNorm") -> tuple[Tensor, Tensor]:
        """hidden + update, and the norm of it; all [N, hidden_size]."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """[N, 2 * size] -> silu of the first half of each row times the second, [N, size]."""
        ...

    def rotation(self, rotary: "Rotary", positions: Tensor, like: Tensor) -> Rotation:
        """What `attend` needs of positions [N] int64, for rows as `like`. Once a forward, not once a layer."""
        ...

    def attend(self, heads: Tensor, attention: "Attention", rotation: Rotation, attend: "Attend", layer: int) -> Tensor:
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
        ...


class TorchLayerOps:
    """`LayerOps` of torch's operators, for any device and with gradients."""

    def add_norm(self, hidden: Tensor, update: Tensor, norm: "RMSNorm") -> tuple[Tensor, Tensor]:
        """As `LayerOps`."""
        hidden = hidden + update
        return hidden, norm(hidden)

    def gate(self, gate_up: Tensor) -> Tensor:
        """As `LayerOps`."""
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def rotation(self, rotary: "Rotary", positions: Tensor, like: Tensor) -> Rotation:
        """As `LayerOps`: what `Rotary` gives."""
        return rotary(positions, like.dtype)  # type: ignore[no-any-return]

    def attend(self, heads: Tensor, attention: "Attention", rotation: Rotation, attend: "Attend", layer: int) -> Tensor:
        """As `LayerOps`."""
        num_heads, num_kv_heads = attention.num_heads, attention.num_kv_heads
        query_key = heads[:, :-num_kv_heads]  # normalised and rotated together
        if attention.qk_norm is not None:
            query_key = attention.qk_norm(query_key)
        query_key = rotate(query_key, *rotation)
        return attend(layer, query_key[:, :num_heads], query_key[:, num_heads:], heads[:, -num_kv_heads:])


def rotate(heads: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Turn heads [N, H, head_dim] to their positions. Rolling swaps the halves; the sign is in the sine."""
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, dims=-1), signed_sin)


class FusibleLayer(nn.Module):
    """A module that leaves what lies between its matrix products to `ops`."""

    ops: LayerOps = TorchLayerOps()


def use_layer_ops(model: nn.Module, ops: LayerOps) -> None:
    """Let a whole model compute with these operations from here on."""
    for module in model.modules():
        if isinstance(module, FusibleLayer):
            module.ops = ops
