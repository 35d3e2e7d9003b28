"""Draws the tokens of a step: logits to p, p and drafts to what is emitted, and the logprobs of it, on the device.

One copy to the host ends it.
"""

import numpy as np
import torch
from torch import Tensor

from speculative.adjustments import adjust
from speculative.batch import Drawn, Int64s, Layout, row_contexts
from speculative.config import EngineConfig
from speculative.constraint import Bools
from speculative.draft_law import DraftLaw
from speculative.logprobs import mode_matrix
from speculative.outcome import copy_to_host, drawn_per_entry, emitted_at_rows, logprobs_to_host
from speculative.rng import Float64s, Purpose, uniforms
from speculative.sampling import SamplingRows, process, target_probs
from speculative.verification.base import Verifier, VerifyInput, VerifyOutput
from speculative.verification.block import verify_block
from speculative.verification.coupled import verify_coupled
from speculative.verification.mixed import verify_mixed
from speculative.verification.synthetic import synthetic_verifier
from speculative.verification.token_wise import verify_token_wise


class TokenDrawer:
    """Turns one step's logits into tokens, by the engine's verifier and each request's own parameters."""

    def __init__(self, config: EngineConfig, device: torch.device, eos_token_ids: tuple[int, ...]) -> None:
        self._mode = config.logprobs_mode
        self._eos_token_ids = eos_token_ids
        self._device = device
        self.verify = _make_verifier(config)
        self._all_coupled = config.verifier == "coupled"

    def draw(
        self, layout: Layout, logits: Tensor, law: DraftLaw, masks: list[list[Bools] | None]
    ) -> tuple[list[Drawn], float]:
        """What each drawing entry emits, and how many drafts the verifier expected to accept.

        Args:
            layout: the step's rows.
            logits: [R, V] float32 of the verify rows; not written to.
            law: q of the step's drafts.
            masks: per drawing entry, the tokens its structure allows, row by row; None where it has none.
        """
        contexts = row_contexts(layout)
        rows = SamplingRows.build([context.sequence.params for context in contexts], logits.shape[-1], self._device)
        allowed = _masks_per_row(layout, masks)
        processed = process(adjust(logits, contexts, allowed, self._eos_token_ids), rows)  # [R, V]
        finite = torch.isfinite(processed.amax(dim=-1))  # NaN and +inf win the maximum, a row of -inf has none
        step = self._verify_input(layout, target_probs(processed, rows), law)
        verified = self._verify(layout, step)
        emitted = emitted_at_rows(verified, step)
        logprobs = logprobs_to_host(layout, lambda: mode_matrix(self._mode, logits, processed), emitted)
        verdicts = copy_to_host(verified, finite)
        return drawn_per_entry(layout, verdicts, logprobs), verdicts.expected_accepted

    def _verify(self, layout: Layout, step: VerifyInput) -> VerifyOutput:
        coupled = [self._all_coupled or entry.sequence.params.reproducible for entry in layout.drawing]
        if all(coupled):
            return verify_coupled(step)
        if not any(coupled):
            return self.verify(step)
        return verify_mixed(step, torch.tensor(coupled, device=self._device), verify_coupled, self.verify)

    def _verify_input(self, layout: Layout, probs: Tensor, law: DraftLaw) -> VerifyInput:
        sequences = [entry.sequence for entry in layout.drawing]
        seeds = np.array([sequence.request.seed for sequence in sequences], np.uint64)[layout.verify_entries]
        rounds = np.array([len(sequence.tokens) for sequence in sequences], np.int64)[layout.verify_entries]
        key = (seeds, rounds.astype(np.uint64), layout.offsets.astype(np.uint64))
        coin = np.full_like(seeds, Purpose.COIN)
        final = np.where(layout.drafts < 0, np.uint64(Purpose.BONUS), np.uint64(Purpose.RESIDUAL))
        ends = np.cumsum(layout.draft_counts + 1)
        return VerifyInput(
            probs=probs,
            law=law,
            drafts=self._on_device(layout.drafts),
            # Every drawing entry before a row took one row that judges no draft.
            packed=self._on_device(np.arange(len(layout.drafts)) - layout.verify_entries),
            entries=self._on_device(layout.verify_entries),
            offsets=self._on_device(layout.offsets),
            first_rows=self._on_device(ends - layout.draft_counts - 1),
            counts=self._on_device(layout.draft_counts),
            coins=self._on_device(uniforms(*key, coin)),
            finals=self._on_device(uniforms(*key, final)),
            seeds=self._on_device(seeds.view(np.int64)),
            positions=self._on_device(rounds + layout.offsets),
        )

    def _on_device(self, array: Int64s | Float64s) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _make_verifier(config: EngineConfig) -> Verifier:
    if config.synthetic_acceptance is not None:
        return synthetic_verifier(config.synthetic_acceptance)
    verifiers = {"token_wise": verify_token_wise, "block": verify_block, "coupled": verify_coupled}
    return verifiers[config.verifier]


def _masks_per_row(layout: Layout, masks: list[list[Bools] | None]) -> list[Bools | None]:
    """One mask per verify row. Rows behind a forbidden draft are never reached; they repeat the last mask."""
    rows: list[Bools | None] = []
    for mask, count in zip(masks, layout.draft_counts.tolist(), strict=True):
        rows += [None if mask is None else mask[min(offset, len(mask) - 1)] for offset in range(count + 1)]
    return rows
