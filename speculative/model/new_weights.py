"""New weights in the place of those that a GPU computes with: they are loaded on the host and copied over the old ones,
so that the device needs no memory for both, and captured graphs go on with the same parameters.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from speculative.errors import ConfigError

Networks = Mapping[str, nn.Module]
"""The models that an engine computes with: its target, and its drafter where that has weights."""

_GIB = 2**30
_CGROUP = Path("/sys/fs/cgroup")


def held_tensors(networks: Networks) -> dict[str, Tensor]:
    """Return all tensors that some models hold, by their names in them. One that several modules share has several."""
    return {
        f"{name} {path}.{attribute}": value
        for name, network in networks.items()
        for path, module in network.named_modules()
        for attribute, value in {**vars(module), **module._parameters, **module._buffers}.items()
        if isinstance(value, Tensor)
    }


def require_host_memory(networks: Networks) -> None:
    """Refuse to load other weights of these models where the host has no room for them beside what it holds.

    Pinned memory comes in powers of two, and torch keeps what was given back for the next time.

    Raises:
        ConfigError: there is too little.
    """
    parameters = [parameter for network in networks.values() for parameter in network.parameters()]
    needed = sum(1 << (parameter.nbytes - 1).bit_length() for parameter in parameters)
    pinned = torch.cuda.host_memory_stats()
    free = free_host_bytes() + pinned["allocated_bytes.current"] - pinned["active_bytes.current"]
    if needed > free:
        raise ConfigError(
            f"New weights are loaded into the host's memory before the GPU gets them: {needed / _GIB:.1f} GiB, and "
            f"{max(free, 0) / _GIB:.1f} are free; give the machine or the container more."
        )


def require_same_form(held: Networks, new: Networks) -> None:
    """Refuse weights that cannot lie where others do.

    Raises:
        ConfigError: they are of another shape, type or configuration; the message names the first difference.
    """
    ours, theirs = _form(held), _form(new)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"The new weights are of another form than those that are served: {name} is {theirs.get(name)}, not "
                f"{ours.get(name)}. On a GPU an update has the form of what the service started with; send it so, or "
                "deploy it as an application of its own."
            )


def overwrite(held: Networks, new: Networks) -> None:
    """Copy weights of the same form over those on a CUDA device, in the order of its stream, and wait until they are
    there. If it raises anything but a ConfigError, the old weights are gone and the new are not complete."""
    require_same_form(held, new)
    ours, theirs = held_tensors(held), held_tensors(new)
    once = {tensor.data_ptr(): name for name, tensor in ours.items()}  # a tied LM head is the embedding
    with torch.no_grad():
        for name in once.values():
            ours[name].copy_(theirs[name], non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(next(iter(ours.values())).device))
    copied.synchronize()


def free_host_bytes() -> int:
    """Memory that is left on this machine, or to the container that this runs in."""
    free = [1024 * _number(Path("/proc/meminfo"), "MemAvailable:")]
    limit = _CGROUP / "memory.max"
    if limit.is_file() and (text := limit.read_text(encoding="ascii").strip()).isdecimal():
        free.append(int(text) - sum(_number(_CGROUP / "memory.stat", name) for name in ("anon", "shmem")))
    return min(free)


def _number(path: Path, name: str) -> int:
    """Return what a file says of a name, in a line of its own."""
    lines = path.read_text(encoding="ascii").splitlines()
    return next(int(words[1]) for words in map(str.split, lines) if words[0] == name)


def _form(networks: Networks) -> dict[str, object]:
    """Return what has to agree, by name: settings of models, and what their tensors are."""
    settings = {name: value for key, network in networks.items() for name, value in _settings(key, network.config)}
    tensors, first = held_tensors(networks), dict[int, str]()
    shared = {name: first.setdefault(one.data_ptr(), name) for name, one in tensors.items()}
    return settings | {name: f"{list(one.shape)} {one.dtype} of {shared[name]}" for name, one in tensors.items()}


def _settings(name: str, config: Any) -> Iterator[tuple[str, object]]:
    """The fields of a configuration and of those within it, but for the ends of answers, which are the server's."""
    for field in dataclasses.fields(config):
        value, path = getattr(config, field.name), f"{name}.{field.name}"
        if dataclasses.is_dataclass(value):
            yield from _settings(path, value)
        elif field.name != "eos_token_ids":
            yield path, value
