"""Captures a function over static tensors, to be replayed as one launch."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from speculative.gpu.staged_inputs import StagedInputs

Outputs = TypeVar("Outputs")

_WARM_UPS = 2  # kernels are compiled, and libraries set up, before anything is recorded


@dataclass(frozen=True, slots=True)
class Captured(Generic[Outputs]):
    """A captured function and its inputs."""

    inputs: StagedInputs
    replay: Callable[[], Outputs]


class Capturer:
    """Captures functions that take nothing, read and write static tensors, and return tensors.

    On a CUDA device each becomes a CUDA graph; all share one memory pool, so they are to be replayed one after another,
    on one stream. Elsewhere a replay calls the function: the same code on the same buffers. A capture calls it there,
    too: what a warm-up on a GPU would fail of fails on a CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_captured = 0
        self._pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None

    def capture(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """A replay of the function; what it returns is overwritten by the next one.

        The function is called a few times here, on what its buffers hold: let it be padding.
        """
        self.num_captured += 1
        if self._pool is None:
            function()
            return function
        with torch.cuda.device(self.device):
            side = side_stream(torch.cuda.current_device())
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(_WARM_UPS):
                    function()
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # Other threads of the process may use CUDA meanwhile; only this one's mistakes end the capture.
            with torch.cuda.graph(graph, pool=self._pool, stream=side, capture_error_mode="thread_local"):
                outputs = function()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


@functools.cache
def side_stream(device: int) -> torch.cuda.Stream:
    """The stream of all warm-ups and captures: cuBLAS keeps a workspace of megabytes for every stream that it saw."""
    return torch.cuda.Stream(device)


def copy_once(parts: list[Tensor]) -> Tensor:
    """Everything the host wants, as one float64 vector: whole numbers below 2**53 stay exact."""
    return torch.cat([part.reshape(-1).to(torch.float64) for part in parts])
