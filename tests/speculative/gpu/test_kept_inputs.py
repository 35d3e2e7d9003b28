"""What captured steps keep from one step to the next is what they would make anew, whatever came and went."""

import random
from dataclasses import fields

import numpy as np
import pytest

from speculative.gpu.filters import SamplingArrays
from speculative.gpu.padding import BlockTables, CacheRoom
from speculative.gpu.step_requests import LastRequests, StepRequests
from speculative.request import Request, SamplingParams
from speculative.state.batch import Entry, build_step_input
from speculative.state.sequence import Sequence

ROOM = CacheRoom(block_size=4, max_blocks=12, trash_block=99)


def sequence_of(number: int, params: SamplingParams | None = None) -> Sequence:
    return Sequence(Request(f"r{number}", (5, 6, 7), params or SamplingParams(), seed=number))


def entry_of(number: int, params: SamplingParams | None = None) -> Entry:
    return Entry(sequence_of(number, params), num_known=1, max_drafts=0, samples=True)


@pytest.mark.parametrize("seed", range(4))
def test_block_tables_follow_blocks_that_grow_are_replaced_and_change_places(seed: int) -> None:
    """As a scheduler changes them: lists grow, or a preempted sequence gets another one."""
    draw = random.Random(seed)
    tables, everyone = BlockTables(ROOM), [sequence_of(number) for number in range(8)]
    running = everyone[:4]
    for _ in range(200):
        for sequence in running:
            event = draw.random()
            if event < 0.3 and len(sequence.blocks) < ROOM.max_blocks:
                sequence.blocks.extend(draw.choices(range(90), k=1))
            elif event < 0.35:
                sequence.blocks = draw.choices(range(90), k=draw.randint(0, 5))
        if draw.random() < 0.2:
            running = draw.sample(everyone, draw.randint(1, len(everyone)))
        columns = tables.of(running)
        assert columns.shape == (ROOM.max_blocks, len(running))
        for column, sequence in enumerate(running):
            assert columns[: len(sequence.blocks), column].tolist() == sequence.blocks


def test_sampling_arrays_follow_the_parameters_of_each_place() -> None:
    arrays, vocab_size = SamplingArrays(50), 50
    nucleus, greedy = SamplingParams(top_p=0.5, temperature=0.7), SamplingParams(temperature=0.0)
    for params in ([nucleus, greedy], [nucleus, greedy], [greedy, nucleus], [greedy], [SamplingParams(top_k=7)] * 3):
        made = arrays.of(list(params))
        assert made["greedy"].tolist() == [own.greedy for own in params]
        assert made["temperature"][:, 0].tolist() == pytest.approx([own.temperature or 1.0 for own in params])
        assert made["top_p"].tolist() == pytest.approx([1.0 if own.greedy else own.top_p for own in params])
        assert made["top_k"].tolist() == [own.top_k or vocab_size for own in params]
        assert (made["log_min_p"] == -np.inf).all()


def test_the_requests_of_a_step_follow_who_is_in_it_and_where() -> None:
    last = LastRequests()
    plain, biased = entry_of(1), entry_of(2, SamplingParams(logit_bias=((3, 1.0),), logprobs=0))
    twin = entry_of(1)  # of an equal request, under the same name
    for entries in ([plain], [plain, biased], [plain, biased], [biased, plain], [twin], []):
        found, expected = last.of(entries), StepRequests([entry.sequence for entry in entries])
        assert found.sequences == expected.sequences
        assert found.params == expected.params
        assert (found.edited, found.reported) == (biased in entries, biased in entries)


def test_a_plain_step_has_the_rows_that_a_step_with_drafts_has_for_the_same_entries() -> None:
    entries = [entry_of(number) for number in range(3)]
    for number, entry in enumerate(entries):
        entry.sequence.tokens += range(number)
        entry.sequence.num_computed = len(entry.sequence.tokens) - 1
    drafting = entry_of(7)._replace(max_drafts=2)
    drafting.sequence.num_computed = 2
    nothing = np.empty(0, np.int64)
    plain = build_step_input(entries, np.zeros(3, np.int64), nothing, 4)
    other = build_step_input([*entries, drafting], np.array([0, 0, 0, 2]), np.array([8, 9]), 4)
    for field in fields(plain):
        own, among = getattr(plain, field.name), getattr(other, field.name)
        if isinstance(own, np.ndarray):
            assert own.dtype == among.dtype == np.int64
            assert own.tolist() == among[: len(own)].tolist(), field.name
        elif isinstance(own, tuple):
            assert own == among[: len(own)], field.name
