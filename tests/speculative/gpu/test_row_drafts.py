"""Sampling drafts from a drafter's logits: Triton's kernels (in Triton's interpreter) against what a draft is by
definition."""

from dataclasses import replace

import pytest
import torch

from speculative.gpu.row_drafts import DraftBuffers, SampleDrafts
from tests.support.drafted_rows import FILTERS, NUM_DRAFTS, OFFSET, assert_sampled, draft_scene
from tests.support.triton_interpreter import needs_triton

BLOCK = 64
WIDTH, VOCABULARY = 3 * BLOCK + 11, 500  # the last block is not full
SIZES = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1)
SCENES = {"the vocabulary": None, "a part of it": VOCABULARY}
pytestmark = [pytest.mark.slow, needs_triton]


@pytest.fixture
def sample(monkeypatch: pytest.MonkeyPatch, poisoned: None) -> SampleDrafts:
    from speculative.gpu import triton_drafts

    monkeypatch.setattr(triton_drafts, "BLOCK", BLOCK)
    return triton_drafts.triton_drafts


@pytest.mark.parametrize("part", SCENES)
def test_drafts_are_drawn_from_q_by_their_uniforms(sample: SampleDrafts, part: str) -> None:
    given = draft_scene(9, WIDTH, vocab_size=SCENES[part])
    plain, filtered = assert_sampled(given, sample), assert_sampled(given.filtered(*FILTERS), sample)
    assert len(set(plain.columns.tolist())) > 4
    assert (plain.probs[given.fields.greedy].sort(dim=-1).values[:, -2:] == torch.tensor([0.0, 1.0])).all()
    kept = (filtered.probs > 0).sum(dim=-1)
    unfiltered = torch.arange(9) % len(FILTERS) == 0
    assert torch.equal(filtered.probs[unfiltered], plain.probs[unfiltered])
    assert (kept[~unfiltered] < WIDTH // 2).all()


@pytest.mark.parametrize("part", SCENES)
def test_coupled_drafts_are_chosen_with_noise_beside_others(sample: SampleDrafts, part: str) -> None:
    given = draft_scene(9, WIDTH, vocab_size=SCENES[part], seed=1).filtered(*FILTERS)
    plain = assert_sampled(given, sample)
    coupled = torch.arange(9) % 4 != 1
    found = assert_sampled(given.with_fields(coupled=coupled), sample)
    assert torch.equal(found.probs, plain.probs) and torch.equal(found.columns[~coupled], plain.columns[~coupled])
    assert not torch.equal(found.columns, plain.columns)
    assert torch.equal(found.columns[given.fields.greedy], plain.columns[given.fields.greedy])


@pytest.mark.parametrize("size", SIZES)
def test_vocabularies_of_any_size(sample: SampleDrafts, size: int) -> None:
    given = draft_scene(4, size, seed=size).filtered(*FILTERS)
    given.fields.coupled[1] = True
    assert_sampled(given, sample)


def test_of_tied_tokens_a_greedy_row_takes_the_first(sample: SampleDrafts) -> None:
    given = draft_scene(3, WIDTH)
    given.fields.greedy[:], given.fields.temperature[:] = True, 1.0
    for row, places in enumerate(([5, 9], [BLOCK - 1, BLOCK], [BLOCK + 3, 3 * BLOCK + 1])):
        given.logits[row, places] = 11.0
    assert assert_sampled(given.filtered(*FILTERS[1:]), sample).columns.tolist() == [5, BLOCK - 1, BLOCK + 3]


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
def test_rows_of_no_numbers_draft_some_token_and_harm_no_other(sample: SampleDrafts, damage: float) -> None:
    """What is wrong with them is seen in q, where the invariants look."""
    given = draft_scene(6, WIDTH, vocab_size=VOCABULARY, seed=3).filtered(*FILTERS)
    given.fields.coupled[3] = True
    damaged = replace(given, logits=given.logits.clone())
    broken = [0, 1, 3]
    damaged.logits[broken, slice(None) if damage == -torch.inf else 70] = damage
    sound, found = (
        DraftBuffers(*(part.unflatten(0, (NUM_DRAFTS, 6))[OFFSET] for part in one.sample(sample)))
        for one in (given, damaged)
    )
    assert found.probs[broken].isnan().any(dim=-1).all()
    assert ((found.columns >= 0) & (found.columns < WIDTH)).all()
    assert given.ids is not None and torch.equal(found.tokens, given.ids[found.columns])
    others = [row for row in range(6) if row not in broken]
    for own, theirs in zip(sound, found, strict=True):
        assert torch.equal(own[others], theirs[others])


def test_a_sequences_draft_is_its_own_rows_alone(sample: SampleDrafts) -> None:
    given = draft_scene(7, WIDTH, vocab_size=VOCABULARY, seed=4).filtered(*FILTERS)
    given.fields.coupled[2::3] = True
    whole = DraftBuffers(*(part.unflatten(0, (NUM_DRAFTS, 7))[OFFSET] for part in given.sample(sample)))
    for begin, end in ((0, 1), (2, 3), (1, 6)):
        alone = given.rows(begin, end).sample(sample)
        for own, part in zip(alone, whole, strict=True):
            assert torch.equal(own.unflatten(0, (NUM_DRAFTS, end - begin))[OFFSET], part[begin:end])
