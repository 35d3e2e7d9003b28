"""Room for our own engine beside vLLM on a GPU, to replay what that has answered there."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.backends.vllm_parts.checkpoint import weight_files
from serve_app.backends.vllm_parts.settings import SHARE, ranks_of
from speculative.config import EngineConfig

_DEFAULT_SHARE = 0.92
_OF_STEPS = 0.1  # of the memory: what the steps of our engine take, and what it leaves free
_BESIDE_WEIGHTS = 1.2  # drafter and activations


@dataclass(frozen=True, slots=True)
class Needs:
    """Bytes that the two engines need on one GPU to serve anything: weights, and a cache for the longest sequence, or
    for vLLM of the size that is set."""

    ours: int
    vllms: int


def needs_of(folder: Path, config: EngineConfig, engine_args: Mapping[str, Any]) -> Needs:
    """Return what a checkpoint needs that both engines know.

    Args:
        folder: holds it.
        config: the sizes that are set.
        engine_args: vLLM's; of its ranks each has a share of the model.
    """
    from speculative.model.config import ModelConfig  # imports torch, which reading a configuration need not
    from speculative.model.tensor_files import read_header

    model, width = ModelConfig.from_folder(folder), 4 if config.dtype == "float32" else 2
    tensors = [tensor for path in weight_files(folder) for tensor in read_header(path).values()]
    weights = width * sum(math.prod(tensor["shape"]) for tensor in tensors)
    longest = config.max_model_len or model.max_position_embeddings
    a_token = width * model.kv_shape.num_values
    cache = a_token * max(longest, config.kv_cache_tokens or 0)
    vllms = (_BESIDE_WEIGHTS * weights + cache) / ranks_of(engine_args).number
    return Needs(ours=weights + a_token * longest, vllms=math.ceil(vllms))


def vllms_share(needs: Needs, device_bytes: int, given: float | None) -> float | None:
    """The share of a GPU that vLLM is to take so that our engine has room, too; None = there is none.

    Args:
        needs: of both.
        device_bytes: memory of one GPU.
        given: the share that the configuration sets; None = it sets none.
    """
    left = 1 - _OF_STEPS - needs.ours / device_bytes
    if given is not None:
        return given if given <= left else None
    share = math.floor(100 * min(left, _DEFAULT_SHARE)) / 100
    return share if share * device_bytes >= needs.vllms else None


def no_room(needs: Needs, device_bytes: int, given: float | None) -> str:
    """Explain why `vllms_share` found no room, and what would help."""
    ours = needs.ours / device_bytes + _OF_STEPS
    room = f"our own engine would need {ours:.2f} of the GPU's {device_bytes / 2**30:.0f} GiB beside vLLM"
    if given is None:
        return f"{room}, which is not left by the model in vLLM"
    return f"{room}, which vllm.engine_args.{SHARE} ({given}) does not leave: lower it, or remove it"
