"""Which paged attention there is for a device."""

import importlib.util

import torch

from speculative.model.paged_attention import AttendPaged, AttentionSizes, TorchAttend


def make_attend(sizes: AttentionSizes, device: torch.device) -> AttendPaged:
    """The Triton kernels on a CUDA device that has Triton, else plain torch."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from speculative.model.triton_attention import TritonAttend

        return TritonAttend(sizes)
    return TorchAttend(sizes.block_size)
