"""Reloading of weights into vLLM's CPU kernels, in the layout that these expect.

oneDNN packs the weights of a layer in a layout that depends on the number of threads. vLLM's CPU build keeps the
compiled products by the layers' shapes, and not by layouts. Its n-gram drafter changes the number of threads after the
first weights were packed (numba and torch share OpenMP's), so that weights that are read later may be packed otherwise
and multiplied as if they were not: every answer is wrong from then on, and no error is raised.
"""

import os
from collections.abc import Callable
from typing import Any

import torch

_NUM_ROWS = 3  # of the products that are compared
_MAX_DIFFERENCE = 0.05  # relative to the largest result; bfloat16 differs by less, another layout by more


def reload_in_same_layout(model: Any, reload: Callable[[], None]) -> None:
    """Reload a model's weights, with the number of threads under which its CPU kernels multiply them rightly.

    Args:
        model: whose layers have `cpu_linear` where vLLM's CPU kernels compute them.
        reload: reads the weights into the model; may run several times.

    Raises:
        RuntimeError: no number of threads gives right products.
    """
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    if not packed:
        return reload()
    from vllm.model_executor.layers import utils

    for layer in packed:  # keeps a compiled product for the layout of the present weights
        _product(layer, layer.weight, _inputs(_num_inputs(layer), layer.weight.dtype))
    dispatch, wrong = utils.dispatch_cpu_unquantized_gemm, list[str]()

    def checked_dispatch(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        dispatch(layer, remove_weight)
        if weight.ndim == 2 and not weight.is_meta and not _multiplies_rightly(layer, weight):
            wrong.append(getattr(layer, "prefix", type(layer).__name__))

    now = torch.get_num_threads()
    most = os.cpu_count() or 1
    utils.dispatch_cpu_unquantized_gemm = checked_dispatch
    try:
        for num_threads in dict.fromkeys((now, int(os.environ.get("OMP_NUM_THREADS") or now), *range(1, most + 1))):
            wrong.clear()
            torch._C.set_num_threads(num_threads)  # vLLM disables torch's own function
            reload()
            if not wrong:
                return None
    finally:
        torch._C.set_num_threads(now)
        utils.dispatch_cpu_unquantized_gemm = dispatch
    raise RuntimeError(f"vLLM's CPU kernels multiply the new weights of {wrong[0]} wrongly; restart the replica.")


def _multiplies_rightly(layer: Any, weight: torch.Tensor) -> bool:
    inputs = _inputs(weight.shape[1], weight.dtype)
    right = torch.nn.functional.linear(inputs, weight)
    difference = (_product(layer, weight, inputs) - right).abs().max()
    return bool(difference <= _MAX_DIFFERENCE * right.abs().max())


def _product(layer: Any, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = layer.cpu_linear(inputs, weight, None)
    return product


def _inputs(num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """[_NUM_ROWS, num_inputs] numbers that are the same each time."""
    return torch.randn(_NUM_ROWS, num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)


def _num_inputs(layer: Any) -> int:
    names = ("input_size_per_partition", "input_size", "embedding_dim")
    return int(next(getattr(layer, name) for name in names if hasattr(layer, name)))
