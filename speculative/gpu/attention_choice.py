"""Which paged attention and which layer operations there are for a device."""

import functools
import importlib.util
import shutil

import torch

from speculative.config import c_compiler
from speculative.gpu.packed_attention import SendPacked
from speculative.gpu.paged_attention import AttendPaged, AttentionSizes, TorchAttend
from speculative.model.attention import PreparePass, prepare_pass
from speculative.model.layers import LayerOps, TorchLayerOps


@functools.cache
def why_no_triton() -> str:
    """Why Triton's kernels cannot be used here, and what to do about it; "" = they can."""
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; install it (pip install triton)"
    if not (c_compiler() or shutil.which("gcc") or shutil.which("clang")):  # as Triton looks for it
        return "Triton finds no C compiler to compile its launchers with; install gcc, or set CC"
    return ""


def uses_triton(device: torch.device) -> bool:
    """Whether Triton's kernels run on a device."""
    return device.type == "cuda" and not why_no_triton()


def make_attend(sizes: AttentionSizes, device: torch.device) -> AttendPaged:
    """The Triton kernels on a CUDA device where they can be compiled, else plain torch."""
    if uses_triton(device):
        from speculative.gpu.triton_attention import TritonAttend

        return TritonAttend(sizes)
    return TorchAttend(sizes.block_size)


def make_prepare(block_size: int, first: int, device: torch.device) -> PreparePass:
    """As `make_attend`, for passes that run eagerly. first: the position of a context's first slot."""
    if uses_triton(device):
        from speculative.gpu.triton_prompts import TritonAttendPacked

        return SendPacked(block_size, first, TritonAttendPacked())
    return prepare_pass


def make_layer_ops(device: torch.device) -> LayerOps:
    """As `make_attend`."""
    if uses_triton(device):
        from speculative.gpu.triton_layers import TritonLayerOps

        return TritonLayerOps()
    return TorchLayerOps()
