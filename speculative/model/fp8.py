"""Numbers in FP8 (e4m3, at most 448), with one float32 scale a row: a number is scale * its eight bits.

So are weights, whose rows are the outputs, and what they multiply, which is quantized as it comes (W8A8).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
LEAST_AMAX = 2.0**-100  # rows of zeros have a scale, too, whose inverse is a number


class ScaledRows(NamedTuple):
    """Rows whose largest number is the largest that FP8 has."""

    numbers: Tensor  # [N, I] e4m3
    scales: Tensor  # [N, 1] float32

    def to_float(self) -> Tensor:
        """[N, I] float32."""
        return self.numbers.float() * self.scales

    @classmethod
    def stack(cls, parts: Sequence["ScaledRows"]) -> "ScaledRows":
        """Several matrices of the same inputs as one, row block after row block."""
        numbers, scales = zip(*parts, strict=True)
        return cls(torch.cat(numbers), torch.cat(scales))

    def parameters(self) -> dict[str, Tensor]:
        """Those of an `Fp8Linear`, without its bias."""
        return {"weight": self.numbers, "weight_scale": self.scales}


Rows = Tensor | ScaledRows
"""[N, I], quantized or not."""


def quantize_rows(rows: Tensor) -> ScaledRows:
    """Round [N, I] to the nearest; a row with NaN or an infinity has NaN."""
    scales = rows.abs().amax(-1, keepdim=True).float().clamp(min=LEAST_AMAX) * (1 / LARGEST)
    return ScaledRows((rows.float() * scales.reciprocal()).to(E4M3), scales)
