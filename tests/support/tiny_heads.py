"""Writes draft heads with random weights over tiny targets. They draft something; it means nothing."""

from pathlib import Path

import torch
from torch import Tensor, nn

from speculative.model.eagle3 import Eagle3Config, Eagle3Head
from speculative.model.loading import load_decoder
from tools.train_head.head import save_head


def randomise(head: nn.Module) -> None:
    """Matrices wide enough that drafts differ, norms of 1; always the same ones."""
    random = torch.Generator().manual_seed(0)
    for parameter in head.parameters():
        drawn = torch.randn(parameter.shape, generator=random) * 2 * parameter.shape[-1] ** -0.5
        parameter.copy_(drawn if parameter.ndim > 1 else torch.ones_like(parameter))


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
    config = Eagle3Config(decoder.config, draft_vocab_size=len(ids), target_hidden_size=decoder.config.hidden_size)
    embedding = None if own_embedding else decoder.embedding
    head = Eagle3Head(config.for_target(decoder.config), ids, embedding, dtype=dtype)
    randomise(head)
    save_head(head, folder)
    return folder
