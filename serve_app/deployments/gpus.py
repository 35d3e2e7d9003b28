"""The GPUs that Ray gave to the process that asks, which are seldom all of its node's."""

from typing import Literal

import ray

ONLY_GIVEN_GPUS = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "1"}
"""In the environment of an actor, of its processes and of its own actors: none sees GPUs that it did not ask for.

Without it, Ray 2.60 shows all GPUs of a node to an actor that asked for none. With it, Ray empties
CUDA_VISIBLE_DEVICES there; an empty one in `env_vars` would also hide the GPUs that an actor of that actor asks for.
"""


def given_device() -> Literal["cpu", "cuda"]:
    """Return what `device: auto` means in an actor. A GPU that it was given is the first of those it sees."""
    return "cuda" if ray.get_runtime_context().get_accelerator_ids()["GPU"] else "cpu"
