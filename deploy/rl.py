"""New weights straight out of a trainer: a Ray process of the same cluster hands its tensors to a running service.

    from deploy.rl import push_weights

    push_weights(model.state_dict().items(), weight_version="step-120", app_name="truespec")

Tensors keep their names in the checkpoint's format. They travel in shards of bounded size through Ray's object store,
each with its checksum; every replica of every pool gets them, or none does.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

import numpy as np
import torch
from ray.exceptions import RayTaskError
from safetensors.torch import save

from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import Outcome
from serve_app.cluster.weight_transfer import digest_of
from serve_app.deployments.controller_client import Pending, RemoteTransfers, controller_handle
from speculative.errors import TruespecError

R = TypeVar("R")

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
    controller = controller_handle(app_name)
    transfer = _reported(RemoteTransfers.begin.send(controller))
    counts = [0, 0]
    for drafter, source in enumerate((tensors, drafter_tensors)):
        for shard in shards(source):
            content, digest = np.frombuffer(shard, np.uint8), digest_of(shard)
            put = RemoteTransfers.put.send(
                controller, transfer, counts[drafter], content, digest, drafter=bool(drafter)
            )
            _reported(put)
            counts[drafter] += 1
    end = RemoteTransfers.end.send(controller, transfer, weight_version, counts[0], counts[1], mode, timeout_s)
    return _reported(end)


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


def _reported(call: Pending[R]) -> R:
    """Return what the service answered; its own errors as they are."""
    try:
        return call.result()
    except RayTaskError as error:
        if isinstance(error.cause, TruespecError):
            raise error.cause from error
        raise
