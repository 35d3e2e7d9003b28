"""Prompt lookup against the loop one would write first."""

from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.config import DrafterConfig
from speculative.drafting.weightless import make_weightless
from speculative.lookup.ngram import NgramDrafter, NgramOptions
from speculative.request import Request, SamplingParams
from speculative.state.batch import Batch, Entry
from speculative.state.sequence import Sequence

SIZES = range(4, 1, -1)


def naive_continuation(tokens: list[int], max_tokens: int, sizes: range = SIZES) -> list[int]:
    """Look back from the end for the longest suffix that occurred before; go on as if the text repeated itself."""
    for size in sizes:
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for offset in range(max_tokens):
                    text.append(text[end + offset])
                return text[len(tokens) :]
    return []


def sequence(request_id: str, tokens: list[int]) -> Sequence:
    return Sequence(Request(request_id, (0,), SamplingParams(), seed=0), tokens=tokens)


def continuation(tokens: list[int], max_tokens: int, sizes: range = SIZES) -> list[int]:
    drafter = NgramDrafter(NgramOptions(ngram_max=sizes[0], ngram_min=sizes[-1]), max_tokens)
    return drafter.draft(sequence("a", tokens), max_tokens)


@settings(max_examples=500, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    least=st.sampled_from([0, 126, 254, 55_294, 65_534, 1_000_000]),
    max_tokens=st.integers(0, 8),
    sizes=st.sampled_from([range(4, 1, -1), range(4, 0, -1), range(1, 0, -1), range(3, 2, -1), range(10, 2, -1)]),
)
def test_it_drafts_what_the_naive_search_finds(tokens: list[int], least: int, max_tokens: int, sizes: range) -> None:
    """Tokens around those from which on their characters take more bytes, or are none of Unicode's."""
    tokens = [least + token for token in tokens]
    assert continuation(tokens, max_tokens, sizes) == naive_continuation(tokens, max_tokens, sizes)


def test_a_batch_is_drafted_entry_by_entry_within_what_fits() -> None:
    drafter = make_weightless(DrafterConfig.of(ngram_max=4, ngram_min=2))
    looping, other = sequence("a", [1, 2, 3] * 3), sequence("b", [7, 8, 9])
    entries = (
        Entry(looping, num_known=1, max_drafts=2, samples=True),
        Entry(other, num_known=1, max_drafts=4, samples=True),
        Entry(sequence("c", [5, 6] * 3), num_known=1, max_drafts=1, samples=True),
        Entry(sequence("d", [5, 6] * 3), num_known=6, max_drafts=0, samples=False),
    )
    output = drafter.propose(Batch(entries))
    assert output.counts.tolist() == [2, 0, 1, 0]
    assert output.token_ids.tolist() == [1, 2, 5]
    reversed_output = drafter.propose(Batch(entries[::-1]))
    assert reversed_output.token_ids.tolist() == [5, 1, 2], "the order of the batch is the order of the drafts"
    assert drafter.propose(Batch((entries[0]._replace(max_drafts=0),))).counts.tolist() == [0]


def test_a_new_request_of_an_old_name_knows_nothing_of_it() -> None:
    drafter = NgramDrafter(NgramOptions(ngram_max=4, ngram_min=2), 3)

    def drafts(tokens: list[int]) -> list[int]:
        return drafter.draft(sequence("a", tokens), 3)

    assert drafts([1, 2, 3, 1, 2]) == [3, 1, 2]
    drafter.forget("a")
    assert drafts([4, 5, 6, 7, 1, 2]) == []
    drafter.forget("a")
    drafter.forget("never seen")
