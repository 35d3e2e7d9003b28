"""New weights straight out of a trainer: a Ray process of the same cluster hands its tensors to a running service.

    from deploy.rl import push_weights

    push_weights(model.state_dict().items(), weight_version="step-120", app_name="truespec")

Tensors keep their names in the checkpoint's format. They travel in shards of bounded size through Ray's object store,
each with its checksum; every replica of every pool gets them, or none does.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from ray import serve
from ray.exceptions import RayTaskError
from safetensors.torch import save

from serve_app.backends.base import PauseMode
from serve_app.deployments.runtime import CONTROLLER
from serve_app.weights.desired_state import Outcome
from serve_app.weights.transfer import digest_of
from speculative.errors import TruespecError

NamedTensors = Iterable[tuple[str, torch.Tensor]]
SHARD_BYTES = 256 * 2**20


def push_weights(
    tensors: NamedTensors,
    *,
    weight_version: str,
    app_name: str,
    drafter_tensors: NamedTensors = (),
    mode: PauseMode = PauseMode.WAIT,
    timeout_s: float = 600.0,
) -> Outcome:
    """Bring new weights to every replica of a service.

    Args:
        tensors: the whole checkpoint, by its names; each is copied to the host when its turn comes.
        weight_version: what the new weights are called in every reply.
        app_name: the application in Ray Serve.
        drafter_tensors: the drafter's checkpoint, where it has changed too.
        mode: what becomes of the requests that run.
        timeout_s: for the loading, and then again for the switching.

    Raises:
        UpdateRefused: nothing has changed; the message says why.
    """
    referee = serve.get_deployment_handle(CONTROLLER, app_name).options(_by_reference=True)  # shards are large
    transfer = _reported(referee.begin_transfer.remote())
    counts = [0, 0]
    for drafter, source in enumerate((tensors, drafter_tensors)):
        for shard in shards(source):
            content = np.frombuffer(shard, np.uint8)
            _reported(referee.put_shard.remote(transfer, counts[drafter], content, digest_of(shard), bool(drafter)))
            counts[drafter] += 1
    outcome: Outcome = _reported(referee.end_transfer.remote(transfer, tuple(counts), weight_version, mode, timeout_s))
    return outcome


def shards(tensors: NamedTensors, most_bytes: int = SHARD_BYTES) -> Iterator[bytes]:
    """Safetensors files of at most `most_bytes`, or of one tensor that is larger."""
    waiting: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if waiting and size + tensor.nbytes > most_bytes:
            yield save(waiting)
            waiting, size = {}, 0
        waiting[name] = tensor.detach().cpu().contiguous().clone()  # tied weights share memory, files do not
        size += tensor.nbytes
    if waiting:
        yield save(waiting)


def _reported(call: Any) -> Any:
    """What the service answered; its own errors as they are."""
    try:
        return call.result()
    except RayTaskError as error:
        if isinstance(error.cause, TruespecError):
            raise error.cause from error
        raise
