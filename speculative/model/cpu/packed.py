"""Weights laid out once the way a CPU's kernels want them, instead of again at every product.

Which kernels: those of `speculative.kernels`, which read each weight once for all rows of a step; oneDNN's for bfloat16
weights where there are none, as without a compiler. A draft head runs on the kernels of its target.
"""

import torch
from torch import Tensor, nn

from speculative.model.cpu.native import Kind, pack_natively
from speculative.model.decoder import Decoder
from speculative.model.layers import Linear, PackedLinear
from speculative.model.quantized import GROUP, Quantized, quantize

_ROWS_HINT = 32  # rows a product the layout is chosen for: as fast as any at 1 to 16 rows, and the fastest at 512


def can_pack_for_onednn(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether oneDNN has kernels for it: bfloat16 on most CPUs, emulated or not."""
    if device.type != "cpu" or dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack_head(head: nn.Module, dtype: torch.dtype, device: torch.device, target: Decoder) -> None:
    """Replace every Linear of a loaded draft head by a packed twin, for the kernels that its target runs on. The plain
    weights go.

    Our kernels take them in four bits: rounding a drafter changes what is proposed, never the distribution of what is
    emitted. Beside float32 they stay so.
    """
    kind, kernels = target.packed, target.kernels.model
    if kind is None or kernels is None:
        if can_pack_for_onednn(dtype, device):
            pack_for_onednn(head)
        return

    def weight_of(linear: Linear) -> Quantized | Kind:
        if kind == "float32":
            return kind
        return "bfloat16" if linear.weight.shape[1] % GROUP else quantize(linear.weight, 4)

    pack_natively(head, kernels, weight_of)


def pack_for_onednn(module: nn.Module) -> None:
    """Replace every Linear by one that oneDNN multiplies."""
    for parent, name, linear in _linears(module):
        setattr(parent, name, OneDnnLinear(linear))


def _linears(module: nn.Module) -> list[tuple[nn.Module, str, Linear]]:
    return [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, Linear)
    ]


class OneDnnLinear(PackedLinear):
    """A bfloat16 Linear that oneDNN multiplies; the results are the same bits as torch's."""

    def __init__(self, linear: Linear) -> None:
        super().__init__()
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
        self.bias = linear.bias

    def forward(self, rows: Tensor) -> Tensor:
        """[N, num_inputs] -> [N, num_outputs]."""
        product: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows.to(self.weight.dtype), self.weight, self.bias, "none", [], ""
        )
        return product.to(rows.dtype)
