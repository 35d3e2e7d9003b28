"""Weights of four bits in groups of 32, times activations of eight, on our CPU kernels. The LM head's have eight bits,
and what it reads 16.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from speculative.errors import ConfigError
from speculative.model.file_names import QUANTIZED_FILE
from speculative.model.formats import HEADS, Format
from speculative.model.quantized import Quantized, as_quantized, load_quantized, unpacked


class W4A8(Format):
    """Keeps the numbers of the checkpoint's own file where it has one, and rounds others."""

    def read(self, name: str, tensor: Tensor, others: Mapping[str, Tensor], dtype: torch.dtype) -> Quantized:
        """Return a matrix of the layers in four bits, and the LM head in eight."""
        given = unpacked(name, others) if f"{name}.numbers" in others else None
        return as_quantized(tensor.to(dtype), _bits(name), given)

    def packing(self, folder: Path, slots: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor]], Quantized]:
        """Return what packs the tensors of one layer. What is given of them leaves the memory with that.

        Raises:
            ConfigError: the plain weights beside given numbers are not those, dequantized and rounded to bfloat16.
        """
        given = load_quantized(folder)
        for name, weight in given.items():
            if name not in slots or weight.numbers.shape != slots[name].shape or not weight.is_rounded_to(slots[name]):
                raise ConfigError(
                    f"{folder / QUANTIZED_FILE}: {name} is not the weight of that name in the other files; fetch or "
                    f"convert the model again, or if the others are right, remove {QUANTIZED_FILE}."
                )
        return lambda parts: Quantized.stack(
            [as_quantized(rows, _bits(name), given.pop(name, None)) for name, rows in parts.items()]
        )


def _bits(name: str) -> int:
    return 8 if name in HEADS else 4


FORMAT = W4A8("w4a8")
