"""Whole engines on a pretended GPU, all of whose launches compile the kernel for one of Hopper's kind, and end there.

What is compiled is what the product's launchers launch, with their own arguments, options and constants. Run as a
program it is told the model and drafters as JSON; it prints how often each kernel was launched, those that read drafts'
probabilities by the kind of these: `NAME of KIND`.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
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
launch = JITFunction.run


def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    del warmup
    launches[kernel.fn.__name__ + (f" of {KINDS[options['Q']]}" if "Q" in options else "")] += 1
    return launch(kernel, *args, grid=grid, warmup=True, **options)


def launch_all(folder: Path, drafter: DrafterConfig) -> None:
    """Capture what an engine does before its first request, then answer requests of all kinds of wishes."""
    config = settings(device="cuda", dtype="bfloat16", drafter=drafter)
    with mock.patch.object(JITFunction, "run", compile_only), PretendedCuda(capture_beforehand=True):
        engine = EngineCore.load(folder, config, make_constraint=lambda _: Alternating())
        for name, params in {"plain": PLAIN, "other": OTHER_WISHES, "edited": EDITED}.items():
            add_all(engine, params, prefix=name)
        run(engine)


if __name__ == "__main__":
    _, given_folder, given_drafters = sys.argv
    hopper = GPUTarget("cuda", 90, 32)
    own_driver: Any = SimpleNamespace(
        get_current_target=lambda: hopper, get_current_device=lambda: 0, get_current_stream=lambda device=None: 0
    )
    driver.set_active(own_driver)
    for given in json.loads(given_drafters):
        launch_all(Path(given_folder), DrafterConfig.of(**given))
    sys.stdout.write(json.dumps(launches) + "\n")
