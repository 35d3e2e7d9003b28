"""An actor that looks around for GPUs, from a module that Ray's workers can import.

Most of these actors only look at their environment, so nothing that takes seconds to import is imported for them.
"""

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any
from unittest import mock

import ray

if TYPE_CHECKING:
    pass

_VISIBLE = "import os; print(os.environ.get('CUDA_VISIBLE_DEVICES'))"


class GpuProbe:
    """In the place of a replica."""

    def visible(self) -> list[str | None]:
        """To this process, and to one that it starts, as vLLM does."""
        command = [sys.executable, "-c", _VISIBLE]
        child = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return [visible_gpus(self), child.removesuffix("\n")]

    def device(self, args: dict[str, Any]) -> tuple[str, str]:
        """Of the engine that a replica would load here: on a machine whose torch says that it can use a GPU, and here.

        The first is pretended, as there is none.
        """
        from serve_app.backends.torch_backend import TorchBackend
        from serve_app.config.files import parse_args
        from serve_app.deployments.engine_host import make_backend
        from speculative.assembly import resolve_device
        from speculative.errors import ConfigError

        backend = make_backend(parse_args(args), "monolith")
        assert isinstance(backend, TorchBackend)
        name = backend.config.device
        with mock.patch("torch.cuda.is_available", return_value=True):
            pretended = str(resolve_device(name))
        try:
            return pretended, str(resolve_device(name))
        except ConfigError as error:
            return pretended, str(error)

    def of_child(self, num_gpus: float) -> list[str | None]:
        """What an actor that is started from here sees."""
        actor = ray.remote(GpuProbe).options(num_cpus=0, num_gpus=num_gpus).remote()
        return ray.get(actor.visible.remote())  # type: ignore[no-any-return]


def visible_gpus(actor: object) -> str | None:
    """To the process of an actor."""
    del actor
    return os.environ.get("CUDA_VISIBLE_DEVICES")
