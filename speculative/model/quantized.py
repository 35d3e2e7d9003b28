"""Weights of four and eight bits in groups of 32, as GGUF's Q4_1 and Q8_0 have them: the file's own numbers.

A four-bit weight is scale * n + least with n in 0..15, an eight-bit one scale * n with n in -128..127; scale and least
are float16, one of each for 32 inputs of an output.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from speculative.errors import ConfigError, UnsupportedModel
from speculative.model.file_names import QUANTIZED_FILE
from speculative.model.tensor_files import read_tensors, require_finite

GROUP = 32  # inputs that share a scale
_COMPARED = 1 << 20  # numbers at a time
_ROWS = 4096  # quantized at a time: the float32 copies of a whole LM head would be most of what loading takes


@dataclass(frozen=True, slots=True)
class Quantized:
    """A weight matrix [O, I] of four or eight bits."""

    numbers: Tensor  # [O, I] uint8 below 16 where there is a `least`, else int8
    scales: Tensor  # [O, I / 32] float16
    least: Tensor | None  # [O, I / 32] float16, of four bits only

    @property
    def bits(self) -> int:
        """Bits of a number."""
        return 8 if self.least is None else 4

    def to_float(self) -> Tensor:
        """[O, I] float32, the weights themselves: scale and product are exact, their sum with `least` is rounded."""
        groups: Tensor = self.numbers.float().unflatten(1, (-1, GROUP)) * self.scales.float()[..., None]
        if self.least is not None:
            groups = groups + self.least.float()[..., None]
        return groups.flatten(1)

    def is_rounded_to(self, weight: Tensor) -> bool:
        """Return whether [O, I] are these weights, each rounded to bfloat16 or less."""
        step = max(1, _COMPARED // weight.shape[1])
        for start in range(0, len(weight), step):
            rows = slice(start, start + step)
            least = None if self.least is None else self.least[rows]
            exact = Quantized(self.numbers[rows], self.scales[rows], least).to_float()
            error = (weight[rows] - exact).abs_()
            sizes = exact.abs_()
            smallest = 1e-6 * sizes.max()  # of a sum that all but cancels
            if not bool((error.sub_(sizes, alpha=2**-8) <= smallest).all()):
                return False
        return True

    @classmethod
    def stack(cls, parts: Sequence["Quantized"]) -> "Quantized":
        """Several matrices of the same inputs as one, row block after row block."""
        least = [part.least for part in parts if part.least is not None]
        return cls(
            torch.cat([part.numbers for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat(least) if least else None,
        )


def quantize(weight: Tensor, bits: int) -> Quantized:
    """The nearest four- or eight-bit weights of [O, I], as llama.cpp rounds: from the least to the largest of a group,
    or evenly around 0.

    Raises:
        UnsupportedModel: a scale would be infinite.
    """
    made = Quantized.stack([_quantize(rows, bits) for rows in weight.detach().split(_ROWS)])
    if not bool(made.scales.isfinite().all()) or (made.least is not None and not bool(made.least.isfinite().all())):
        raise UnsupportedModel(
            f"A weight of {weight.abs().max():.3g} is too large for {bits} bits, whose scales are float16; take "
            "quantization: bfloat16."
        )
    return made


def _quantize(weight: Tensor, bits: int) -> Quantized:
    groups = weight.float().unflatten(1, (-1, GROUP))
    if bits == 8:
        scales = (groups.abs().amax(-1) / 127).half()
        numbers = (groups / _steps(scales)).round().clamp(-127, 127)
        return Quantized(numbers.to(torch.int8).flatten(1), scales, None)
    least = groups.amin(-1).half()
    above = (groups - least.float()[..., None]).clamp(min=0)
    scales = (above.amax(-1) / 15).half()
    numbers = (above / _steps(scales)).round().clamp(max=15)
    return Quantized(numbers.to(torch.uint8).flatten(1), scales, least)


def _steps(scales: Tensor) -> Tensor:
    """Scales to divide the groups by; 1 where all numbers of a group are 0."""
    return torch.where(scales > 0, scales.float(), 1.0)[..., None]


def save_quantized(folder: Path, weights: Mapping[str, Quantized]) -> None:
    """Write weights, by the names of their checkpoint tensors; two four-bit numbers a byte, the first one low."""
    tensors = {}
    for name, weight in weights.items():
        tensors[f"{name}.scales"] = weight.scales
        if weight.least is None:
            tensors[f"{name}.numbers"] = weight.numbers
        else:
            tensors[f"{name}.least"] = weight.least
            tensors[f"{name}.numbers"] = weight.numbers[:, ::2] | (weight.numbers[:, 1::2] << 4)
    (folder / QUANTIZED_FILE).parent.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / QUANTIZED_FILE)
    (folder / QUANTIZED_FILE).chmod(0o644)  # safetensors makes it readable by its owner only


def load_quantized(folder: Path) -> dict[str, Quantized]:
    """The weights that `save_quantized` wrote; none where there is no such file.

    Raises:
        ConfigError: the file is damaged.
    """
    path = folder / QUANTIZED_FILE
    if not path.is_file():
        return {}
    try:
        tensors = {name: tensor for _, name, tensor in read_tensors([path])}
        for name, tensor in tensors.items():
            require_finite(path, name, tensor)
        names = [name.removesuffix(".numbers") for name in tensors if name.endswith(".numbers")]
        return {name: unpacked(name, tensors) for name in names}
    except KeyError as error:
        raise ConfigError(f"{path} is damaged ({error}); fetch the model again.") from error


def unpacked(name: str, tensors: Mapping[str, Tensor]) -> Quantized:
    """One of the weights that `save_quantized` wrote, from the tensors of its file."""
    numbers, scales = tensors[f"{name}.numbers"], tensors[f"{name}.scales"]
    least = tensors.get(f"{name}.least")
    if least is not None:
        numbers = torch.stack((numbers & 15, numbers >> 4), dim=-1).flatten(1)
    return Quantized(numbers, scales, least)
