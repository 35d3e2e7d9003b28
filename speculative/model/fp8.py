"""Numbers in FP8 (e4m3, at most 448), with one float32 scale a row: a number is scale * its eight bits.

So are weights, whose rows are the outputs, and what they multiply, which is quantized as it comes (W8A8).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from speculative.errors import UnsupportedModel
from speculative.model.config import ModelConfig

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LEAST_AMAX = 2.0**-100  # rows of zeros have a scale, too, whose inverse is a number
_MULTIPLE = 16  # of all sizes, for the GPU's products


class Fp8Rows(NamedTuple):
    """Rows whose largest number is the largest that FP8 has.

    numbers: [N, I] e4m3.
    scales: [N, 1] float32.
    """

    numbers: Tensor
    scales: Tensor


Rows = Tensor | Fp8Rows
"""[N, I], quantized or not."""


def quantize_rows(rows: Tensor) -> Fp8Rows:
    """Round [N, I] to the nearest; a row with NaN or an infinity has NaN."""
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=LEAST_AMAX) * (1 / LARGEST)
    return Fp8Rows((rows.float() * scales.reciprocal()).to(E4M3), scales)


def why_no_fp8(device: torch.device, dtype: str) -> str:
    """Return why a device cannot multiply FP8 weights beside others of `dtype`, and the fix; "" = it can.

    Where there is no GPU, one to come counts as able.
    """
    if device.type != "cuda":
        return "FP8 products need a GPU; on a CPU take quantization: w4a8, and a checkpoint not in FP8"
    if dtype != "bfloat16":
        return f"FP8 products give bfloat16, and dtype is {dtype}; take dtype: bfloat16"
    if not torch.cuda.is_available():
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability < (8, 9):
        name = f"{torch.cuda.get_device_name(device)} has compute capability {capability[0]}.{capability[1]}"
        return f"FP8 products need 8.9 or higher, and {name}; take quantization: auto, and a checkpoint not in FP8"
    version = torch.__version__.split("+")[0]
    if capability == (8, 9) and tuple(map(int, version.split(".")[:2])) < (2, 12):  # pytorch/pytorch#177651
        return f"on this GPU, torch {version} launches FP8 products outside of CUDA graphs; install torch 2.12 or later"
    return ""


def check_fp8_sizes(model: ModelConfig) -> None:
    """Refuse a model whose matrices the GPU's FP8 products do not take.

    Raises:
        UnsupportedModel: a size is no multiple of 16.
    """
    sizes = {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_attention_heads x head_dim": model.num_heads * model.head_dim,
        "num_key_value_heads x head_dim": model.num_kv_heads * model.head_dim,
    }
    for name, size in sizes.items():
        if size % _MULTIPLE:
            raise UnsupportedModel(
                f"quantization: fp8 needs sizes that are multiples of {_MULTIPLE}, and {name} is {size}; "
                "take quantization: auto."
            )
