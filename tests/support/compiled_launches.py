"""Launches that compile the kernel for a GPU and end there: no GPU is needed. torch computes what it would have.

What is compiled is what the product's launchers launch, with their own arguments, options and constants. Run as a
program, whole engines do the launching, with the drafters and in the types of numbers that the command line names.
"""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from torch import Tensor

from speculative.config import DrafterConfig, LogprobsMode
from speculative.engine import EngineCore
from speculative.gpu.filters import torch_floors
from speculative.gpu.operators import CapturedVocabularyOps, GraphOperators
from speculative.gpu.packed_attention import SendPacked
from speculative.gpu.paged_attention import AttendPaged, AttentionSizes, TorchAttend
from speculative.gpu.row_edits import torch_edit
from speculative.gpu.row_judge import RowJudge, TorchJudge
from speculative.model.attention import CacheAttention, PreparePass
from speculative.model.layers import Attend, Attention, RMSNorm, Rotary, TorchLayerOps
from speculative.verification.coupled import choose
from speculative.verification.draft_probs import mass_before
from speculative.vocabulary.ops import TorchOps
from tests.support.engines import run, settings
from tests.support.graph_scenes import EDITED, OTHER_WISHES, PLAIN, Alternating, add_all
from tests.support.packed_rows import attend_packed


class _Driver:
    """Of a GPU of which only the name is asked."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        del device
        return 0


@contextmanager
def compiled_launches(capability: int) -> Iterator[Counter[str]]:
    """Where engines on the CPU launch Triton's kernels, which are compiled for a GPU.

    Yields how often each was; those that read drafts' probabilities are counted by the kind of these, `NAME of KIND`.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from speculative.gpu.triton_vocabulary import DENSE, PART, POINT_MASS

    launches: Counter[str] = Counter()
    kinds = {POINT_MASS.value: "point masses", DENSE.value: "the vocabulary", PART.value: "a part of it"}
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        of_kind = f" of {kinds[options['Q']]}" if "Q" in options else ""
        launches[kernel.fn.__name__ + of_kind] += 1
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    driver.set_active(_Driver(capability))
    operators = _operators()
    patches = {
        "triton.runtime.jit.JITFunction.run": compile_only,
        "speculative.gpu.operators.GraphOperators.on": lambda *_: operators,
    }
    # The CPU has kernels of its own, whose layers launch nothing.
    patches["speculative.kernels.chosen.cpu_kernels"] = lambda: None
    with ExitStack() as stack:
        for name, value in patches.items():
            stack.enter_context(mock.patch(name, value))
        yield launches


def _operators() -> GraphOperators:
    """Triton's launchers, whose results torch computes."""
    from speculative.gpu.triton_attention import TritonAttend
    from speculative.gpu.triton_edits import triton_edit
    from speculative.gpu.triton_filters import triton_floors
    from speculative.gpu.triton_judge import TritonJudge
    from speculative.gpu.triton_noise import triton_choose
    from speculative.gpu.triton_places import triton_mass_before
    from speculative.gpu.triton_prompts import TritonAttendPacked

    def attend(sizes: AttentionSizes) -> AttendPaged:
        return _computed(TritonAttend(sizes), TorchAttend(sizes.block_size))

    def prepare(block_size: int, first: int) -> PreparePass:
        return SendPacked(block_size, first, _computed(TritonAttendPacked(), attend_packed))

    def judge(mode: LogprobsMode) -> RowJudge:
        return _computed(TritonJudge(mode), TorchJudge(TorchOps(), mode))

    chosen = _computed(triton_choose, lambda probs, columns, *rest: columns.copy_(choose(probs, columns, *rest)))
    floors, before = _computed(triton_floors, torch_floors), _computed(triton_mass_before, mass_before)
    return GraphOperators(
        attend=attend,
        prepare=prepare,
        layers=_LayerOps(),
        edit=_computed(triton_edit, torch_edit),
        vocabulary=CapturedVocabularyOps(floors, chosen, before),
        judge_token_wise=judge,
    )


def _computed(launch: Callable[..., Any], compute: Callable[..., Any]) -> Any:
    def both(*args: Any) -> Any:
        launch(*args)
        return compute(*args)

    return both


class _LayerOps(TorchLayerOps):
    """Of torch, beside launches of `TritonLayerOps`."""

    def __init__(self) -> None:
        from speculative.gpu.triton_layers import TritonLayerOps

        self._launched = TritonLayerOps()

    def add_norm(self, hidden: Tensor, update: Tensor, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        self._launched.add_norm(hidden, update, norm)
        return super().add_norm(hidden, update, norm)

    def gate(self, gate_up: Tensor, *, feeds_fp8: bool = False) -> Tensor:
        self._launched.gate(gate_up, feeds_fp8=feeds_fp8)
        return super().gate(gate_up)

    def rotation(self, rotary: Rotary, positions: Tensor, like: Tensor) -> Any:
        return self._launched.rotation(rotary, positions, like), super().rotation(rotary, positions, like)

    def attend(self, heads: Tensor, attention: Attention, rotation: Any, attend: Attend, layer: int) -> Tensor:
        from speculative.gpu.triton_layers import rotate_and_store

        assert isinstance(attend, CacheAttention)
        launched, computed = rotation
        rotate_and_store(heads, attention, launched, attend.slots, *attend.cache.data[layer].unbind(0))
        return super().attend(heads, attention, computed, attend, layer)


def launch_all(folder: Path, drafter: DrafterConfig, dtype: str) -> None:
    """All that an engine launches: what it captures before its first request, then requests of all kinds of wishes."""
    config = settings(dtype=dtype, drafter=drafter, cuda_graphs=True)
    engine = EngineCore.load(folder, config, make_constraint=lambda _: Alternating())
    assert engine.graphs is not None and isinstance(engine.ops, CapturedVocabularyOps)
    engine.graphs.capture_all()
    for name, params in {"plain": PLAIN, "other": OTHER_WISHES, "edited": EDITED}.items():
        add_all(engine, params, prefix=name)
    run(engine)


if __name__ == "__main__":
    _, given_folder, given_capability, given_drafters, *given_dtypes = sys.argv
    with compiled_launches(int(given_capability)) as found:
        for own in json.loads(given_drafters):
            for number_type in given_dtypes:
                launch_all(Path(given_folder), DrafterConfig(**own), number_type)
    sys.stdout.write(json.dumps(found) + "\n")
