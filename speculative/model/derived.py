"""Tensors of a checkpoint that follow from its config.json: compared with what follows, and not used."""

from pathlib import Path

import torch
from torch import Tensor

from speculative.errors import ConfigError
from speculative.model.config import ModelConfig

_FREQUENCIES = "rotary_emb.inv_freq"
_TABLES = {"rotary_emb.cos_cached": torch.cos, "rotary_emb.sin_cached": torch.sin}
_MASKED = ".self_attn.masked_bias"  # the number that stood for "hidden"; attention here has no use for it
_TABLE_ERROR = 0.02  # of a cosine in bfloat16, at an angle of ten thousands in float32


def is_derived(path: Path, name: str, tensor: Tensor, config: ModelConfig) -> bool:
    """Return whether a checkpoint's tensor is one that the model makes itself.

    Args:
        path: the file that it is from.
        name: of the tensor.
        tensor: what the file has.
        config: of the model that it is to belong to.

    Raises:
        ConfigError: it is, and says something else than config.json.
    """
    if name.endswith(_MASKED):
        return tensor.numel() == 1
    if not name.endswith((_FREQUENCIES, *_TABLES)):
        return False
    if not _follows(name, tensor, torch.tensor(config.rope.frequencies)):
        raise ConfigError(
            f"{path}: tensor {name} is not what the rotary settings of config.json give; correct `rope_theta`, "
            "`rope_parameters` or `rope_scaling` there, or if these are right, remove the tensor, which nothing reads."
        )
    return True


def _follows(name: str, tensor: Tensor, frequencies: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    if name.endswith(_FREQUENCIES):
        if tensor.shape != frequencies.shape:
            return False
        kind = torch.finfo(tensor.dtype)
        closest = frequencies.to(tensor.dtype).double()
        return torch.allclose(tensor.double(), closest, rtol=8 * kind.eps, atol=2 * kind.smallest_normal * kind.eps)
    if tensor.shape[-1] != 2 * len(frequencies):
        return False
    function = next(function for ending, function in _TABLES.items() if name.endswith(ending))
    rows = tensor.reshape(-1, 2 * len(frequencies)).float()
    angles = torch.outer(torch.arange(len(rows), dtype=torch.float32), frequencies)
    return torch.allclose(rows, function(torch.cat((angles, angles), dim=-1)), rtol=0, atol=_TABLE_ERROR)
