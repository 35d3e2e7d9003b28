"""The buffers that captured functions hand to one another: tensors that never move."""

from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.drafting.neural_drafter import DraftModel, FeatureBuffer
from speculative.gpu.buckets import Buckets
from speculative.gpu.row_drafts import DraftBuffers
from speculative.model.decoder import Decoder


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Results that a later graph of the same step reads; each step overwrites them.

    hidden: [N, hidden] of the target's rows. features: [N, F] what a hidden-state drafter reads of them.
    draft_hidden: [B, hidden] of the drafter's last verified rows: what first drafts are drawn from.
    drafts: the step's, in D rows; without a drafting model in one."""

    hidden: Tensor
    features: FeatureBuffer
    draft_hidden: Tensor
    drafts: DraftBuffers

    @classmethod
    def make(cls, decoder: Decoder, buckets: Buckets, draft_model: DraftModel | None) -> "GraphBuffers":
        """Room for the largest bucket."""
        device, num_rows = decoder.device, buckets.largest.num_rows
        num_drafts = buckets.largest.num_seqs * buckets.most_made if draft_model is not None else 1
        num_features, hidden_size, width = 0, 0, 1
        if draft_model is not None:
            num_features, hidden_size = draft_model.num_features, draft_model.hidden_size
            width = decoder.config.vocab_size if draft_model.ids is None else len(draft_model.ids)
        hidden = torch.zeros((num_rows, decoder.config.hidden_size), dtype=decoder.dtype, device=device)
        return cls(
            hidden=hidden,
            features=FeatureBuffer(hidden.new_zeros((num_rows, num_features))),
            draft_hidden=hidden.new_zeros((buckets.largest.num_seqs, hidden_size)),
            drafts=DraftBuffers.empty(num_drafts, width, device),
        )
