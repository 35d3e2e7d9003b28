"""Whole engines on a pretended GPU, all of whose launches compile the kernel for GPUs of several kinds, and end there.

What is compiled is what the product's launchers launch, with their own arguments, options and constants. Run as a
program it takes as JSON the engines, each by its model's folder, its settings and the compute capabilities, and options
of kernels to put in the place of the product's. It prints how often each kernel was launched, those that read
drafts' probabilities by the kind of these: `NAME of KIND`; and by kernel and compute capability, `NAME 90`, the most
bytes of shared memory, registers and spilled bytes.
"""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.gpu.triton_vocabulary import DENSE, PART, POINT_MASS
from tests.support.engines import run, settings
from tests.support.graph_scenes import EDITED, OTHER_WISHES, PLAIN, Alternating, add_all
from tests.support.pretended_cuda import PretendedCuda

KINDS = {POINT_MASS.value: "point masses", DENSE.value: "the vocabulary", PART.value: "a part of it"}
launches: Counter[str] = Counter()
sizes: dict[tuple[str, int], list[int]] = {}
launch = JITFunction.run


class Driver:
    """Triton's, with a device for each compute capability, by that number."""

    device = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.device, 32)

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int | None = None) -> int:
        del device
        return 0


def launch_all(folder: str, drafter: dict[str, Any], changes: dict[str, Any]) -> None:
    """Capture what an engine does before its first request, then answer requests of all kinds of wishes."""
    config = settings(device="cuda", dtype="bfloat16", drafter=DrafterConfig.of(**drafter), **changes)
    with PretendedCuda(capture_beforehand=True):
        engine = EngineCore.load(Path(folder), config, make_constraint=lambda _: Alternating())
        for name, params in {"plain": PLAIN, "other": OTHER_WISHES, "edited": EDITED}.items():
            add_all(engine, params, prefix=name)
        run(engine)


def compiler(capabilities: list[int], faults: dict[str, dict[str, int]]) -> Callable[..., None]:
    """Stands in for a launch: compiles for GPUs of these capabilities, and keeps the largest sizes."""
    own_driver: Any = Driver()
    driver.set_active(own_driver)

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        del warmup
        name = kernel.fn.__name__
        launches[name + (f" of {KINDS[options['Q']]}" if "Q" in options else "")] += 1
        for own_driver.device in capabilities:
            with redirect_stdout(StringIO()) as log:
                made = launch(kernel, *args, grid=grid, warmup=True, **options | faults.get(name, {}))
            if found := log.getvalue():
                patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores")
                used = [int(re.findall(pattern, found)[-1]) for pattern in patterns]
                own, before = (made.metadata.shared, *used), sizes.get((name, own_driver.device), [0] * 3)
                sizes[name, own_driver.device] = [*map(max, own, before)]

    return compile_only


def main() -> None:
    """Read the arguments, compile, and print."""
    engines, faults = map(json.loads, sys.argv[1:])
    for folder, drafter, changes, capabilities in engines:
        with mock.patch.object(JITFunction, "run", compiler(capabilities, faults)):
            launch_all(folder, drafter, changes)
    found = [launches, {f"{name} {capability}": own for (name, capability), own in sizes.items()}]
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
