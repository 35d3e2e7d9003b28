"""Logprobs that a judge does not report: of the most likely tokens, of named ones, and of logits before their edits.

A stage of a captured verification behind the judge, in steps where somebody asks for them.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.gpu.capture import copy_once
from speculative.gpu.filters import sampling_rows
from speculative.gpu.row_judge import RowFields, Verified
from speculative.gpu.staged_inputs import Array, Field
from speculative.request import MAX_LOGPROBS, MAX_SCORED_IDS, SamplingParams
from speculative.sampling.logprobs import LogprobRows, gather_logprobs, mode_matrix
from speculative.step.vocabulary_ops import VocabularyOps

_NUM_SCORED = (0, 16, 64, 256, MAX_SCORED_IDS)


class Reported(NamedTuple):
    """Logprobs that are reported of every row beside its emitted token, as they are captured: so many of the most
    likely tokens, and so many that requests name."""

    num_top: int = 0
    num_scored: int = 0

    @classmethod
    def asked_by(cls, params: Sequences[SamplingParams]) -> "Reported | None":
        """Room for the most demanding request; None where nobody asks for more than the emitted token's logprob."""
        num_top = max(one.logprobs or 0 for one in params)
        num_scored = max(len(one.logprob_token_ids) for one in params)
        if not num_top and not num_scored:
            return None
        return cls(MAX_LOGPROBS if num_top else 0, next(size for size in _NUM_SCORED if size >= num_scored))

    def fields(self, num_entries: int) -> dict[str, Field]:
        """The inputs."""
        return {"scored_ids": Field((num_entries, self.num_scored))} if self.num_scored else {}

    def fill(self, host: Mapping[str, Array], params: Sequences[SamplingParams]) -> None:
        """Name the tokens of every entry; where it names none, token 0 stands, which nobody reads."""
        if self.num_scored:
            for row, own in zip(host["scored_ids"], params, strict=False):
                row[: len(own.logprob_token_ids)] = own.logprob_token_ids

    def make(
        self,
        mode: LogprobsMode,
        ops: VocabularyOps,
        logits: tuple[Tensor, Tensor],
        rows: RowFields,
        inputs: Mapping[str, Tensor],
        verified: Verified[Tensor],
    ) -> Tensor:
        """One float64 vector, as `unpack` reads it.

        Args:
            mode: of the logprobs.
            ops: of the engine.
            logits: [R, V] of the model, and the same after a step's edits.
            rows: that were judged.
            inputs: of the verification.
            verified: what the judge found.
        """
        original, edited = logits
        survives = rows.offsets < verified.num_accepted[rows.entries]
        emitted = torch.where(survives, rows.drafts, verified.token_ids[rows.entries].to(torch.int64))
        named = self.num_scored > 0
        processed = original
        if mode == "processed_logprobs":
            processed = ops.process(edited.float(), sampling_rows(rows._asdict()))
        found = gather_logprobs(
            mode_matrix(mode, original.float(), processed),
            emitted.clamp(min=0, max=original.shape[1] - 1),  # of rows of no numbers some token of the vocabulary
            self.num_top,
            inputs["scored_ids"][rows.entries] if named else None,
        )
        return copy_once([found.values, found.ranks, found.top_ids, found.top_values, found.scored])

    def unpack(self, values: Array, num_rows: int, vocab_size: int) -> LogprobRows:
        """The logprobs of the rows that were captured."""
        num_top = min(self.num_top, vocab_size)
        ends = np.cumsum([num_rows * each for each in (1, 1, num_top, num_top)])
        own, ranks, top_ids, top_values, scored = np.split(values, ends)
        return LogprobRows(
            values=own.astype(np.float32),
            ranks=ranks.astype(np.int64),
            top_ids=top_ids.reshape(num_rows, -1).astype(np.int64),
            top_values=top_values.reshape(num_rows, -1).astype(np.float32),
            scored=scored.reshape(num_rows, -1).astype(np.float32),
        )
