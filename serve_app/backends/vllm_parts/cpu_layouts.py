"""Reloading of weights into vLLM, with a comparison of what its CPU kernels multiply with, and of plain parameters.

oneDNN packs a copy of a layer's weights, in a layout that depends on the number of threads. Two faults of vLLM's CPU
build make all answers after a reload wrong, and raise no error:

- It keeps compiled products by the layers' shapes, not by layouts. Its n-gram drafter changes the number of threads
  after the first weights were packed (numba and torch share OpenMP's), so that later ones are packed otherwise and
  multiplied as if they were not.
- An LM head that is tied to the embedding is not loaded by itself, and keeps its copy of the old weights.

Quantized layers are packed by other functions, which are not compared.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from serve_app.backends.vllm_parts.checkpoint import weight_files
from speculative.model.tensor_files import TensorFiles

_NUM_ROWS = 3  # of the products that are compared
_MAX_DIFFERENCE = 0.05  # relative to the largest result; bfloat16 differs by less, another layout by more


def reload_in_same_layout(model: Any, reload: Callable[[], None]) -> None:
    """Reload a model's weights, and pack each layer's so that vLLM's CPU kernels multiply with them.

    Args:
        model: its layers have `cpu_linear` where these kernels compute them.
        reload: reads the weights into the model.

    Raises:
        RuntimeError: a layer's product is wrong with any number of threads.
    """
    packed = [layer for layer in model.modules() if hasattr(layer, "cpu_linear")]
    if not packed:
        return reload()
    from vllm.model_executor.layers import utils

    for layer in packed:  # keeps a compiled product for the layout of the present weights
        names = ("input_size_per_partition", "input_size", "embedding_dim")
        num_inputs = int(next(getattr(layer, name) for name in names if hasattr(layer, name)))
        _product(layer, layer.weight, _inputs(num_inputs, layer.weight.dtype))
    dispatch, num_threads = utils.dispatch_cpu_unquantized_gemm, torch.get_num_threads()

    def pack(layer: Any, remove_weight: bool) -> None:
        weight = layer.weight
        if weight.ndim != 2 or weight.is_meta:
            return dispatch(layer, remove_weight)  # type: ignore[no-any-return]
        for tried in dict.fromkeys((torch.get_num_threads(), *range(1, (os.cpu_count() or 1) + 1))):
            torch._C.set_num_threads(tried)  # vLLM disables torch's own function
            layer.weight = weight
            dispatch(layer, remove_weight)
            if _multiplies_rightly(layer, weight):
                return None
        name = getattr(layer, "prefix", type(layer).__name__)
        raise RuntimeError(f"vLLM's CPU kernels multiply wrongly with the new weights of {name}; restart the replica.")

    utils.dispatch_cpu_unquantized_gemm = pack
    try:
        reload()
        for layer in packed:
            if layer.weight.ndim == 2 and layer.weight.numel() and not _multiplies_rightly(layer, layer.weight):
                pack(layer, remove_weight=False)
    finally:
        torch._C.set_num_threads(num_threads)
        utils.dispatch_cpu_unquantized_gemm = dispatch
    return None


def other_than_sent(model: Any, folder: Path) -> str:
    """Name a parameter of vLLM's model that is not what the checkpoint says; "" = there is none among those that lie
    as they were sent: neither quantized, split among ranks, padded nor packed."""
    sent, merged = TensorFiles(weight_files(folder)), getattr(model, "packed_modules_mapping", {})
    for name, held in model.named_parameters():
        owner, _, part = name.rpartition(".")
        before, dot, module = owner.rpartition(".")
        names = [f"{before}{dot}{one}.{part}" for one in merged.get(module, [module])]
        if held.is_floating_point() and held.element_size() > 1 and all(one in sent for one in names):
            wanted = torch.cat([sent[one] for one in names]).to(held)
            if wanted.shape == held.shape and not torch.equal(wanted, held):
                return str(name)
    return ""


def _multiplies_rightly(layer: Any, weight: torch.Tensor) -> bool:
    """Compare a layer's product with torch's, where this is finite."""
    inputs = _inputs(weight.shape[1], weight.dtype)
    right = torch.nn.functional.linear(inputs, weight)
    finite = right.isfinite()
    difference = (_product(layer, weight, inputs) - right)[finite].abs()
    return bool((difference <= _MAX_DIFFERENCE * right[finite].abs().amax()).all()) if finite.any() else True


def _product(layer: Any, weight: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    product: torch.Tensor = layer.cpu_linear(inputs, weight, None)
    return product


def _inputs(num_inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """[_NUM_ROWS, num_inputs] numbers that are the same each time."""
    return torch.randn(_NUM_ROWS, num_inputs, generator=torch.Generator().manual_seed(0)).to(dtype)
