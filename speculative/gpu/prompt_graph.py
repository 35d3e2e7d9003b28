"""The target's forward pass over packed rows of prompts, captured: run eagerly, its launches take the host longer than
they take the device."""

from bisect import bisect_left
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from speculative.gpu.capture import Captured, Capturer
from speculative.gpu.packed_attention import AttendPacked, PackedRows, tables_of
from speculative.gpu.padding import CacheRoom
from speculative.gpu.paged_attention import KernelAttention
from speculative.gpu.staged_inputs import Field, StagedInputs
from speculative.model.decoder import Decoder
from speculative.state.batch import StepInput
from speculative.state.kv_cache import KVCache

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


class PromptPass:
    """Runs the target on chunks of prompts as one launch.

    Args:
        decoder: the target.
        cache: its keys and values.
        room: of the cache, with a block that is nobody's.
        attend: attention of packed rows.
        capture: the layers whose inputs are features, as `Decoder.run` takes them.
        sizes: numbers of rows, ascending.
        capturer: of the engine.
    """

    def __init__(
        self,
        decoder: Decoder,
        cache: KVCache,
        room: CacheRoom,
        attend: AttendPacked,
        capture: tuple[int, ...],
        sizes: tuple[int, ...],
        capturer: Capturer,
    ) -> None:
        self._decoder, self._cache, self._room, self._attend = decoder, cache, room, attend
        self._capture, self._capturer = capture, capturer
        self._sizes = sizes
        hidden_size = decoder.config.hidden_size
        self._hidden = torch.zeros((sizes[-1], hidden_size), dtype=decoder.dtype, device=decoder.device)
        self._features = self._hidden.new_zeros((sizes[-1], hidden_size * len(capture)))
        self._passes: dict[int, Captured[None]] = {}

    def takes(self, step_input: StepInput) -> bool:
        """Return whether the rows of each `MOST_SEQUENCES` sequences fit."""
        starts = step_input.row_starts
        ends = [*range(0, len(starts) - 1, MOST_SEQUENCES), len(starts) - 1]
        return all(starts[end] - starts[begin] <= self._sizes[-1] for begin, end in pairwise(ends))

    def run(self, step_input: StepInput) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] and features [N, F] of rows that it takes, in memory of their own."""
        if len(step_input.sequences) > MOST_SEQUENCES:
            return run_in_parts(step_input, MOST_SEQUENCES, self._replay)
        return self._replay(step_input)

    def capture_all(self) -> None:
        """Capture every size, the largest first, so that smaller ones reuse its memory."""
        for size in reversed(self._sizes):
            self._prepare(size)

    def _replay(self, step_input: StepInput) -> tuple[Tensor, Tensor]:
        num_rows = len(step_input.input_ids)
        captured = self._prepare(self._sizes[bisect_left(self._sizes, num_rows)])
        rows = step_input.attention_rows()
        spans, blocks = tables_of(rows, self._room.block_size, 0)
        host = captured.inputs.next_host()
        host["input_ids"][:num_rows] = step_input.input_ids
        host["positions"][:num_rows] = step_input.positions
        host["slots"][:num_rows] = rows.slots
        host["spans"][: len(spans)] = spans
        host["blocks"][: len(blocks)] = blocks
        captured.inputs.send(len(blocks))
        captured.replay()
        return self._hidden[:num_rows].clone(), self._features[:num_rows].clone()

    def _prepare(self, size: int) -> Captured[None]:
        """The captured pass of a size; captured now if it is new."""
        if size not in self._passes:
            room = self._room
            fields = {
                "input_ids": Field((size,)),
                "positions": Field((size,)),
                "slots": Field((size,), padding=room.trash_block * room.block_size),
                "spans": Field((MOST_SEQUENCES, 4), torch.int32),  # padding has no rows
                "blocks": Field((MOST_SEQUENCES * room.max_blocks,), torch.int32, in_part=True),
            }
            inputs = StagedInputs(fields, self._capturer.device)
            replay = self._capturer.capture(lambda: self._compute(inputs.on_device))
            self._passes[size] = Captured(inputs, replay)
        return self._passes[size]

    def _compute(self, inputs: dict[str, Tensor]) -> None:
        size = len(inputs["input_ids"])
        rows = PackedRows(inputs["spans"], inputs["blocks"], size, 0, self._room.block_size)
        attention = KernelAttention(self._cache, inputs["slots"], rows, self._attend)
        hidden, features = self._decoder.run(inputs["input_ids"], inputs["positions"], attention, self._capture)
        self._hidden[:size].copy_(hidden)
        if self._capture:
            self._features[:size].copy_(features)
