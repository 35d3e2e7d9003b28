"""What computes with a format of weights, one a file: `FORMAT` of `NAME.py`, whose facts are in `weight_formats`.

A plain `Format` is read as torch has it, and our CPU kernels pack it afterwards. An `OwnFormat` has layers of its own
class, into which a checkpoint is read.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from speculative.kernels.bindings import Kernels
from speculative.model.config import ModelConfig
from speculative.model.cpu.native import Packed
from speculative.model.layers import Linear, Matrix
from speculative.model.quantized import Quantized
from speculative.weight_formats import FORMATS

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
HEADS = (LM_HEAD, EMBEDDING)
"""Names of the LM head's weight, the second where it is tied."""


class Rounded(Protocol):
    """A weight matrix [O, I] in numbers of a format."""

    def to_float(self) -> Tensor:
        """[O, I] float32, the numbers that it stands for."""
        ...

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        """Several matrices of the same inputs as one, row block after row block."""
        ...

    def parameters(self) -> dict[str, Tensor]:
        """Those of the format's layer, by name, without the bias: each has a row for each output."""
        ...


Served = Tensor | Quantized | Rounded


class Format:
    """Plain weights. name: in `FORMATS`; "" = of whatever type, and not packed."""

    linear: type[Matrix] = Linear
    """What the matrices of a model's layers are; the LM head is a `Linear` in any format."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def why_not(self, device: torch.device, dtype: str, kernels: Kernels | None) -> str:
        """Return why a device cannot multiply with it beside activations of `dtype`, and the fix; "" = it can."""
        known = FORMATS[self.name]
        others = (other for other, one in FORMATS.items() if not one.packed and device.type in one.devices)
        fix = f"take quantization: {' or '.join(('auto', *(other for other in others if other != self.name)))}"
        if known.packed:
            able = kernels is not None or self.name == dtype
            return "" if able else f"with dtype {dtype} it needs a CPU with AVX-512 or AVX2, and a C++ compiler; {fix}"
        return "" if device.type in known.devices else f"it is for {' and '.join(known.devices)} alone; {fix}"

    def check(self, model: ModelConfig) -> None:
        """Refuse a model that the products do not take, by UnsupportedModel."""

    def read(self, name: str, tensor: Tensor, others: Mapping[str, Tensor], dtype: torch.dtype) -> Served:
        """Return a matrix of the layers, or the LM head, in the numbers that are served.

        Args:
            name: in the checkpoint.
            tensor: of that name.
            others: all tensors of the checkpoint and of the format's own file.
            dtype: of plain weights.
        """
        del name, others
        return tensor.to(dtype)

    def parameters(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return a plain matrix [O, I] as the parameters of `linear`, by name."""
        return {"weight": tensor}

    def packing(self, folder: Path, slots: Mapping[str, Tensor]) -> Callable[[Mapping[str, Tensor]], Packed]:
        """Return what packs the tensors of one layer, by their names and in order, for our CPU kernels.

        Args:
            folder: the checkpoint.
            slots: its tensors, as they were read.
        """
        del folder, slots
        return lambda parts: "float32" if self.name == "float32" else "bfloat16"


class OwnFormat(Format):
    """Weights that are rounded while they are read. A subclass says what its `linear` is, and how it rounds."""

    def rounded(self, weight: Tensor) -> Rounded:
        """Round a plain matrix [O, I]."""
        raise NotImplementedError

    def read(self, name: str, tensor: Tensor, others: Mapping[str, Tensor], dtype: torch.dtype) -> Served:
        """Return a matrix of the layers rounded, and the LM head plain."""
        return super().read(name, tensor, others, dtype) if name in HEADS else self.rounded(tensor)

    def parameters(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return a plain matrix [O, I] as the parameters of `linear`, by name."""
        return self.rounded(tensor).parameters()


def format_of(name: str) -> Format:
    """Return what computes with a format of `FORMATS`; of other names a plain one, which is not packed."""
    found: Format = import_module(f"{__name__}.{name}").FORMAT if name in FORMATS else Format()
    return found
