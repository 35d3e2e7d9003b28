"""Which judge of rows there is for a device."""

import torch

from speculative.gpu.attention_choice import why_no_triton
from speculative.gpu.row_judge import RowJudge, TorchJudge
from speculative.vocabulary.ops import TorchOps


def make_judge(device: torch.device) -> RowJudge:
    """The Triton kernels on a CUDA device where they can be compiled, else plain torch."""
    if device.type == "cuda" and not why_no_triton():
        from speculative.gpu.triton_judge import TritonJudge

        return TritonJudge()
    return TorchJudge(TorchOps())
