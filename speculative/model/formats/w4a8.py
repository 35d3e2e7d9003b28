"""Weights of four bits in groups of 32, times activations of eight, on our CPU kernels. The LM head's have eight bits,
and what it reads 16.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from speculative.errors import ConfigError
from speculative.model.file_names import QUANTIZED_FILE
from speculative.model.formats import HEADS, Format
from speculative.model.quantized import GROUP, Quantized, load_quantized, quantize, unpacked


class W4A8(Format):
    """Keeps the numbers of the checkpoint's own file where it has as many bits, and rounds others."""

    multiple = GROUP

    def check_given(self, folder: Path, slots: Mapping[str, Tensor]) -> None:
        """Refuse numbers whose plain weights are not those, dequantized and rounded to bfloat16."""
        for name, weight in load_quantized(folder).items():
            if name not in slots or weight.numbers.shape != slots[name].shape or not weight.is_rounded_to(slots[name]):
                raise ConfigError(
                    f"{folder / QUANTIZED_FILE}: {name} is not the weight of that name in the other files; fetch or "
                    f"convert the model again, or if the others are right, remove {QUANTIZED_FILE}."
                )

    def read(self, name: str, tensor: Tensor, others: Mapping[str, Tensor], dtype: torch.dtype) -> Quantized:
        """Return a matrix of the layers in four bits, and the LM head in eight."""
        bits = 8 if name in HEADS else 4
        given = unpacked(name, others) if f"{name}.numbers" in others else None
        return given if given is not None and given.bits == bits else quantize(tensor.to(dtype), bits)


FORMAT = W4A8("w4a8")
