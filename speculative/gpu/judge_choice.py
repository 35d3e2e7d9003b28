"""Which judge of rows there is for a device."""

import torch

from speculative.config import EngineConfig
from speculative.gpu.attention_choice import uses_triton
from speculative.gpu.device_ops import DeviceOps
from speculative.gpu.row_judge import RowJudge, TorchJudge


def make_judge(device: torch.device, config: EngineConfig) -> RowJudge:
    """The Triton kernels on a CUDA device where they can be compiled, else plain torch, as for block verification."""
    if config.verifier == "block":
        return TorchJudge(DeviceOps(device), config.logprobs_mode, config.drafter.max_drafts)
    if uses_triton(device):
        from speculative.gpu.triton_judge import TritonJudge

        return TritonJudge(config.logprobs_mode)
    return TorchJudge(DeviceOps(device), config.logprobs_mode)
