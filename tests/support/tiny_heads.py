"""Writes draft heads with random weights over tiny targets. They draft something; it means nothing."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Config, Eagle3Head
from speculative.model.loading import load_decoder
from tools.train_head.head import llama_layer, save_head


def random_head(target: Decoder, draft_ids: Tensor, *, embedding: Tensor | None, **changes: Any) -> Eagle3Head:
    """An EAGLE-3 head of these tokens, always the same one; with an embedding of its own where none is given."""
    shape = llama_layer(target.config)
    config = Eagle3Config(shape, len(draft_ids), target_hidden_size=shape.hidden_size, **changes)
    dtype = target.embedding.dtype
    head = Eagle3Head(config.for_target(target.config), draft_ids, embedding, dtype=dtype)
    random = torch.Generator().manual_seed(0)
    for parameter in head.parameters():  # matrices wide enough that drafts differ, and norms of 1
        drawn = torch.randn(parameter.shape, generator=random) * 2 * parameter.shape[-1] ** -0.5
        parameter.copy_(drawn if parameter.ndim > 1 else torch.ones_like(parameter))
    return head


def write_tiny_head(
    folder: Path,
    target: Path,
    *,
    draft_ids: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
    own_embedding: bool = False,
) -> Path:
    """Write an EAGLE-3 head with a vocabulary of its own (24 tokens where none is given); returns the folder."""
    decoder = load_decoder(target, dtype=dtype, device="cpu")
    ids = torch.arange(3, 27) if draft_ids is None else draft_ids
    save_head(random_head(decoder, ids, embedding=None if own_embedding else decoder.embedding), folder)
    return folder
