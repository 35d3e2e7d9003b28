"""Compiles Triton's kernels before an engine starts, and without a GPU.

An engine is built on torch's meta device, whose tensors have shapes and no numbers, and all that it captures is called
once. Its launchers launch with their own arguments, options and constants; each launch compiles the kernel for a GPU
and ends there.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from speculative.config import EngineConfig
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.engine import EngineCore
from speculative.gpu.logit_edits import EditSizes
from speculative.gpu.verify_graph import Extras
from speculative.model.config import ModelConfig
from speculative.state.batch import AttentionRows
from speculative.weights import Weights, load_weights

META = torch.device("meta")


def compile_ahead(folder: Path, config: EngineConfig, capability: int) -> Counter[str]:
    """Compile what an engine launches, into the cache that Triton uses here.

    Args:
        folder: the target's checkpoint; `config` names the drafter's.
        config: of the engine.
        capability: the GPU's, as in sm_90.

    Returns:
        How often each kernel was launched.

    Raises:
        ConfigError: the settings do not fit the model.
    """
    model = ModelConfig.from_folder(folder)
    tokens = config.kv_cache_tokens or -(-model.max_position_embeddings // config.block_size) * config.block_size
    config = dataclasses.replace(config, cuda_graphs=True, kv_cache_tokens=tokens)
    weights = load_weights(folder, config, META)
    with launches_compiled(capability) as launches, torch.inference_mode():
        engine = EngineCore(weights.decoder, model, config, draft_model=weights.draft_model)
        graphs = engine.graphs
        assert graphs is not None
        graphs.capture_all()
        for bucket in (graphs.buckets.largest, min(graphs.buckets)):
            graphs.judge.prepare(bucket, Extras(edits=EditSizes()))
        _run_prompt(engine, weights)
    return launches


def _run_prompt(engine: EngineCore, weights: Weights) -> None:
    """Run a block's tokens through the target and the model that drafts."""
    assert engine.operators is not None
    size, decoder, drafter = engine.config.block_size, weights.decoder, engine.drafter
    rows = AttentionRows(np.arange(size), np.array([0, size]), (np.arange(size),))
    zeros = np.zeros(size, np.int64)
    attention, (ids, positions) = engine.operators.prepare(size, 0)(engine.cache, rows, zeros, zeros)
    _, features = decoder.run(ids, positions, attention, drafter.capture)
    if isinstance(drafter, ModelDrafter):
        attention, (ids, positions) = drafter.prepare(drafter.cache, rows, zeros, zeros)
        given = drafter.model.fuse(features) if drafter.capture else features
        drafter.model.run(ids, given, positions, attention)


@contextmanager
def launches_compiled(capability: int) -> Iterator[Counter[str]]:
    """Have launches of Triton's kernels compile them for a GPU, and end there.

    Yields how often each was; those that read drafts' probabilities are counted by the kind of these, `NAME of KIND`.
    """
    from speculative.gpu.triton_vocabulary import DENSE, PART, POINT_MASS

    launches: Counter[str] = Counter()
    kinds = {POINT_MASS.value: "point masses", DENSE.value: "the vocabulary", PART.value: "a part of it"}
    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        del warmup
        of_kind = f" of {kinds[options['Q']]}" if "Q" in options else ""
        launches[kernel.fn.__name__ + of_kind] += 1
        return launch(kernel, *args, grid=grid, warmup=True, **options)

    here = driver._active  # None: it is looked for at the first launch, and there is none where there is no GPU
    driver.set_active(_Driver(capability))
    try:
        with mock.patch.object(JITFunction, "run", compile_only):
            yield launches
    finally:
        driver._active = here


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
