"""EAGLE-3 heads draft: one layer over the target's own hidden states (Li et al., 2025, arXiv 2503.01840)."""

from pathlib import Path

import torch
from torch import Tensor

from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head, load_eagle3
from speculative.model.fingerprint import model_fingerprint
from speculative.model.head_checkpoint import read_held_out_rates
from speculative.scheduling.draft_length import ExpectedRates
from speculative.state.kv_cache import KVShape


class Eagle3DraftModel:
    """A head as a draft model: it reads what enters three of the target's layers, and drafts by its own LM head."""

    held_out_rates: ExpectedRates = (), ()

    def __init__(self, head: Eagle3Head, fingerprint: str) -> None:
        """Draft with a loaded head; `fingerprint` names its weights."""
        shape = head.config.shape
        self.name = f"eagle3:{fingerprint}"
        self.kv_shape = KVShape(1, shape.num_kv_heads, shape.head_dim)
        self.hidden_size = shape.hidden_size
        self.capture = head.aux_layers
        self.num_features = len(head.aux_layers) * head.config.target_hidden_size
        self.ids: Tensor | None = head.draft_ids
        self.fused = head.fused
        self.network = head
        self.fuse, self.run, self.logits = head.fuse, head, head.logits

    @classmethod
    def load(cls, folder: Path, target: Decoder, *, dtype: torch.dtype, device: torch.device) -> "Eagle3DraftModel":
        """Load a head in the public format.

        Raises:
            ConfigError: it is damaged, or was made for another target.
            UnsupportedModel: it needs what this engine does not do.
        """
        head = load_eagle3(folder, target, dtype=dtype, device=device)
        model = cls(head, model_fingerprint(folder, head.config))
        model.held_out_rates = read_held_out_rates(folder)
        return model
