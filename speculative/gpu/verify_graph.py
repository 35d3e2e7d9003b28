"""From hidden states to emitted tokens, captured: LM head, distribution, verification, invariants, self-checks,
logprobs.

Rows are padded, and everything the host needs is returned in one vector (`RowJudge`). Self-checks, logprobs, filters
and which entries are coupled are inputs, so there is one graph a bucket; and one more for each size of `Extras`.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from speculative.config import EngineConfig
from speculative.drafting.neural_drafter import DraftModel
from speculative.gpu.buckets import PackedBucket
from speculative.gpu.buffers import GraphBuffers
from speculative.gpu.capture import Captured, Capturer
from speculative.gpu.filters import SamplingArrays, sampling_fields
from speculative.gpu.logit_edits import EditSizes, LogitEdits, StepEdits, usual_sizes
from speculative.gpu.logprob_report import Reported
from speculative.gpu.operators import GraphOperators
from speculative.gpu.row_judge import Layout, RowFields, SampledFrom
from speculative.gpu.staged_inputs import Array, Field, StagedInputs, copy_late
from speculative.gpu.step_requests import StepRequests
from speculative.model.decoder import Decoder
from speculative.request import MAX_LOGPROBS
from speculative.sampling.draft_probs import columns_of
from speculative.sampling.logprobs import LogprobRows
from speculative.sampling.verify_rows import VerifyRows
from speculative.state.batch import StepInput, Terms
from speculative.state.token_constraint import Bools
from speculative.step.host_copy import Verdicts

_NEVER = 1 << 20  # offset of a padding row: after every draft


class Extras(NamedTuple):
    """Parts of a capture's key besides its bucket, where requests ask for more than most do.

    reported: the logprobs that the judge does not report; None where it reports what is asked for. edits: room for what
    requests do to logits; None where none does anything.
    """

    reported: Reported | None = None
    edits: EditSizes | None = None


NO_EXTRAS = Extras()


@dataclass(frozen=True, slots=True)
class JudgedRows:
    """A step's verify rows as the host knows them; they are the first rows of `GraphBuffers.hidden`.

    requests: of the step's entries. draft_rows: [sum(counts)] where each packed draft lies in the statics; None where
    the host chose them. counted: [E] whose terms count. coupled: [E] which are judged by the coupled verifier. checked:
    whether the terms of the self-checks are wanted. edits: of the rows' logits, if any."""

    step_input: StepInput
    requests: StepRequests
    draft_rows: Array | None
    counted: Bools
    coupled: Bools
    checked: bool
    edits: StepEdits | None = None


@dataclass(frozen=True, slots=True)
class JudgedStep:
    """The results, from the one copy."""

    verdicts: Verdicts
    broken: Array  # [R] as `broken_rows` returns it
    draft_ids: Array  # [R] the draft judged at each row, -1 in last rows
    logprobs: LogprobRows | None
    terms: Terms | None


class VerifyGraph:
    """Judges a step's drafts in one launch."""

    def __init__(
        self,
        decoder: Decoder,
        buffers: GraphBuffers,
        draft_model: DraftModel | None,
        config: EngineConfig,
        capturer: Capturer,
        edits: LogitEdits,
        operators: GraphOperators,
    ) -> None:
        """`draft_model` is the drafter's, whose drafts and their distributions lie in the statics; else the host knows
        the drafts."""
        self._capturer, self._edits, self._mode = capturer, edits, config.logprobs_mode
        self._judge, self._ops = operators.judge(config.logprobs_mode), operators.vocabulary
        self._decoder, self._statics = decoder, buffers
        self._samples = draft_model is not None
        self._draft_ids = ids = None if draft_model is None else draft_model.ids
        self._columns = None if ids is None else columns_of(ids, decoder.config.vocab_size)
        self._params = SamplingArrays(decoder.config.vocab_size)
        self._captured: dict[tuple[PackedBucket, Extras], Captured[tuple[Tensor, Layout]]] = {}

    def follow_ids(self) -> None:
        """Read the ids of a head's logits again, after others were copied there."""
        if self._draft_ids is not None and self._columns is not None:
            self._columns.copy_(columns_of(self._draft_ids, len(self._columns)))

    def prepare(self, bucket: PackedBucket, extras: Extras = NO_EXTRAS) -> Captured[tuple[Tensor, Layout]]:
        """The captured function of a bucket of packed rows; captured now if it is new."""
        if (bucket, extras) not in self._captured:
            fields = _fields(bucket, self._decoder.config.vocab_size)
            if extras.reported is not None:
                fields |= extras.reported.fields(bucket.num_seqs)
            if extras.edits is not None:
                self._edits.prepare(extras.edits)
            inputs = StagedInputs(fields, self._capturer.device)
            # A capture runs on what the inputs hold: a step of padding alone, in which every index is in range.
            _give_rows_to_nobodies(inputs.next_host(), num_rows=0, num_entries=0)
            inputs.send()
            replay = self._capturer.capture(lambda: self._compute(bucket, extras, inputs.on_device))
            self._captured[bucket, extras] = Captured(inputs, replay)
        return self._captured[bucket, extras]

    def prepare_usual(self, bucket: PackedBucket) -> None:
        """Capture what most requests ask for: nothing more, the likeliest tokens' logprobs, or edits of usual sizes."""
        edited = map(self._edited_by, usual_sizes(bucket.num_rows))
        for extras in (NO_EXTRAS, Extras(Reported(MAX_LOGPROBS)), *edited):
            self.prepare(bucket, extras)

    def _edited_by(self, sizes: EditSizes, reported: Reported | None = None) -> Extras:
        """Logprobs may be asked for in any step that edits: the judge does not see the model's own logits."""
        return Extras(reported or (Reported() if self._mode == "raw_logprobs" else None), sizes)

    def launch(self, bucket: PackedBucket, rows: JudgedRows) -> Callable[[], JudgedStep]:
        """Judge; what is returned waits for the results, and copies them to the host."""
        params, reports = rows.requests.params, rows.requests.reported
        reported = Reported.asked_by(params) if reports else None
        extras = Extras(reported) if rows.edits is None else self._edited_by(rows.edits.sizes, reported)
        captured = self.prepare(bucket, extras)
        host = captured.inputs.next_host()
        step_input, num_rows, num_entries = rows.step_input, len(rows.step_input.drafts), len(params)
        for name, values in VerifyRows.of(step_input, self._ops.host).named().items():
            if name in host:
                host[name][: len(values)] = values
        for name, values in self._params.of(params).items():
            host[name][:num_rows] = values[step_input.verify_entries]
        host["counted"][:num_entries], host["coupled"][:num_entries] = rows.counted, rows.coupled
        host["checked"][:], host["reported"][:] = rows.checked, reports
        if rows.draft_rows is not None:
            host["draft_rows"][: len(rows.draft_rows)] = rows.draft_rows
            host["sources"][:num_rows][step_input.drafts >= 0] = rows.draft_rows
        _give_rows_to_nobodies(host, num_rows, num_entries)
        if extras.reported is not None:
            extras.reported.fill(host, params)
        captured.inputs.send()
        if rows.edits is not None:
            self._edits.send(rows.edits)
        vector, layout = captured.replay()
        return functools.partial(self._read, rows, extras, copy_late(vector), layout)

    def _read(self, rows: JudgedRows, extras: Extras, wait: Callable[[], Array], layout: Layout) -> JudgedStep:
        values = wait()
        found, num_rows, num_entries = layout.parts(values), len(rows.step_input.drafts), len(rows.requests.params)
        expected = found.expected[:num_entries]
        own = found.draft_probs[:num_rows], found.last_probs[:num_entries], found.mass_before[:num_rows]
        verdicts = Verdicts(
            found.num_accepted[:num_entries].astype(np.int64),
            found.token_ids[:num_entries].astype(np.int64),
            float(expected[np.isfinite(expected)].sum()),  # a faulty row counts nothing
            *(part if layout.samples else None for part in own),
        )
        logprobs = terms = None
        if extras.reported is not None:
            logprobs = extras.reported.unpack(values[layout.size :], layout.num_rows, self._decoder.config.vocab_size)
        elif rows.requests.reported:
            nothing = np.empty((num_rows, 0))
            own_values, ranks = found.values[:num_rows].astype(np.float32), found.ranks[:num_rows].astype(np.int64)
            logprobs = LogprobRows(own_values, ranks, nothing, nothing, nothing)
        if rows.checked:
            terms = Terms(layout.checks, found.sums, float(found.achievable[0]), found.rows[:, :num_rows])
        broken, drafts = (part[:num_rows].astype(np.int64) for part in (found.broken, found.drafts))
        return JudgedStep(verdicts, broken, drafts, logprobs, terms)

    def _compute(self, bucket: PackedBucket, extras: Extras, inputs: Mapping[str, Tensor]) -> tuple[Tensor, Layout]:
        logits = self._decoder.project(self._statics.hidden[: bucket.num_rows])  # [R, V]
        drafts, made, sampled = inputs["drafts"], self._statics.drafts, None
        if self._samples and bucket.num_rows > bucket.num_seqs:  # with one row a sequence nothing was drafted
            drafts = torch.where(drafts >= 0, made.tokens[inputs["sources"]], drafts)
            sampled = SampledFrom(
                made.probs, inputs["draft_rows"], self._columns, self._draft_ids, made.columns, made.mass_before
            )
        rows = RowFields(**{name: inputs[name] for name in RowFields._fields} | {"drafts": drafts})
        edited = logits if extras.edits is None else self._edits.apply(logits, rows, extras.edits)
        vector, layout = self._judge(edited, rows, sampled)
        of_entries = vector[: 2 * bucket.num_seqs].view(2, -1)  # the first parts of `Verified`
        self._statics.verdict[:, : bucket.num_seqs].copy_(of_entries)
        if extras.reported is None:
            return vector, layout
        verified = layout.parts(vector)
        more = extras.reported.make(self._mode, self._ops, (logits, edited), rows, inputs, verified)
        return torch.cat([vector, more]), layout


def _fields(bucket: PackedBucket, vocab_size: int) -> dict[str, Field]:
    """Padding rows come after every draft of the last entry.

    Every entry needs a row of its own besides these, padding entries too (`_give_rows_to_nobodies`).
    """
    rows, entries = (bucket.num_rows,), (bucket.num_seqs,)
    drafts = (bucket.num_rows - bucket.num_seqs,)
    return {
        "drafts": Field(rows, padding=-1),
        "sources": Field(rows),
        "packed": Field(rows),
        "entries": Field(rows, padding=bucket.num_seqs - 1),
        "offsets": Field(rows, padding=_NEVER),
        "first_rows": Field(entries),
        "counts": Field(entries),
        "accept_uniforms": Field(rows, torch.float64, 0.5),
        "sample_uniforms": Field(rows, torch.float64, 0.5),
        "seeds": Field(rows),
        "positions": Field(rows),
        "counted": Field(entries, torch.bool, 0),
        "coupled": Field(entries, torch.bool, 0),
        "checked": Field((1,), torch.bool, 0),
        "reported": Field((1,), torch.bool, 0),
        "draft_rows": Field(drafts),
    } | sampling_fields(bucket.num_rows, vocab_size)


def _give_rows_to_nobodies(host: dict[str, Array], num_rows: int, num_entries: int) -> None:
    """After `num_rows` rows of `num_entries` entries, one row without a draft for every padding entry."""
    nobodies = np.arange(num_entries, len(host["counts"]))
    own = num_rows + np.arange(len(nobodies))
    host["first_rows"][nobodies] = own
    host["entries"][own] = nobodies
    host["offsets"][own] = 0
