"""The choice between our CPU kernels and torch's operators, made once for a model."""

from typing import NamedTuple

import torch

from speculative.kernels.bindings import Kernels
from speculative.kernels.library import cpu_kernels


class ChosenKernels(NamedTuple):
    """Our CPU kernels for a model and what drafts for it; None = torch's operators, or numpy's."""

    model: Kernels | None = None  # for layers, attention and the vocabulary; None off the CPU
    host: Kernels | None = None  # for random numbers, which come from the host whatever the device


def choose_kernels(device: torch.device) -> ChosenKernels:
    """Choose the kernels of a model on this device."""
    found = cpu_kernels()
    return ChosenKernels(found if device.type == "cpu" else None, found)
