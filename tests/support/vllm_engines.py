"""vLLM's engines of tiny models, as its tests start them."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from serve_app.backends.torch_backend import TorchBackend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.backends.vllm_parts.settings import SIZES, VllmSettings
from speculative.config import DrafterConfig, EngineConfig
from speculative.model.loading import load_decoder
from tests.support.backend_conformance import serving
from tools.train_head.head import initial_head, save_head

CONFIG = EngineConfig(
    dtype="float32", device="cpu", max_model_len=400, max_num_seqs=4, max_batched_tokens=64, kv_cache_tokens=4096,
    block_size=32,
)  # fmt: skip
TARGET = {"num_hidden_layers": 4, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 512}


@contextlib.asynccontextmanager
async def vllm(
    folder: Path,
    drafter: DrafterConfig | None = None,
    config: EngineConfig = CONFIG,
    ours: TorchBackend | None = None,
    **settings: Any,
) -> AsyncIterator[VllmBackend]:
    """A started engine; `ours` replays for it, and `settings` are those of `VllmSettings`."""
    config = config if drafter is None else replace(config, drafter=drafter)
    arguments = {"enforce_eager": True} | settings.pop("engine_args", {})
    own = () if ours is None else (ours,)
    async with serving(
        VllmBackend(str(folder), "tiny", VllmSettings(config, SIZES, arguments, **settings), *own)
    ) as made:
        yield made


def drafter_for(target: Path, kind: str) -> DrafterConfig:
    """N-grams; the target as its own draft model, which is right if it sees the prompt; or an untrained head."""
    if kind == "ngram":
        return DrafterConfig.of(ngram_min=1, num_draft_tokens=3)
    if kind == "draft_model":
        return DrafterConfig(kind="draft_model", model=str(target), num_draft_tokens=3)
    return DrafterConfig(kind="eagle3", model=str(write_head(target, target.parent / "head")), num_draft_tokens=3)


def write_head(target: Path, folder: Path) -> Path:
    """An EAGLE-3 head that shares the target's embedding, and has seen nothing else."""
    save_head(initial_head(load_decoder(target, dtype=torch.float32, device="cpu"), torch.arange(256)), folder)
    return folder
