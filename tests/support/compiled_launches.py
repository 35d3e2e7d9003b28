"""Whole engines on a pretended GPU, all of whose launches compile the kernel for a real one, and end there.

What is compiled is what the product's launchers launch, with their own arguments, options and constants. Run as a
program it is told whether to compile them `ahead`, the model, the GPU's capability, drafters as JSON, and the type of
numbers; it prints how often each kernel was launched.
"""

import dataclasses
import json
import sys
from collections import Counter
from pathlib import Path

from speculative.compile_ahead import compile_ahead, launches_compiled
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from tests.support.engines import run, settings
from tests.support.graph_scenes import EDITED, OTHER_WISHES, PLAIN, Alternating, add_all
from tests.support.pretended_cuda import PretendedCuda


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
    _, made_ahead, given_folder, given_capability, given_drafters, given_dtype = sys.argv
    found: Counter[str] = Counter()
    for given in json.loads(given_drafters):
        own = settings(dtype=given_dtype, drafter=DrafterConfig(**given))
        launch = compile_ahead if made_ahead == "ahead" else launch_all
        found += launch(Path(given_folder), own, int(given_capability))
    sys.stdout.write(json.dumps(found) + "\n")
