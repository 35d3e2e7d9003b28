"""Facts about the machine that this runs on."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch

_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class Machine:
    """Processors and memory."""

    num_cpus: int  # cores, as Ray counts them
    memory_bytes: int  # of the machine, or of the container that this runs in
    gpu_bytes: tuple[int, ...] = ()  # memory of each GPU that torch can use

    @classmethod
    def here(cls) -> "Machine":
        """The one that this runs on."""
        devices = range(torch.cuda.device_count())
        gpus = tuple(torch.cuda.get_device_properties(device).total_memory for device in devices)
        installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limits = [installed]
        for path in _CGROUP_LIMITS:
            with contextlib.suppress(OSError, ValueError):  # no such file, or "max": no limit
                limits.append(int(Path(path).read_text(encoding="ascii")))
        return cls(os.cpu_count() or 1, min(limits), gpus)
