"""A loaded model's modules on our own CPU kernels: float32 rows, weights of any form, each row computed on its own."""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from speculative.kernels.bindings import Kernels, LayerStruct, LinearStruct
from speculative.kernels.freed_memory import give_back_freed_memory
from speculative.model.attention import StepAttention
from speculative.model.fp8 import Rows
from speculative.model.layers import MLP, Attend, Attention, HeadNorm, Linear, RMSNorm, WideNorm
from speculative.model.quantized import GROUP, Quantized
from speculative.state.huge_pages import HugePages

_PANEL = 32  # outputs
_KINDS = {"float32": 0, "bfloat16": 1}
_QUANTIZED_KINDS = {4: 2, 8: 3}  # by the bits of the weights; activations get 8 and 16

Kind = Literal["float32", "bfloat16"]
"""Types of plain weights; bfloat16 rounds what it multiplies them with to bfloat16."""
Packed = Quantized | Kind
"""The weights of a layer as they are packed: in integers, or its own in one of these types."""


def pack_natively(
    module: nn.Module, kernels: Kernels, weight_of: Callable[[Linear], Packed], *, whole: bool = True
) -> None:
    """Replace the layers of a model by those of our kernels.

    Activations are float32 from here on, and so are the weights of norms. The plain weights go (a tied embedding
    stays), each as soon as its layer is packed.

    Args:
        module: the model.
        kernels: that compute it from here on.
        weight_of: a layer's weights in integers, or the form they get; called once for each layer.
        whole: attention and MLPs, too, which have to be of Llama's shape; else only their products.
    """
    pages = HugePages()
    parents = [part for part in module.modules() if not isinstance(part, Linear)]
    for parent in parents:
        for name, child in list(parent.named_children()):
            if isinstance(child, Linear):
                setattr(parent, name, NativeLinear(child, kernels, weight_of(child), pages))
            elif isinstance(child, RMSNorm):
                setattr(parent, name, NativeNorm(child, kernels))
            elif isinstance(child, HeadNorm | WideNorm):
                child.weight = nn.Parameter(child.weight.detach().float(), requires_grad=False)
    for parent in list(module.modules()) if whole else []:
        for name, child in list(parent.named_children()):
            if isinstance(child, Attention):
                setattr(parent, name, NativeAttention(child))
            elif isinstance(child, MLP):
                setattr(parent, name, NativeMLP(child, kernels))
    give_back_freed_memory()


class NativeLinear(nn.Module):
    """A Linear of our own kernels: float32 rows, weights of any kind, each row computed on its own."""

    def __init__(self, linear: Linear, kernels: Kernels, weight: Packed, pages: HugePages | None = None) -> None:
        super().__init__()
        self.num_outputs, self.num_inputs = linear.weight.shape
        self.plain: Kind = "float32"
        if isinstance(weight, Quantized):
            kind, panels = _QUANTIZED_KINDS[weight.bits], panels_of(weight)
        else:
            self.plain = weight
            kind, panels = _KINDS[weight], panels_of(linear.weight.detach(), weight)
        self.panels = (pages or HugePages()).keep(panels)
        self.bias = None if linear.bias is None else linear.bias.detach().float()
        self.kernels = kernels
        self.struct = LinearStruct(
            weight=self.panels.data_ptr(),
            bias=None if self.bias is None else self.bias.data_ptr(),
            num_inputs=self.num_inputs,
            num_outputs=self.num_outputs,
            kind=kind,
        )

    def forward(self, rows: Tensor) -> Tensor:
        """[N, num_inputs] -> [N, num_outputs] float32."""
        rows = rows.float()
        return self.kernels.linear(self.struct, rows if rows.stride(-1) == 1 else rows.contiguous())

    def after_norm(self, rows: Tensor, norm: "NativeNorm") -> Tensor:
        """Rows [N, num_inputs] float32, each of them contiguous and first normed -> [N, num_outputs] float32."""
        return self.kernels.linear(self.struct, rows, (norm.weight, norm.eps))


class NativeNorm(nn.Module):
    """An RMSNorm of our own kernels."""

    def __init__(self, norm: RMSNorm, kernels: Kernels) -> None:
        super().__init__()
        self.weight = norm.multipliers.detach().contiguous()
        self.eps = norm.eps
        self._kernels = kernels

    def forward(self, rows: Tensor) -> Tensor:
        """[N, size] -> [N, size] float32."""
        rows = rows.float()
        return self._kernels.norm(rows if rows.stride(-1) == 1 else rows.contiguous(), self.weight, self.eps)


class NativeAttention(Attention):
    """Projections, rotation and attention in one call, over the paged cache; over anything else as torch does it."""

    def __init__(self, attention: Attention) -> None:
        nn.Module.__init__(self)
        self.num_heads, self.num_kv_heads, self.head_dim = (
            attention.num_heads,
            attention.num_kv_heads,
            attention.head_dim,
        )
        self.sizes, self.qkv_proj, self.o_proj = attention.sizes, attention.qkv_proj, attention.o_proj
        self.qk_norm, self.scores, self.rotated = attention.qk_norm, attention.scores, attention.rotated
        self.struct = LayerStruct(
            head_norm=None if self.qk_norm is None else self.qk_norm.weight.data_ptr(),
            qkv=self.qkv_proj.struct,
            output=self.o_proj.struct,
            scores=self.scores.numbers,
        )

    def forward(self, rows: Rows, rotary: tuple[Tensor, Tensor], attend: Attend, layer: int) -> Tensor:
        """[N, input_size] -> [N, hidden_size] float32."""
        assert isinstance(rows, Tensor), "a CPU has no FP8 weights"
        step = attend.native if isinstance(attend, StepAttention) else None
        if step is None:
            return super().forward(rows, rotary, attend, layer)
        shape = step.shape
        shape.num_heads, shape.hidden_size = self.num_heads, self.o_proj.num_outputs
        shape.eps = 0.0 if self.qk_norm is None else self.qk_norm.eps
        rows = rows if rows.stride(-1) == 1 else rows.contiguous()
        return step.kernels.attention(self.struct, layer, rows, rotary, (shape, step.struct, step.cache))


class NativeMLP(nn.Module):
    """SwiGLU in one call."""

    def __init__(self, mlp: MLP, kernels: Kernels) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = mlp.gate_up_proj, mlp.down_proj
        self.struct = LayerStruct(gate_up=self.gate_up_proj.struct, down=self.down_proj.struct)
        self._kernels = kernels

    def forward(self, rows: Tensor) -> Tensor:
        """[N, hidden_size] -> [N, hidden_size] float32."""
        return self._kernels.mlp(self.struct, rows if rows.stride(-1) == 1 else rows.contiguous())


def panels_of(weight: Tensor | Quantized, kind: Kind = "float32") -> Tensor:
    """A weight [O, I] as the kernels read it; `kind`: of plain numbers.

    Float32 is [P, I, 32], outputs side by side, and bfloat16 [P, I / 2, 32, 2], pairs of inputs, the last with 0 if I
    is odd. Of integers it is [P, I / 32, bytes] uint8: the numbers of 32 outputs and 32 inputs, their scales, and their
    least weights.
    """
    if isinstance(weight, Quantized):
        is_int4 = weight.least is not None
        numbers = _panels(weight.numbers)  # [P, 32, I]
        num_panels, num_groups = len(numbers), numbers.shape[2] // GROUP
        if is_int4:  # 64 bytes hold 8 inputs of 16 outputs: four in the low halves, four in the high ones
            halves = numbers.reshape(num_panels, 32, num_groups, 4, 2, 4).permute(0, 2, 3, 1, 4, 5)
            ordered = halves[..., 0, :] | (halves[..., 1, :] << 4)
        else:  # 4 inputs of every output, off by 128 so that none is below 0
            above = (numbers.short() + 128).to(torch.uint8)
            ordered = above.reshape(num_panels, 32, num_groups, 8, 4).permute(0, 2, 3, 1, 4)
        parts = [ordered.reshape(num_panels, num_groups, -1)]
        for factors in (weight.scales, weight.least):
            if factors is not None:
                parts.append(_panels(factors).transpose(1, 2).contiguous().view(torch.uint8))
        return torch.cat(parts, dim=-1)
    if kind == "float32":
        return _panels(weight.float()).transpose(1, 2).contiguous()
    paired = functional.pad(weight.bfloat16(), (0, weight.shape[1] % 2))
    pairs: Tensor = _panels(paired.view(torch.int32))  # [P, 32, I / 2]
    return pairs.transpose(1, 2).contiguous()


def _panels(rows: Tensor) -> Tensor:
    """Rows up to whole panels, [P, 32, ...]."""
    missing = -len(rows) % _PANEL
    whole = torch.cat((rows, rows.new_zeros((missing, *rows.shape[1:])))) if missing else rows
    panels: Tensor = whole.view(-1, _PANEL, *rows.shape[1:])
    return panels
