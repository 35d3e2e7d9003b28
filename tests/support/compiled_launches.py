"""Whole engines on a pretended GPU, all of whose launches compile the kernel for a real one, and end there.

What is compiled is what the product's launchers launch, with their own arguments, options and constants. Run as a
program it is told the model, the GPU's capability, drafters as JSON, and the type of numbers; it prints how often each
kernel was launched.
"""

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.gpu.triton_vocabulary import DENSE, PART, POINT_MASS
from tests.support.engines import run, settings
from tests.support.graph_scenes import EDITED, OTHER_WISHES, PLAIN, Alternating, add_all
from tests.support.pretended_cuda import PretendedCuda


class _Driver:
    """A stand-in for the driver of a GPU, which is asked for its architecture only."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        del device
        return 0


@contextmanager
def launches_compiled(capability: int) -> Iterator[Counter[str]]:
    """Have launches of Triton's kernels compile them for a GPU, and end there.

    Yields how often each was; those that read drafts' probabilities are counted by the kind of these, `NAME of KIND`.
    """
    launches: Counter[str] = Counter()
    kinds = {POINT_MASS.value: "point masses", DENSE.value: "the vocabulary", PART.value: "a part of it"}
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        of_kind = f" of {kinds[options['Q']]}" if "Q" in options else ""
        launches[kernel.fn.__name__ + of_kind] += 1
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    driver.set_active(_Driver(capability))
    with mock.patch.object(JITFunction, "run", compile_only):
        yield launches


def launch_all(folder: Path, config: EngineConfig, capability: int) -> Counter[str]:
    """All that an engine launches: what it captures before its first request, then requests of all kinds of wishes."""
    config = dataclasses.replace(config, device="cuda")
    with launches_compiled(capability) as launches, PretendedCuda(capture_beforehand=True):
        engine = EngineCore.load(folder, config, make_constraint=lambda _: Alternating())
        for name, params in {"plain": PLAIN, "other": OTHER_WISHES, "edited": EDITED}.items():
            add_all(engine, params, prefix=name)
        run(engine)
    return launches


if __name__ == "__main__":
    _, given_folder, given_capability, given_drafters, given_dtype = sys.argv
    found: Counter[str] = Counter()
    for given in json.loads(given_drafters):
        own = settings(dtype=given_dtype, drafter=DrafterConfig(**given))
        found += launch_all(Path(given_folder), own, int(given_capability))
    sys.stdout.write(json.dumps(found) + "\n")
