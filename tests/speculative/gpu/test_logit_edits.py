"""Edits of logits in captured steps where their lists are full, by Triton's kernels (in its interpreter).
`step_conformance` has the others."""

import numpy as np
import pytest
import torch

from speculative.gpu.buckets import Bucket
from speculative.gpu.logit_edits import EditSizes, StepEdits, fits
from speculative.gpu.row_edits import EditLogits
from speculative.request import SamplingParams
from speculative.sampling.logits_processors import adjust
from speculative.state.batch import row_contexts
from speculative.state.token_constraint import Bools
from tests.support.edited_rows import EOS, LARGEST, Drafted, edited, input_of, logits_of, make_edits
from tests.support.triton_interpreter import needs_triton


@pytest.fixture
def edit(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> EditLogits:
    from speculative.gpu import triton_edits

    monkeypatch.setattr(triton_edits, "BLOCK", 64)
    monkeypatch.setattr(triton_edits, "_CELLS", 16)
    return triton_edits.triton_edit


@needs_triton
@pytest.mark.parametrize(
    ("what", "count"), [("biases", 1024), ("biases", 1025), ("penalties", 1024), ("penalties", 1025)]
)
def test_lists_at_the_edge_of_a_size(edit: EditLogits, what: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prompt's two tokens are in the list of penalties, too."""
    monkeypatch.setattr("speculative.gpu.logit_edits._LEAST_CELLS", 1024)
    if what == "biases":
        one = Drafted(SamplingParams(logit_bias=tuple((token, 0.01 * token - 5) for token in range(count))))
    else:
        output = tuple(token for token in range(1200) if token not in (5, 7))[: count - 2]
        one = Drafted(SamplingParams(repetition_penalty=1.2, frequency_penalty=0.1), output, (1250, 0, 1250))
    step_input, logits = input_of([one]), logits_of([one], 1300)
    own = StepEdits.of(step_input, [None], EOS, 1300)
    assert own is not None and own.sizes == EditSizes(16, 1024 if count <= 1024 else 16384)
    found = edited(make_edits(edit, 1300), [one], logits, Bucket(1, 4), [None])
    assert torch.equal(found, adjust(logits, row_contexts(step_input, [None]), EOS))


@needs_triton
@pytest.mark.parametrize("num_masks", [16, 17])
def test_masks_at_the_edge_of_a_size(edit: EditLogits, num_masks: int) -> None:
    drafted = [
        Drafted(SamplingParams(), drafts=(3,) * min(6, num_masks - 7 * index - 1), masked=True)
        for index in range(-(-num_masks // 7))
    ]
    step_input, logits = input_of(drafted), logits_of(drafted, 64)
    random = np.random.default_rng(num_masks)
    masks: list[list[Bools] | None] = [[random.random(64) < 0.3 for _ in range(len(one.drafts) + 1)] for one in drafted]
    own = StepEdits.of(step_input, masks, EOS, 64)
    assert own is not None and own.sizes == EditSizes(16 if num_masks <= 16 else 256)
    found = edited(make_edits(edit, 64), drafted, logits, LARGEST, masks)
    assert torch.equal(found, adjust(logits, row_contexts(step_input, masks), EOS))


def test_a_step_without_edits_has_none() -> None:
    plain = [Drafted(SamplingParams(top_p=0.5, logprobs=5), drafts=(3,))]
    assert StepEdits.of(input_of(plain), [None], EOS, 64) is None


def test_what_fits_is_known_before_anything_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    biased = input_of([Drafted(SamplingParams(logit_bias=((5, 1.0), (6, 1.0))), drafts=(3, 4))] * 2).sampled_entries
    counted = input_of([Drafted(SamplingParams(presence_penalty=1.0))] * 4).sampled_entries
    for entries, needed in ((biased, 2 * 3 * (2 + len(EOS))), (counted, 4 * 3)):
        monkeypatch.setattr("speculative.gpu.logit_edits.MAX_CELLS", needed)
        assert fits(entries, len(EOS))
        monkeypatch.setattr("speculative.gpu.logit_edits.MAX_CELLS", needed - 1)
        assert not fits(entries, len(EOS))
