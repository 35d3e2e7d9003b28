"""The arithmetic of formats of weights, one a file: `FORMAT` of `NAME.py`, beside its facts in `weight_formats`.

Plain weights are read as torch has them, and may be packed for our CPU kernels then. A format with layers of its own
class rounds a checkpoint while it is read into them.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculative.errors import UnsupportedModel
from speculative.kernels.bindings import Kernels
from speculative.model.config import ModelConfig
from speculative.model.fp8 import ScaledRows
from speculative.model.layers import Linear, Matrix
from speculative.model.quantized import Quantized
from speculative.weight_formats import FORMATS

LM_HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
HEADS = (LM_HEAD, EMBEDDING)
"""Names of the LM head's weight, the second where it is tied."""

Served = Tensor | Quantized | ScaledRows


class Format:
    """Plain weights. name: in `FORMATS`; "" = of any type, and not packed."""

    linear: type[Matrix] = Linear
    """The class of the matrices of a model's layers; the LM head is a `Linear` in any format."""
    rounded: Callable[[Tensor], ScaledRows] | None = None
    """Rounds a plain matrix [O, I] for a `linear` of the format's own."""
    multiple, of_outputs = 1, False
    """The divisor of the inputs of all matrices, and whether it divides their outputs, too."""

    def __init__(self, name: str = "") -> None:
        self.name = name

    def why_not(self, device: torch.device, dtype: str, kernels: Kernels | None) -> str:
        """Return why a device cannot multiply with it beside activations of `dtype`, and the fix; "" = it can."""
        known = FORMATS[self.name]
        others = [name for name, one in FORMATS.items() if not one.packed and device.type in one.devices]
        fix = f"take quantization: {' or '.join(('auto', *others))}"
        if known.packed:
            able = kernels is not None or self.name == dtype
            return "" if able else f"with dtype {dtype} it needs a CPU with AVX-512 or AVX2, and a C++ compiler; {fix}"
        return "" if device.type in known.devices else f"it is for {' and '.join(known.devices)} alone; {fix}"

    def check(self, model: ModelConfig) -> None:
        """Refuse a model that the products do not take.

        Raises:
            UnsupportedModel: a size is no multiple as it has to be.
        """
        sizes = {
            "hidden_size": model.hidden_size,
            "intermediate_size": model.intermediate_size,
            "num_attention_heads x head_dim": model.num_heads * model.head_dim,
        }
        if self.of_outputs:
            sizes["num_key_value_heads x head_dim"] = model.num_kv_heads * model.head_dim
        for name, size in sizes.items():
            if size % self.multiple:
                raise UnsupportedModel(
                    f"quantization: {self.name} needs sizes that are multiples of {self.multiple}, and {name} is "
                    f"{size}; take quantization: auto."
                )

    def check_given(self, folder: Path, slots: Mapping[str, Tensor]) -> None:
        """Refuse numbers of the format's own file that are not the weights beside them, by ConfigError.

        `slots`: the tensors of the checkpoint, as they were read.
        """

    def read(self, name: str, tensor: Tensor, others: Mapping[str, Tensor], dtype: torch.dtype) -> Served:
        """Return a matrix of the layers, or the LM head, in the numbers that are served.

        Args:
            name: in the checkpoint.
            tensor: of that name.
            others: the tensors beside it, those of the format's own file with them.
            dtype: of plain weights.
        """
        del others
        return tensor.to(dtype) if self.rounded is None or name in HEADS else self.rounded(tensor)


def format_of(name: str) -> Format:
    """Return what computes with a format of `FORMATS`; "" = plain weights that are not packed."""
    if not name or FORMATS[name].plain:
        return Format(name)
    found: Format = import_module(f"{__name__}.{name}").FORMAT
    return found


def stacked(parts: list[Served]) -> Served:
    """Several tensors of one format as one, row block after row block."""
    kind: Any = type(parts[0])
    return torch.cat(parts) if issubclass(kind, Tensor) else kind.stack(parts)  # type: ignore[arg-type]
