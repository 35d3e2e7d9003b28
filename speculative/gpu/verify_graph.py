"""From hidden states to emitted tokens, captured: LM head, distribution, verification, invariants, self-checks,
logprobs.

Verification is token-wise. Rows are padded, and everything the host needs is returned in one vector (`RowJudge`).
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.gpu.buckets import Bucket
from speculative.gpu.buffers import GraphBuffers
from speculative.gpu.capture import Capturer
from speculative.gpu.filters import fill_filters, filter_fields, sampling_rows
from speculative.gpu.judge_choice import make_judge
from speculative.gpu.logit_edits import EditSizes, LogitEdits, StepEdits
from speculative.gpu.logprob_report import Reported
from speculative.gpu.row_judge import RowFields, SampledFrom, TorchJudge, Wanted, columns_of
from speculative.gpu.staged_inputs import Array, Field, StagedInputs
from speculative.model.decoder import Decoder
from speculative.sampling.logprobs import LogprobRows
from speculative.sampling.probs import LastRows, SamplingRows
from speculative.state.batch import StepInput, Terms
from speculative.state.token_constraint import Bools
from speculative.step.host_copy import Verdicts
from speculative.step.sampler import verify_rows
from speculative.vocabulary.ops import VocabularyOps

_NEVER = 1 << 20  # offset of a padding row: after every draft


class Kind(NamedTuple):
    """What a capture depends on besides its bucket.

    sampled: drafts come from the statics, with their distributions; else the host chose them. checked: the terms of the
    self-checks are taken. logprobs: those of the emitted tokens are returned. filtered: some rows have filters.
    reported: the logprobs that the judge does not report; None where it reports what is asked for. edits: room for what
    requests do to logits; None where none does anything.
    """

    sampled: bool
    checked: bool
    logprobs: bool
    filtered: bool
    reported: Reported | None = None
    edits: EditSizes | None = None


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """A step's verify rows as the host knows them.

    places: [R] where each row lies in `GraphBuffers.hidden`. draft_rows: [sum(counts)] where each packed draft lies in
    the statics; None where the host chose them. counted: [E] whose terms count. edits: of their logits, if any."""

    layout: StepInput
    places: Array
    draft_rows: Array | None
    counted: Bools
    edits: StepEdits | None = None


@dataclass(frozen=True, slots=True)
class Judged:
    """The results, from the one copy. draft_ids: [R] the draft judged at each row, -1 in last rows."""

    verdicts: Verdicts
    draft_ids: Array
    logprobs: LogprobRows | None
    terms: Terms | None


class _Captured(NamedTuple):
    inputs: StagedInputs
    replay: Callable[[], tuple[Tensor, tuple[str, ...]]]


class VerifyGraph:
    """Judges a step's drafts in one launch."""

    def __init__(
        self,
        decoder: Decoder,
        buffers: GraphBuffers,
        draft_ids: Tensor | None,
        mode: LogprobsMode,
        ops: VocabularyOps,
        capturer: Capturer,
        edits: LogitEdits,
    ) -> None:
        """`draft_ids` is `DraftModel.ids` of the drafter: the tokens its columns stand for."""
        self._ops, self._capturer, self._edits = ops, capturer, edits
        self._judge = make_judge(capturer.device)
        self._decoder, self._statics, self._draft_ids, self._mode = decoder, buffers, draft_ids, mode
        self._columns = None if draft_ids is None else columns_of(draft_ids, decoder.config.vocab_size)
        self._rows = LastRows()
        self._captured: dict[tuple[Bucket, Kind], _Captured] = {}

    def prepare(self, bucket: Bucket, kind: Kind) -> _Captured:
        """The captured function of a bucket of packed rows; captured now if it is new."""
        if (bucket, kind) not in self._captured:
            fields = _fields(bucket)
            if kind.filtered:
                fields |= filter_fields(bucket.num_rows, self._decoder.config.vocab_size)
            if kind.reported is not None:
                fields |= kind.reported.fields(bucket.num_seqs)
            if kind.edits is not None:
                self._edits.prepare(kind.edits)
            inputs = StagedInputs(fields, self._capturer.device)
            _give_rows_to_nobodies(inputs.next_host(), num_rows=0, num_entries=0)
            inputs.send()
            replay = self._capturer.capture(lambda: self._compute(bucket, kind, inputs.on_device))
            self._captured[bucket, kind] = _Captured(inputs, replay)
        return self._captured[bucket, kind]

    def run(self, bucket: Bucket, kind: Kind, rows: JudgedRows) -> Judged:
        """Judge, and copy the results to the host."""
        captured = self.prepare(bucket, kind)
        host, params = captured.inputs.next_host(), [entry.sequence.params for entry in rows.layout.drawing]
        _fill(host, rows, self._rows.of(params, self._decoder.config.vocab_size, torch.device("cpu")))
        if kind.reported is not None:
            kind.reported.fill(host, params)
        captured.inputs.send()
        if rows.edits is not None:
            self._edits.send(rows.edits)
        vector, checks = captured.replay()
        values, reported = vector.cpu().numpy(), None
        if kind.reported is not None:
            reported, values = kind.reported.unpack(values, bucket.num_rows, self._decoder.config.vocab_size)
        judged = _unpack(values, bucket, kind, checks, rows.layout)
        return judged if reported is None else dataclasses.replace(judged, logprobs=reported)

    def _compute(self, bucket: Bucket, kind: Kind, inputs: Mapping[str, Tensor]) -> tuple[Tensor, tuple[str, ...]]:
        logits = self._decoder.lm_head(self._statics.hidden[inputs["places"]])  # [R, V]
        drafts = inputs["drafts"]
        if kind.sampled and bucket.num_queries > 1:
            own = self._statics.draft_tokens[inputs["draft_rows"]]  # [D]
            drafts = torch.where(drafts >= 0, own[inputs["packed"].clamp(max=len(own) - 1)], -1)
        rows = RowFields(**{name: inputs[name] for name in RowFields._fields} | {"drafts": drafts})
        edited = logits if kind.edits is None else self._edits.apply(logits, rows, kind.edits)
        sampled = None
        if kind.sampled:
            statics = self._statics
            sampled = SampledFrom(
                statics.draft_probs, inputs["draft_rows"], self._columns, self._draft_ids, statics.draft_columns
            )
        wanted = Wanted(kind.checked, self._mode if kind.logprobs else None)
        if kind.filtered:
            vector, checks = TorchJudge(self._ops)(edited, rows, sampled, wanted, sampling_rows(inputs).filters)
        else:
            vector, checks = self._judge(edited, rows, sampled, wanted)
        if kind.reported is not None:
            more = kind.reported.make(self._mode, self._ops, (logits, edited), rows, inputs, vector)
            vector = torch.cat([more, vector])
        return vector, checks


def _fields(bucket: Bucket) -> dict[str, Field]:
    """Padding rows come after every draft of the last entry.

    Every entry needs a row of its own besides these, padding entries too (`_give_rows_to_nobodies`).
    """
    rows, entries = (bucket.num_rows,), (bucket.num_seqs,)
    drafts = (bucket.num_rows - bucket.num_seqs,)
    return {
        "places": Field(rows),
        "drafts": Field(rows, padding=-1),
        "packed": Field(rows),
        "entries": Field(rows, padding=bucket.num_seqs - 1),
        "offsets": Field(rows, padding=_NEVER),
        "first_rows": Field(entries),
        "counts": Field(entries),
        "accept_uniforms": Field(rows, torch.float64, 0.5),
        "sample_uniforms": Field(rows, torch.float64, 0.5),
        "temperature": Field((*rows, 1), torch.float32, 1.0),
        "greedy": Field(rows, torch.bool, 1),
        "counted": Field(entries, torch.bool, 0),
        "draft_rows": Field(drafts),
    }


def _fill(host: dict[str, Array], rows: JudgedRows, per_entry: SamplingRows) -> None:
    layout = rows.layout
    num_rows, num_entries = len(layout.drafts), len(layout.drawing)
    entries = layout.verify_entries
    host["places"][:num_rows] = rows.places
    for name, values in verify_rows(layout).named().items():
        if name in host:
            host[name][: len(values)] = values
    host["temperature"][:num_rows] = per_entry.temperature.numpy()[entries]
    host["greedy"][:num_rows] = per_entry.greedy.numpy()[entries]
    fill_filters(host, per_entry.filters, entries)
    host["counted"][:num_entries] = rows.counted
    if rows.draft_rows is not None:
        host["draft_rows"][: len(rows.draft_rows)] = rows.draft_rows
    _give_rows_to_nobodies(host, num_rows, num_entries)


def _give_rows_to_nobodies(host: dict[str, Array], num_rows: int, num_entries: int) -> None:
    """After `num_rows` rows of `num_entries` entries, one row without a draft for every padding entry."""
    nobodies = np.arange(num_entries, len(host["counts"]))
    own = num_rows + np.arange(len(nobodies))
    host["first_rows"][nobodies] = own
    host["entries"][own] = nobodies
    host["offsets"][own] = 0


def _unpack(vector: Array, bucket: Bucket, kind: Kind, checks: tuple[str, ...], layout: StepInput) -> Judged:
    rest = vector

    def take(count: int) -> Array:
        nonlocal rest
        taken, rest = rest[:count], rest[count:]
        return taken

    num_rows, num_entries = len(layout.drafts), len(layout.drawing)
    accepted, token_ids = (take(bucket.num_seqs)[:num_entries].astype(np.int64) for _ in range(2))
    drafts, broken = (take(bucket.num_rows)[:num_rows].astype(np.int64) for _ in range(2))
    expected = np.nan_to_num(take(bucket.num_seqs)[:num_entries]).sum()
    verdicts = Verdicts(accepted, token_ids, broken, float(expected))
    logprobs = terms = None
    if kind.logprobs:
        values, ranks = (take(bucket.num_rows)[:num_rows] for _ in range(2))
        nothing = np.empty((num_rows, 0))
        logprobs = LogprobRows(values.astype(np.float32), ranks.astype(np.int64), nothing, nothing, nothing)
    if kind.checked:
        achievable = float(take(1)[0])
        terms = Terms(checks, rest.reshape(len(checks), -1), achievable)
    return Judged(verdicts, drafts, logprobs, terms)
