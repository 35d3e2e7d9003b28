"""Weights in FP8 with a scale for each output, times rows that are quantized as they come (W8A8), on a GPU."""

from collections.abc import Mapping

import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels
from speculative.model.formats import Format, Served
from speculative.model.fp8 import E4M3, Rows, ScaledRows, quantize_rows
from speculative.model.layers import FusibleLayer, Matrix, nan_parameter


class Fp8Linear(Matrix, FusibleLayer):
    """Times rows that are quantized here if they are not yet.

    weight: [num_outputs, num_inputs] e4m3. weight_scale: [num_outputs, 1] float32.
    """

    reads_fp8 = True

    def __init__(
        self, num_inputs: int, num_outputs: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__(num_inputs, num_outputs, bias=bias, dtype=dtype, device=device)
        self.weight = nan_parameter(num_outputs, num_inputs, dtype=E4M3, device=device)
        self.weight_scale = nan_parameter(num_outputs, 1, dtype=torch.float32, device=device)
        self.dtype = dtype

    def forward(self, rows: Rows) -> Tensor:
        """[N, num_inputs] -> [N, num_outputs]."""
        numbers, scales = rows if isinstance(rows, ScaledRows) else self.ops.quantize(rows)
        return torch._scaled_mm(  # with `use_fast_accum`, a Hopper GPU would add up in 14 bits
            numbers, self.weight.t(), scales, self.weight_scale.t(), bias=self.bias, out_dtype=self.dtype
        )


class Fp8(Format):
    """Keeps the numbers of a checkpoint that holds FP8, and rounds others."""

    linear = Fp8Linear
    multiple, of_outputs = 16, True
    rounded = staticmethod(quantize_rows)

    def why_not(self, device: torch.device, dtype: str, kernels: Kernels | None) -> str:
        """Return why a device has no FP8 products. Where there is no GPU, one to come counts as able."""
        if device.type != "cuda":
            return "FP8 products need a GPU; on a CPU take quantization: w4a8, and a checkpoint not in FP8"
        if dtype != "bfloat16":
            return f"FP8 products give bfloat16, and dtype is {dtype}; take dtype: bfloat16"
        if not torch.cuda.is_available():
            return ""
        major, minor = torch.cuda.get_device_capability(device)
        if (major, minor) < (8, 9):
            name = f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}"
            return f"FP8 products need 8.9 or higher, and {name}; take quantization: auto, and a checkpoint not in FP8"
        version = torch.__version__.split("+")[0]
        # pytorch/pytorch#177651
        if (major, minor) == (8, 9) and tuple(map(int, version.split(".")[:2])) < (2, 12):
            return (
                f"on this GPU, torch {version} launches FP8 products outside of CUDA graphs; install torch 2.12 or "
                "later"
            )
        return ""

    def read(self, name: str, tensor: Tensor, others: Mapping[str, Tensor], dtype: torch.dtype) -> Served:
        """Return a matrix in FP8, by the checkpoint's numbers where it has some."""
        if tensor.dtype == E4M3:
            return ScaledRows(tensor, others[f"{name}_scale"].to(tensor.device, torch.float32))
        return super().read(name, tensor, others, dtype)


FORMAT = Fp8("fp8")
