"""The buffers that captured functions hand to one another: tensors that never move."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from speculative.drafting.neural_drafter import DraftModel, FeatureBuffer
from speculative.gpu.buckets import Buckets
from speculative.gpu.row_drafts import DraftBuffers
from speculative.gpu.staged_inputs import Array, Field
from speculative.model.decoder import Decoder
from speculative.state.batch import Int64s


class Unread(NamedTuple):
    """A verdict that the host has not read, about sequences whose next rows are filled as if all drafts survived.

    columns: [B] of `GraphBuffers.verdict`. judged: [B] the drafts that were verified.
    """

    columns: Int64s
    judged: Int64s

    def fill(self, host: Mapping[str, Array]) -> None:
        """Write the fields of `GraphBuffers.verdict_fields`."""
        host["verdicts"][: len(self.columns)] = self.columns
        host["judged"][: len(self.judged)] = self.judged


@dataclass(frozen=True, slots=True)
class GraphBuffers:
    """Results that a later graph of the same step reads; each step overwrites them.

    hidden: [N, hidden] of the target's rows. features: [N, F] what a hidden-state drafter reads of them.
    draft_hidden: [B, hidden] of the drafter's last verified rows: what first drafts are drawn from.
    drafts: the step's, in D rows; without a drafting model in one. Behind their tokens lie the verdict's.
    verdict: [2, B + 1] of the last verification: the drafts that survived, and the token behind them; 0 in the last
    column, which is nobody's."""

    hidden: Tensor
    features: FeatureBuffer
    draft_hidden: Tensor
    drafts: DraftBuffers
    verdict: Tensor

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
        num_seqs = buckets.largest.num_seqs
        tokens = torch.zeros(num_drafts + 2 * (num_seqs + 1), dtype=torch.int64, device=device)
        return cls(
            hidden=hidden,
            features=FeatureBuffer(hidden.new_zeros((num_rows, num_features))),
            draft_hidden=hidden.new_zeros((num_seqs, hidden_size)),
            drafts=DraftBuffers.empty(num_drafts, width, device)._replace(tokens=tokens),
            verdict=tokens[num_drafts:].view(2, -1),
        )

    def sources_of(self, columns: Int64s) -> Int64s:
        """Where the tokens of these columns of the verdict lie among those of the drafts."""
        return len(self.drafts.tokens) - self.verdict.shape[1] + columns

    def verdict_fields(self, num_seqs: int) -> dict[str, Field]:
        """The fields that `Unread.fill` fills, where the host has not read the last verdict."""
        nobody = self.verdict.shape[1] - 1
        return {"verdicts": Field((num_seqs,), padding=nobody), "judged": Field((num_seqs,))}

    def survived(self, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """[B] how many drafts of an unread verdict survived, and that less all of them; 0 where it was read."""
        survived = self.verdict[0].index_select(0, inputs["verdicts"])
        return survived, survived - inputs["judged"]
