"""Requests that change the logits of their rows, in the middle of their answers; on any device."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from speculative.gpu.buckets import Bucket
from speculative.gpu.logit_edits import LogitEdits, StepEdits
from speculative.gpu.row_edits import EditLogits
from speculative.gpu.row_judge import RowFields
from speculative.request import Request, SamplingParams
from speculative.state.batch import Entry, StepInput, build_step_input
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools
from tests.support.judged_rows import of_wider

EOS = (1, 2)
NEVER = 1 << 20
LARGEST = Bucket(8, 7)


@dataclass
class Drafted:
    """A request in the middle of its answer."""

    params: SamplingParams
    output: tuple[int, ...] = (9, 4, 9, 11)
    drafts: tuple[int, ...] = ()
    masked: bool = False


ALL = [
    Drafted(SamplingParams(frequency_penalty=0.7, presence_penalty=-0.3), drafts=(9, 5, 5, 9, 30)),
    Drafted(SamplingParams(), drafts=(3, 3)),
    Drafted(SamplingParams(repetition_penalty=1.3, frequency_penalty=1.1), drafts=(7, 8, 7, 40, 7, 40)),
    Drafted(SamplingParams(logit_bias=((5, 3.0), (60, -100.0), (5, 1.5)), bad_words=((5,), (9, 11, 6), (6, 3)))),
    Drafted(SamplingParams(bad_words=((11, 6), (6, 3), (6, 6, 3)), logit_bias=((3, 2.0),)), drafts=(6, 6, 3)),
    Drafted(
        SamplingParams(min_tokens=6, max_tokens=9, stop_token_ids=(12, 1), repetition_penalty=0.5), drafts=(4, 5, 6)
    ),
    Drafted(SamplingParams(allowed_token_ids=(4, 9, 31, 32, 63), presence_penalty=1.0), drafts=(4, 9), masked=True),
    Drafted(SamplingParams(), drafts=(13, 14, 15), masked=True),
]


def input_of(drafted: list[Drafted]) -> StepInput:
    entries, counts, drafts = [], [], list[int]()
    for index, one in enumerate(drafted):
        sequence = Sequence(Request(f"r{index}", (7, 5, 7), one.params), tokens=(7, 5, 7, *one.output))
        sequence.num_computed, sequence.blocks = len(sequence.tokens) - 1, list(range(64))
        entries.append(Entry(sequence, 1, len(one.drafts), samples=True))
        counts.append(len(one.drafts))
        drafts += one.drafts
    return build_step_input(entries, np.array(counts), np.array(drafts, np.int64), 16)


def masks_of(drafted: list[Drafted], size: int, seed: int = 0) -> list[list[Bools] | None]:
    """One mask for each row, but for the last two: as behind a forbidden draft."""
    random = np.random.default_rng(seed)
    return [
        [random.random(size) < 0.5 for _ in range(len(one.drafts))] or [random.random(size) < 0.5]
        if one.masked
        else None
        for one in drafted
    ]


def rows_of(step_input: StepInput, bucket: Bucket) -> RowFields:
    """Padded to a bucket: entries of nobody have a row each, and rows of nobody come last."""
    num_rows, num_entries = len(step_input.drafts), len(step_input.sampled_entries)
    nobodies = np.arange(num_entries, bucket.num_seqs)
    rest = bucket.num_rows - num_rows - len(nobodies)
    assert rest >= 0
    starts = np.cumsum(step_input.draft_counts + 1) - step_input.draft_counts - 1

    def tensor(*parts: Any) -> Tensor:
        return torch.from_numpy(np.concatenate([np.asarray(part, np.int64) for part in parts]))

    used = {
        "drafts": tensor(step_input.drafts, [-1] * (len(nobodies) + rest)),
        "entries": tensor(step_input.verify_entries, nobodies, [bucket.num_seqs - 1] * rest),
        "offsets": tensor(step_input.offsets, [0] * len(nobodies), [NEVER] * rest),
        "first_rows": tensor(starts, num_rows + np.arange(len(nobodies))),
        "counts": tensor(step_input.draft_counts, [0] * len(nobodies)),
    }
    return RowFields(**dict.fromkeys(RowFields._fields, torch.empty(0)) | used)


def logits_of(drafted: list[Drafted], size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    num_rows = sum(len(one.drafts) + 1 for one in drafted)
    return (torch.randn((num_rows, size), generator=torch.Generator().manual_seed(seed)) * 4).to(dtype)


def small_steps() -> list[tuple[list[Drafted], Bucket]]:
    """All requests, each alone, some of them, and the buckets that they fit."""
    alone = [([one], Bucket(1, 7)) for one in ALL if one.masked or one.params != SamplingParams()]
    return [(ALL, LARGEST), *alone, (ALL[::-1], LARGEST), (ALL[2:5], Bucket(4, 7)), (ALL[6:], Bucket(2, 4))]


def make_edits(edit: EditLogits, size: int) -> LogitEdits:
    return LogitEdits(LARGEST, size, torch.device("cpu"), edit)


def edited(
    edits: LogitEdits, drafted: list[Drafted], logits: Tensor, bucket: Bucket, masks: list[list[Bools] | None]
) -> Tensor:
    """Run the captured function on the rows of some requests."""
    step_input = input_of(drafted)
    own = StepEdits.of(step_input, masks, EOS, logits.shape[1])
    assert own is not None
    edits.prepare(own.sizes)
    edits.send(own)
    nobodys = torch.zeros(bucket.num_rows - len(logits), logits.shape[1], dtype=logits.dtype)
    padded = of_wider(torch.cat([logits, nobodys]))
    before = padded.clone()
    found = edits.apply(padded, rows_of(step_input, bucket), own.sizes)
    assert torch.equal(padded.nan_to_num(), before.nan_to_num()), "the model's logits stay as they are"
    assert found.shape == padded.shape and found.dtype == torch.float32 and found.is_contiguous()
    assert torch.equal(found[len(logits) :], padded[len(logits) :].float()), "nobody's rows"
    return found[: len(logits)]
