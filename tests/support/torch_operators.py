"""The operators of captured steps by torch's: what Triton's kernels are compared with, and what computes in captured
steps that a test runs on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from unittest import mock

import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.gpu.capture import copy_once
from speculative.gpu.filters import sampling_rows
from speculative.gpu.operators import CapturedVocabularyOps, GraphOperators
from speculative.gpu.packed_attention import PackedRows
from speculative.gpu.paged_attention import PagedRows
from speculative.gpu.row_drafts import DraftBuffers, DraftFields
from speculative.gpu.row_edits import EditFields
from speculative.gpu.row_judge import Layout, RowFields, SampledFrom, Verified
from speculative.kernels.chosen import ChosenKernels
from speculative.model.attention import prepare_by
from speculative.model.config import PLAIN, ScoreRule
from speculative.model.layers import LayerOps
from speculative.sampling.coupled import NoiseRows, accept_choice
from speculative.sampling.draft_probs import DraftProbs, Drawn, PointMass, mass_before
from speculative.sampling.logprobs import gather_logprobs, mode_matrix
from speculative.sampling.verification import VerifyInput, VerifyOutput
from speculative.selfcheck.invariants import outside_filters
from speculative.selfcheck.terms import TermScope
from speculative.step.vocabulary_ops import VocabularyOps


@contextmanager
def captured_on_a_cpu() -> Iterator[None]:
    """Have engines that are built meanwhile compute captured steps on a CPU, where a replay calls what a GPU would have
    captured."""
    with mock.patch.object(GraphOperators, "on", lambda device, kernels: torch_operators(kernels)):
        yield


def torch_operators(kernels: ChosenKernels) -> GraphOperators:
    """Those for engines whose eager passes and host have these kernels."""
    vocabulary = CapturedVocabularyOps(torch_floors, kernels.host)
    return GraphOperators(
        attend=lambda sizes: TorchAttend(sizes.block_size), attend_packed=attend_packed,
        prepare=lambda block_size, first: prepare_by(kernels.model), layers=LayerOps(), edit=torch_edit,
        vocabulary=vocabulary, sample_drafts=TorchDrafts(vocabulary), judge=lambda mode: TorchJudge(vocabulary, mode),
    )  # fmt: skip


@dataclass(frozen=True)
class TorchAttend:
    """Paged attention in plain torch: every sequence's whole block table is gathered."""

    block_size: int

    def __call__(self, query: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, rule: ScoreRule = PLAIN) -> Tensor:
        """Implement `AttendPaged`; computed in float32 whatever the types. Packed rows are sequences of their own."""
        if rows.starts is not None:
            every = torch.arange(len(rows.visible), dtype=rows.starts.dtype, device=query.device)
            owners = torch.searchsorted(rows.starts[2:], every, right=True).clamp(max=len(rows.blocks) - 1)
            rows = PagedRows(rows.slots, rows.visible, rows.blocks[owners], rows.first)
        query, behind = query.split([len(rows.visible), len(query) - len(rows.visible)])
        num_seqs, num_kv_heads = rows.blocks.shape[0], keys.shape[1]
        offsets = torch.arange(self.block_size, device=query.device)
        slots = (rows.blocks[:, :, None] * self.block_size + offsets).flatten()  # [B * L]
        own_keys, own_values = (
            part.index_select(0, slots).float().unflatten(0, (num_seqs, -1)) for part in (keys, values)
        )  # [B, L, num_kv_heads, head_dim]
        queries = query.float().view(num_seqs, rows.num_queries, num_kv_heads, -1, query.shape[-1])
        positions = torch.arange(own_keys.shape[1], device=query.device)
        visible = rows.visible.view(num_seqs, -1)
        seen = (positions >= rows.first) & (positions < visible[..., None])  # [B, Q, L]
        if rule.window:
            seen &= visible[..., None] - positions <= rule.window
        # What nobody sees may be anything, and 0 x NaN is NaN.
        own_values = own_values.masked_fill(~seen.any(dim=1)[:, :, None, None], 0.0)
        scores = _scores(torch.einsum("bqhgd,blhd->bqhgl", queries, own_keys), query.shape[-1], rule)
        scores = scores.masked_fill(~seen[:, :, None, None], -torch.inf)
        weights = torch.softmax(scores, dim=-1).masked_fill(~seen.any(dim=-1)[:, :, None, None, None], 0.0)
        attended = torch.einsum("bqhgl,blhd->bqhgd", weights, own_values)
        return torch.cat([attended.reshape(query.shape).to(query.dtype), torch.full_like(behind, torch.nan)])


def _scores(products: Tensor, head_dim: int, rule: ScoreRule) -> Tensor:
    scores = products * (rule.scale or head_dim**-0.5)
    return torch.tanh(scores / rule.cap) * rule.cap if rule.cap else scores


def attend_packed(query: Tensor, keys: Tensor, values: Tensor, rows: PackedRows, rule: ScoreRule = PLAIN) -> Tensor:
    """Implement `AttendPacked` in float64, sequence after sequence."""
    out = torch.full_like(query, torch.nan) if rows.out is None else rows.out
    num_kv_heads, head_dim = keys.shape[1:]
    for first_row, num_rows, begin, table in rows.spans.tolist():
        if num_rows == 0:
            continue
        seen_before = (rule.window or begin + num_rows) - 1
        positions = torch.arange(max(rows.first, begin - seen_before), begin + num_rows)
        blocks = rows.blocks[table + positions // rows.block_size].long()
        slots = blocks * rows.block_size + positions % rows.block_size
        own = slice(first_row, first_row + num_rows)
        queries = query[own].double().view(num_rows, num_kv_heads, -1, head_dim)
        scores = _scores(torch.einsum("nhgd,lhd->nhgl", queries, keys[slots].double()), head_dim, rule)
        behind = positions - begin - torch.arange(num_rows)[:, None]  # [N, L] the row
        hidden = (behind > 0) | (behind < -seen_before)
        weights = torch.softmax(scores.masked_fill(hidden[:, None, None], -torch.inf), dim=-1)
        attended = torch.einsum("nhgl,lhd->nhgd", weights, values[slots].double())
        out[own] = attended.flatten(1, 2).to(query.dtype)
    return out


def torch_floors(logits: Tensor, temperature: Tensor, log_min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """`FindFloors` by sorting."""
    best = (logits.float() / temperature).sort(dim=-1, descending=True).values
    floor = best[:, 0] + log_min_p
    floor = torch.where(top_k < logits.shape[-1], floor.maximum(best.gather(1, top_k[:, None] - 1)[:, 0]), floor)
    mass = torch.softmax(best.masked_fill(best < floor[:, None], -torch.inf), dim=-1)
    before = mass.cumsum(dim=-1) - mass  # of the likelier tokens
    num_kept = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)  # a top_p may round to 0
    return torch.where(top_p < 1, floor.maximum(best.gather(1, num_kept - 1)[:, 0]), floor)


def torch_edit(logits: Tensor, rows: RowFields, edits: EditFields, max_drafts: int) -> Tensor:
    """`EditLogits` by torch's operators."""
    del max_drafts
    num_rows, vocab_size = logits.shape
    edited = logits.new_zeros((num_rows + 1, vocab_size), dtype=torch.float32)  # the last one takes what is padding
    edited[:num_rows].copy_(logits)
    edited[:num_rows].masked_fill_(_forbidden(edits, vocab_size), -torch.inf)
    cells = edits.biased_rows.long().clamp(max=num_rows), edits.biased_tokens.long()
    edited.index_put_(cells, edited[cells] + edits.biases)
    starts, drafts = edits.starts.tolist(), rows.drafts.tolist()
    for entry, (first, count) in enumerate(zip(rows.first_rows.tolist(), rows.counts.tolist(), strict=True)):
        own = slice(starts[entry], starts[entry + 1])
        parts = (part[own].tolist() for part in (edits.penalised, edits.counts, edits.in_prompt))
        known = {token: (said, in_prompt) for token, said, in_prompt in zip(*parts, strict=True)}
        by = [part[entry : entry + 1] for part in (edits.repetition, edits.frequency, edits.presence)]
        for row in range(first, first + count + 1):
            _penalise(edited[row], known, drafts[first:row], *by)
    return edited[:num_rows]


def _forbidden(edits: EditFields, vocab_size: int) -> Tensor:
    """[R, V] bool."""
    bits = torch.arange(32, dtype=torch.int32, device=edits.masks.device)
    allowed = ((edits.masks[:, :, None] >> bits) & 1).flatten(1)[:, :vocab_size] > 0  # [M, V]
    which = edits.mask_of_row.long()
    return ~allowed[which.clamp(min=0)] & (which >= 0)[:, None]


def _penalise(
    logits: Tensor,
    known: dict[int, tuple[int, bool]],
    drafts: list[int],
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> None:
    """Penalise in a row the tokens that were counted before the step, and the drafts before the row."""
    tokens = [*known, *dict.fromkeys(token for token in drafts if token not in known)]
    if not tokens:
        return
    before = [known.get(token, (0, False)) for token in tokens]
    said = torch.tensor([count + drafts.count(token) for token, (count, _) in zip(tokens, before, strict=True)])
    said = said.to(logits.device)
    is_known = torch.tensor([in_prompt for _, in_prompt in before]).to(logits.device) | (said > 0)
    factor = torch.where(is_known, repetition, 1.0).float()
    loss = (frequency * said + presence * (said > 0)).float()
    values = logits[tokens]
    logits[tokens] = torch.where(values > 0, values / factor, values * factor) - loss


@dataclass(frozen=True)
class TorchDrafts:
    """`SampleDrafts` by torch's operators."""

    ops: VocabularyOps

    def __call__(
        self,
        logits: Tensor,
        fields: DraftFields,
        offset: int,
        ids: Tensor | None,
        vocab_size: int,
        drafts: DraftBuffers,
    ) -> None:
        sampling = sampling_rows(fields._asdict())
        probs = self.ops.target_probs(self.ops.process(logits.float(), sampling), sampling)
        columns = self.ops.draw(probs, fields.uniforms[offset])
        noise = NoiseRows(fields.coupled, fields.seeds, fields.noise_positions[offset])
        columns = self.ops.choose(probs, columns, noise, ids, vocab_size)
        rows = slice(offset * len(logits), (offset + 1) * len(logits))
        drafts.tokens[rows].copy_(columns if ids is None else ids[columns])
        drafts.columns[rows].copy_(columns)
        drafts.probs[rows].copy_(probs)
        before = mass_before(probs, torch.arange(len(probs), device=probs.device), columns)
        drafts.mass_before[rows].copy_(before)


@dataclass(frozen=True)
class TorchJudge:
    """`RowJudge` by the operators of eager steps; p is a matrix, and everything is computed, wanted or not."""

    ops: VocabularyOps
    mode: LogprobsMode

    def __call__(self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None) -> tuple[Tensor, Layout]:
        logits = logits.float()
        sampling = sampling_rows(rows._asdict())
        processed = self.ops.process(logits, sampling)
        step = verify_input(self.ops.target_probs(processed, sampling), rows, draft_probs_of(sampled))
        noise = NoiseRows(rows.coupled[rows.entries], rows.seeds, rows.positions)
        choice = self.ops.choose(step.probs, torch.zeros_like(rows.drafts), noise, None, logits.shape[1])
        verified = _merge(rows.coupled, accept_choice(step, choice), self.ops.verify_token_wise(step))
        emitted = self.ops.emitted_at_rows(verified, step)
        outside = outside_filters(logits, sampling, emitted)
        broken = self.ops.broken_rows(step, verified, emitted, processed.amax(dim=-1), outside)
        reported = gather_logprobs(mode_matrix(self.mode, logits, processed), emitted, 0)
        terms = self.ops.take_terms(step, verified, emitted, TermScope(rows.counted, rows.coupled))
        of_drafts, before, of_last = (torch.empty(0),) * 3
        if sampled is not None:
            of_drafts, of_last, _ = self.ops.round_probs(step, verified, places=False)
            place = sampled.places[rows.packed.clamp(max=len(sampled.places) - 1)]
            before = torch.where(step.judged, sampled.mass_before[place], 0.0)
        found = Verified(
            *(verified.num_accepted, verified.token_ids, step.drafts, broken, verified.expected_accepted),
            *(reported.values, reported.ranks, terms.achievable, terms.rows, terms.sums, of_drafts, before, of_last),
        )
        return copy_once([*found]), Layout(len(rows.drafts), len(rows.counts), terms.checks, sampled is not None)


def verify_input(probs: Tensor, rows: RowFields, draft_probs: DraftProbs) -> VerifyInput:
    """The input of a step's verifier."""
    shared = {field.name for field in fields(VerifyInput)} & set(RowFields._fields)
    own = {name: getattr(rows, name) for name in shared}
    return VerifyInput(probs=probs, draft_probs=draft_probs, **own)


def draft_probs_of(sampled: SampledFrom | None) -> DraftProbs:
    """Their distributions."""
    if sampled is None:
        return PointMass()
    probs = sampled.probs[sampled.places]
    return Drawn(probs) if sampled.ids is None else Drawn(probs, sampled.ids, sampled.own_columns[sampled.places])


def _merge(chosen: Tensor, theirs: VerifyOutput, others: VerifyOutput) -> VerifyOutput:
    """Merge two verdicts on the same entries: `theirs` for those of `chosen` [E] bool, `others` for the rest."""
    return VerifyOutput(
        torch.where(chosen, theirs.num_accepted, others.num_accepted),
        torch.where(chosen, theirs.token_ids, others.token_ids),
        torch.where(chosen, theirs.expected_accepted, others.expected_accepted),
    )
