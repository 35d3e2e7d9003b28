"""Compiles the GPU kernels of a configuration's engines ahead of their start."""

import dataclasses
import os
from collections.abc import Callable

from deploy.run.models import find_model
from serve_app.config.app_config import AppConfig
from speculative.config import EngineConfig, keep_triton_kernels, why_no_triton
from speculative.errors import ConfigError


def compile_kernels(config: AppConfig, capability: int, progress: Callable[[str], None]) -> None:
    """Compile them into the cache.

    Args:
        config: of the service.
        capability: the GPUs', as in sm_90.
        progress: takes a line about each engine.

    Raises:
        ConfigError: no engine of ours is to run on a GPU, or kernels cannot be compiled or kept here.
    """
    pools = config.pools_on("cuda")
    if config.engine.kind != "torch" or not pools:
        raise ConfigError(
            "No pool runs truespec's own engine on a GPU, so there is nothing to compile; set engine.kind to torch and "
            "num_gpus of a pool to 1, or leave this out."
        )
    interpreted = os.environ.get("TRITON_INTERPRET")
    if why := "TRITON_INTERPRET has Triton interpret them; unset it" if interpreted else why_no_triton():
        raise ConfigError(f"GPU kernels cannot be compiled here: {why}.")
    from speculative.compile_ahead import compile_ahead

    kept = keep_triton_kernels()
    if kept is None:
        raise ConfigError("The cache cannot be written to; set TRUESPEC_CACHE or TRITON_CACHE_DIR to another folder.")
    folder, done = find_model(config.model.source, progress), list[EngineConfig]()
    for pool in pools:
        engine = config.engine_config(pool)
        if engine.drafter.model is not None:
            drafter = dataclasses.replace(engine.drafter, model=str(find_model(engine.drafter.model, progress)))
            engine = dataclasses.replace(engine, drafter=drafter)
        engine = dataclasses.replace(engine, num_threads=1)
        if engine not in done:
            launches = compile_ahead(folder, engine, capability)
            progress(f"{pool}: {len(launches)} kernels for sm_{capability} are in {kept}")
            done.append(engine)
