"""Whole engines on a pretended GPU, all of whose launches compile the kernel for a real one, and end there.

What is compiled is what the product's launchers launch, with their own arguments, options and constants. Run as a
program it is told whether to compile them `ahead`, the model, the GPU's capability, drafters as JSON, and the type of
numbers; it prints how often each kernel was launched.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from speculative.compile_ahead import compile_ahead, launches_compiled
from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from tests.support.engines import run, settings
from tests.support.graph_scenes import EDITED, OTHER_WISHES, PLAIN, Alternating, add_all
from tests.support.pretended_cuda import PretendedCuda


def launch_all(folder: Path, drafter: DrafterConfig, dtype: str, capability: int) -> Counter[str]:
    """All that an engine launches: what it captures before its first request, then requests of all kinds of wishes."""
    config = settings(dtype=dtype, drafter=drafter, device="cuda")
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
        own, model, gpu = DrafterConfig(**given), Path(given_folder), int(given_capability)
        if made_ahead == "ahead":
            found += compile_ahead(model, settings(dtype=given_dtype, drafter=own), gpu)
        else:
            found += launch_all(model, own, given_dtype, gpu)
    sys.stdout.write(json.dumps(found) + "\n")
