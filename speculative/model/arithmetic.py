"""The arithmetic of an engine on its machine: its kernels, and whether its rounding depends on the batch."""

import platform
from dataclasses import dataclass
from typing import Literal

import torch

from speculative.kernels.library import find_kernels, processor_says
from speculative.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The arithmetic of one engine."""

    kernels: Literal["cpu", "triton"]  # those made for its device: our own on a CPU, Triton's on a GPU
    kernels_off: str  # why they are not used, and what to do about it; "" = they are used
    rounding: str  # why a request may round otherwise beside other requests than alone; "" = it does not
    name: str  # two engines of one name and the same weights round alike


def device_name(device: torch.device) -> str:
    """The GPU or the processor, as its maker calls it."""
    if device.type != "cpu":
        return torch.cuda.get_device_name(device)
    return processor_says("model name") or platform.processor() or platform.machine()


def arithmetic_of(decoder: Decoder) -> Arithmetic:
    """Return how an engine with this model computes, on the device that the model lies on."""
    device, torch_name = decoder.device, f"torch {torch.__version__}"
    if device.type != "cpu":
        rounding = "on a GPU, products round by the size of the batch"
        name = f"{torch_name} {device_name(device)} {decoder.dtype}"
        return Arithmetic("triton", "", rounding, name)
    found = find_kernels()
    if isinstance(found, str):
        rounding = "without the CPU kernels, products round by the size of the batch"
        name = f"{torch_name} {torch.backends.cpu.get_cpu_capability()} {decoder.dtype}"
        return Arithmetic("cpu", found, rounding, name)
    rounding = ""
    if decoder.packed is None:
        rounding = "torch's products round by the size of the batch"
    elif decoder.config.head_dim % 16 != 0:
        rounding = "torch's attention rounds by the size of the batch, and heads of this size need it"
    return Arithmetic("cpu", "", rounding, f"{found.name} {torch_name} {decoder.packed}")
