"""The target's forward pass over packed rows of prompts, captured: run eagerly, its launches take the host longer than
they take the device. In front of them there may be rows of decoding sequences, which then read no weights of their own.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from speculative.gpu.buckets import PackedBucket
from speculative.gpu.buffers import GraphBuffers
from speculative.gpu.capture import Captured, Capturer
from speculative.gpu.packed_attention import AttendPacked, PackedRows, tables_of
from speculative.gpu.padding import BlockTables, PagedCache, fill_packed, paged_rows, row_fields
from speculative.gpu.paged_attention import KernelAttention, PagedRows
from speculative.gpu.staged_inputs import Array, Field, StagedInputs
from speculative.model.attention import CacheAttention
from speculative.model.config import PLAIN, ScoreRule
from speculative.model.decoder import Decoder
from speculative.state.batch import Int64s, StepInput

MOST_ROWS = 2048
"""Larger passes run eagerly: the host has launched them before the device has computed them."""
MOST_SEQUENCES = 16
"""Sequences of one replay; more of them are computed in parts."""


def prompt_sizes(max_batched_tokens: int) -> tuple[int, ...]:
    """Numbers of rows that are captured, ascending: 64 apart up to 256, then four in each doubling."""
    most = min(max_batched_tokens, MOST_ROWS)
    sizes = {*range(64, 257, 64), most}
    size = 256
    while size < most:
        sizes |= {size + size * part // 4 for part in range(1, 5)}
        size *= 2
    return tuple(sorted(one for one in sizes if one <= most))


def run_in_parts(
    step_input: StepInput, most: int, run: Callable[[StepInput], tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    """Run the rows of so many sequences at a time; `run` gives hidden states and features in memory of their own."""
    parts = np.arange(len(step_input.sequences)) // most
    found = [run(step_input.of_sequences(parts == part)) for part in range(parts[-1] + 1)]
    return torch.cat([hidden for hidden, _ in found]), torch.cat([features for _, features in found])


@dataclass
class PromptPass:
    """Runs the target on chunks of prompts as one launch."""

    decoder: Decoder
    cache: PagedCache  # its keys and values, and attention of decoding rows
    attend: AttendPacked
    buffers: GraphBuffers  # of the step; they get what is computed of decoding rows
    capture: tuple[int, ...]  # the layers whose inputs are features, as `Decoder.run` takes them
    sizes: tuple[int, ...]  # numbers of rows, ascending
    capturer: Capturer

    def __post_init__(self) -> None:
        decoder, buffers, self._room = self.decoder, self.buffers, self.cache.room
        self._decoding = decoding = PackedBucket(len(buffers.draft_hidden), len(buffers.hidden))  # the most there are
        hidden_size = decoder.config.hidden_size
        self._hidden = torch.zeros((self.sizes[-1], hidden_size), dtype=decoder.dtype, device=decoder.device)
        self._features = self._hidden.new_zeros((self.sizes[-1], hidden_size * len(self.capture)))
        self._inputs: dict[int, StagedInputs] = {}
        self._passes: dict[tuple[int, bool], Captured[None]] = {}
        self._tables = BlockTables(self._room)
        fields = row_fields(decoding, self._room) | {"sources": Field((decoding.num_rows,), padding=-1)}
        fields["starts"] = Field((decoding.num_seqs + 2,), torch.int32)
        self._beside = StagedInputs(fields, self.capturer.device)  # of decoding rows, in passes of any size

    def takes(self, step_input: StepInput) -> bool:
        """Return whether the rows of each `MOST_SEQUENCES` sequences fit."""
        starts = step_input.row_starts
        ends = [*range(0, len(starts) - 1, MOST_SEQUENCES), len(starts) - 1]
        return all(starts[end] - starts[begin] <= self.sizes[-1] for begin, end in pairwise(ends))

    def run(self, step_input: StepInput) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] and features [N, F] of rows that it takes, in memory of their own."""
        if len(step_input.sequences) > MOST_SEQUENCES:
            return run_in_parts(step_input, MOST_SEQUENCES, self._replay)
        return self._replay(step_input)

    def run_beside(
        self, prompts: StepInput, bucket: PackedBucket, decoding: StepInput, sources: Int64s | None
    ) -> tuple[Tensor, Tensor] | None:
        """Compute decoding rows as `TargetPass.run` does, and prompts' as `run` does, in one pass; see there. None, and
        nothing computed, where the rows of prompts do not fit behind those, which are judged in a bucket."""
        num_before, num_rows = len(decoding.input_ids), len(prompts.input_ids)
        most = max(bucket.num_rows, num_before + num_rows)
        if len(prompts.sequences) > MOST_SEQUENCES or most > self.sizes[-1]:
            return None
        captured = self._prepare(self._fit(most), beside=True)
        host, beside = captured.inputs.next_host(), self._beside.next_host()
        num_blocks = fill_packed(beside, self._tables.of(decoding.sequences), decoding, self._room)
        if sources is not None:
            beside["sources"][:num_before] = sources
        self._beside.send(num_blocks)
        host["input_ids"][:num_before] = decoding.input_ids
        for name in ("positions", "slots"):
            host[name][:num_before] = beside[name][:num_before]
        captured.inputs.send(self._fill(host, prompts, num_before))
        self.buffers.features.version += 1
        captured.replay()
        own = slice(num_before, num_before + num_rows)
        return self._hidden[own].clone(), self._features[own].clone()

    def capture_all(self) -> None:
        """Capture every size, the largest first, so that smaller ones reuse its memory."""
        for size in reversed(self.sizes):
            self._prepare(size)
            if self._decoding.num_seqs > 1:  # else nobody decodes beside a prompt
                self._prepare(size, beside=True)

    def _fit(self, num_rows: int) -> int:
        return self.sizes[bisect_left(self.sizes, num_rows)]

    def _replay(self, step_input: StepInput) -> tuple[Tensor, Tensor]:
        num_rows = len(step_input.input_ids)
        captured = self._prepare(self._fit(num_rows))
        captured.inputs.send(self._fill(captured.inputs.next_host(), step_input, 0))
        captured.replay()
        return self._hidden[:num_rows].clone(), self._features[:num_rows].clone()

    def _fill(self, host: Mapping[str, Array], step_input: StepInput, begin: int) -> int:
        """Write rows from `begin` on; return how many blocks are to be sent."""
        rows = step_input.attention_rows()
        spans, blocks = tables_of(rows, self._room.block_size, 0)
        own = slice(begin, begin + len(step_input.input_ids))
        host["input_ids"][own], host["positions"][own] = step_input.input_ids, step_input.positions
        host["slots"][own] = rows.slots
        spans[:, 0] += begin
        host["spans"][: len(spans)] = spans
        host["blocks"][: len(blocks)] = blocks
        return len(blocks)

    def _prepare(self, size: int, *, beside: bool = False) -> Captured[None]:
        """The captured pass of a size; captured now if it is new."""
        if size not in self._inputs:
            room = self._room
            fields = {
                "input_ids": Field((size,)),
                "positions": Field((size,)),
                "slots": Field((size,), padding=room.trash_block * room.block_size),
                "spans": Field((MOST_SEQUENCES, 4), torch.int32),  # padding has no rows
                "blocks": Field((MOST_SEQUENCES * room.max_blocks,), torch.int32, in_part=True),
            }
            self._inputs[size] = StagedInputs(fields, self.capturer.device)
        if (size, beside) not in self._passes:
            inputs = self._inputs[size]
            for given in (inputs, self._beside):  # a capture runs on what they hold: on padding
                given.next_host()
                given.send()
            compute = self._compute_beside if beside else self._compute
            self._passes[size, beside] = Captured(inputs, self.capturer.capture(lambda: compute(inputs.on_device)))
        return self._passes[size, beside]

    def _compute(self, inputs: Mapping[str, Tensor]) -> None:
        attention = KernelAttention(self.cache.cache, inputs["slots"], self._rows(inputs), self.attend)
        self._run(inputs["input_ids"], inputs["positions"], attention)

    def _compute_beside(self, inputs: Mapping[str, Tensor]) -> None:
        input_ids, given = inputs["input_ids"], self._beside.on_device
        most = min(self._decoding.num_rows, len(input_ids))
        few = paged_rows(given)
        few = replace(few, visible=few.visible[:most])

        def attend(
            query: Tensor, keys: Tensor, values: Tensor, rows: tuple[PagedRows, PackedRows], scores: ScoreRule = PLAIN
        ) -> Tensor:
            behind = rows[1]._replace(out=self.cache.attend(query, keys, values, rows[0], scores))
            return self.attend(query, keys, values, behind, scores)

        drafted = self.buffers.drafts.tokens_or(input_ids[:most], given["sources"][:most])
        input_ids = torch.cat([drafted, input_ids[most:]])
        attention = KernelAttention(self.cache.cache, inputs["slots"], (few, self._rows(inputs)), attend)
        hidden, features = self._run(input_ids, inputs["positions"], attention)
        # The judge reads rows behind those that decode: nothing of a prompt's may be in them.
        self.buffers.hidden[:most].copy_(hidden[:most].masked_fill((few.visible == 0)[:, None], 0.0))
        if self.capture:
            self.buffers.features.rows[:most].copy_(features[:most])

    def _rows(self, inputs: Mapping[str, Tensor]) -> PackedRows:
        return PackedRows(inputs["spans"], inputs["blocks"], 0, self._room.block_size)

    def _run(self, input_ids: Tensor, positions: Tensor, attention: CacheAttention) -> tuple[Tensor, Tensor]:
        hidden, features = self.decoder.run(input_ids, positions, attention, self.capture)
        self._hidden[: len(hidden)].copy_(hidden)
        if self.capture:
            self._features[: len(hidden)].copy_(features)
        return hidden, features
