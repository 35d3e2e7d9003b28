"""Suffix drafting against the loop one would write first, and what it may remember of others."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speculative.config import DrafterConfig
from speculative.drafting.weightless import LookupDrafter
from speculative.lookup import suffix
from speculative.lookup.ngram import NgramDrafter, NgramOptions
from speculative.lookup.suffix import PastOutputs, SuffixDrafter, SuffixOptions, SuffixTree
from speculative.request import Request, SamplingParams
from speculative.state.sequence import Sequence
from tests.speculative.lookup.test_ngram import naive_continuation
from tests.support.engines import markov_engine, run
from tests.support.markov_chain import sigmas
from tools.faults.toy import engine_over

Texts = list[list[int]]
SMALL = {"kind": "suffix", "num_draft_tokens": 5, "suffix_depth": 4, "suffix_min_match": 1, "suffix_max_tokens": 60}


def config(**changes: Any) -> DrafterConfig:
    return DrafterConfig.of(**{**SMALL, **changes})


def made(setting: DrafterConfig) -> SuffixDrafter:
    return SuffixDrafter(setting.options_of(SuffixOptions), setting.num_draft_tokens)


# -- the search one would write first ------------------------------------------------------------------------------


def followers(texts: Texts, context: list[int]) -> dict[int, tuple[int, int]]:
    """What followed a context: how often, and where last."""
    found: dict[int, tuple[int, int]] = {}
    begin = 0
    for text in texts:
        for end in range(len(context), len(text)):
            if text[end - len(context) : end] == context:
                count, _ = found.get(text[end], (0, 0))
                found[text[end]] = (count + 1, begin + end)
        begin += len(text)
    return found


def naive_match(texts: Texts, tail: list[int], least: int) -> int:
    return next((n for n in range(len(tail), least - 1, -1) if followers(texts, tail[len(tail) - n :])), 0)


def naive_draft(sources: list[Texts], tokens: list[int], most: int, setting: DrafterConfig) -> list[int]:
    """`sources`, the best first: the texts of the sequence itself, then those of others."""
    options = setting.options_of(SuffixOptions)
    tail, least = tokens[-options.suffix_depth :], options.suffix_min_match
    matches = [naive_match(texts, tail, least) for texts in sources]
    texts, match = max(zip(sources, matches, strict=True), key=lambda pair: pair[1])
    drafts: list[int] = []
    probability = 1.0
    while match:
        context, least_left, path = (tail + drafts)[-match:], options.suffix_min_probability / probability, 1.0
        while len(drafts) < most and len(context) < options.suffix_depth + setting.num_draft_tokens:
            after = followers(texts, context)
            if not after:
                break
            token = max(after, key=lambda token: after[token])
            # In the drafter's order of operations: a product may be the bound but for its rounding.
            shares = after[token][0], sum(count for count, _ in after.values())
            if path * shares[0] / shares[1] < least_left:
                return drafts
            path *= shares[0] / shares[1]
            drafts.append(token)
            context.append(token)
        probability *= path
        if len(drafts) == most:
            break
        match = naive_match(texts, (tail + drafts)[-len(tail) :], least)
    return drafts


def sequence(
    tokens: list[int], request_id: str = "a", num_prompt: int = 1, seed: int = 0, salt: str = "", **params: Any
) -> Sequence:
    request = Request(request_id, tuple(tokens[:num_prompt]), SamplingParams(**params), seed=seed, cache_salt=salt)
    return Sequence(request, tokens=tokens)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(
    tokens=st.lists(st.integers(0, 2), min_size=1, max_size=40),
    others=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=2),
    most=st.integers(1, 5),
    depth=st.integers(2, 6),
    least=st.integers(1, 2),
    probability=st.sampled_from([0.0, 0.3, 0.5, 1.0]),
)
def test_it_drafts_what_the_naive_search_finds(
    tokens: list[int], others: Texts, most: int, depth: int, least: int, probability: float
) -> None:
    setting = config(suffix_depth=depth, suffix_min_match=least, suffix_min_probability=probability)
    drafter = made(setting)
    for number, output in enumerate(others):
        other = sequence([9, *output], f"other {number}", seed=number + 1)
        drafter.draft(other, 5)
        drafter.forget(f"other {number}")
    sources = [[tokens], *([others] if others else [])]
    assert drafter.draft(sequence(tokens), most) == naive_draft(sources, tokens, most, setting)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(runs=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
def test_tokens_may_come_in_runs(runs: Texts) -> None:
    """Drafters that saw the text grow by runs of any length know what those know that see it whole."""
    drafter, ngrams, growing = made(config()), NgramDrafter(NgramOptions(), 5), sequence(runs[0])
    for new in [[], *runs[1:]]:
        growing.tokens += new
        assert drafter.draft(growing, 5) == naive_draft([[growing.tokens]], growing.tokens, 5, config())
        assert ngrams.draft(growing, 5) == naive_continuation(growing.tokens, 5)


def nodes(tree: SuffixTree) -> Iterator[tuple[Any, int]]:
    """Every node but the root, with the tokens on the way to its end."""
    waiting = [(child, child.length) for child in tree._root.children.values()]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting += [(child, depth + child.length) for child in node.children.values()]


# -- what it remembers of others -----------------------------------------------------------------------------------


def finish(drafter: SuffixDrafter, output: list[int], request_id: str = "b", **rest: Any) -> None:
    """Let a request write something and leave."""
    drafter.draft(sequence([99, *output], request_id, **rest), 0)
    drafter.forget(request_id)


def test_past_outputs_are_drafted_where_the_sequence_itself_says_nothing() -> None:
    drafter = made(config(suffix_min_match=2))
    finish(drafter, [1, 2, 3, 4, 5, 6], seed=1)
    assert drafter.draft(sequence([7, 2, 3]), 3) == [4, 5, 6]
    assert drafter.draft(sequence([2, 3, 8, 2, 3], "c"), 1) == [8], "its own words come first"
    assert drafter.draft(sequence([2, 3, 8, 1, 2, 3], "d"), 1) == [4], "but not before a longer match"
    assert drafter.draft(sequence([99, 1], "e"), 1) == [], "prompts are nobody else's"


def test_a_request_that_has_left_is_only_its_output() -> None:
    drafter = made(config())
    finish(drafter, [4, 5, 6, 7], seed=1)
    drafter.forget("never seen")
    assert not drafter._indexes
    assert drafter.draft(sequence([99], "b", seed=2), 5) == []


def test_what_a_salted_request_wrote_is_drafted_for_nobody_else() -> None:
    drafter = made(config())
    finish(drafter, [1, 2, 3, 4], seed=1, salt="mine")
    assert drafter.draft(sequence([2, 3], "b", seed=2), 5) == [], "accepted drafts would show that somebody wrote it"
    assert drafter.draft(sequence([2, 3], "c", seed=3, salt="other"), 5) == []
    finish(drafter, [1, 2, 3, 5], "e", seed=4)
    assert drafter.draft(sequence([2, 3], "d", seed=5, salt="mine"), 5) == [5], "what all share is shared with it, too"


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    generator = random.Random(0)
    past, stranger = PastOutputs(depth=12, max_tokens=1000), sequence([1], seed=10**6)
    for number in range(300):
        output = [generator.randrange(5) for _ in range(generator.choice([1, 20, 90, 800]))]
        past.remember(sequence([99, *output, 1000 + number], seed=number))
        trees = past.visible_to(stranger)
        assert sum(tree.num_tokens for tree in trees) <= 1000
    assert 1 <= len(trees) <= 2
    assert sum(1 for tree in trees for _ in nodes(tree)) <= (2 + 12) * 1000
    kept = [token for tree in trees for token in tree._text if token >= 1000]
    assert max(kept) == 1299
    assert set(kept) == set(range(min(kept), 1300))
    nothing = PastOutputs(depth=12, max_tokens=0)
    nothing.remember(sequence([99, 1, 2, 3]))
    assert not nothing.visible_to(stranger)


def test_text_drawn_with_the_same_seed_is_not_looked_at() -> None:
    drafter = made(config())
    finish(drafter, [1, 2, 3, 4], seed=7)
    assert drafter.draft(sequence([2, 3], seed=7), 5) == []
    assert drafter.draft(sequence([2, 3], "greedy", seed=7, temperature=0), 5) == [4]
    assert drafter.draft(sequence([2, 3], "other", seed=8), 5) == [4]
    greedy = made(config())
    finish(greedy, [1, 2, 3, 4], seed=7, temperature=0)
    assert greedy.draft(sequence([2, 3], seed=7), 5) == [4], "no random number made this text"


# -- in the engine -------------------------------------------------------------------------------------------------


NUM_MARKS = 400


def asked_again(distribution: torch.Tensor) -> np.ndarray:
    """What requests say when each is asked a third time with its own seed.

    The second time is the first with drafts, and so the first that accept uniforms decide; the third meets those accept
    uniforms again. Each first says a word that no other says, so that it knows its own texts by it."""
    rows = distribution.log().expand(4 + 2 * NUM_MARKS, 4)
    table = torch.full((4 + 2 * NUM_MARKS, 4 + 2 * NUM_MARKS), -1e9)
    table[:, :4] = rows
    asking, marks = torch.arange(4, 4 + NUM_MARKS), torch.arange(4 + NUM_MARKS, 4 + 2 * NUM_MARKS)
    table[asking] = -1e9
    table[asking, marks] = 0.0  # a mark follows each prompt, and then the distribution
    engine = engine_over(table, num_drafts=4)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    said = []
    for group in range(8):
        engine.parts.eager.drafter = LookupDrafter(lambda: made(config(suffix_max_tokens=10**6)))
        for time in ("first", "second", "third"):
            for mark in asking.tolist():
                engine.add(Request(f"{time} {mark}", (mark,), params, seed=10_000 * group + mark))
            answers = run(engine)
        said += [answers[f"third {mark}"].token_ids[1:] for mark in asking.tolist()]
    return np.array(said)


def test_the_distribution_is_kept_where_a_seed_comes_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The twin is shown what it drew before: the accept uniforms that judge those drafts are the accept uniforms that
    made them."""
    distribution = torch.tensor([0.5, 0.3, 0.15, 0.05])
    joint = torch.einsum("a,b,c->abc", distribution, distribution, distribution).double().numpy()
    assert sigmas(asked_again(distribution), joint) < 5
    monkeypatch.setattr(suffix, "_is_drawn", lambda sequence: False)
    assert sigmas(asked_again(distribution), joint) > 5


def test_a_second_asking_is_drafted_from_the_first_answer() -> None:
    cycle = torch.arange(1, 41).remainder(40)  # no token comes twice in an answer, so only others can tell
    engine = markov_engine(cycle, drafter=DrafterConfig(kind="suffix", num_draft_tokens=4))
    params = SamplingParams(max_tokens=30, temperature=0)
    engine.add(Request("first", (0,), params))
    assert run(engine)["first"].num_drafted == 0
    engine.add(Request("second", (0,), params))
    second = run(engine)["second"]
    assert second.token_ids == [*range(1, 31)]
    assert second.num_accepted == second.num_drafted >= 20


@pytest.mark.parametrize("drafter", [made(DrafterConfig(kind="suffix")), NgramDrafter(NgramOptions(ngram_min=1), 4)])
def test_growing_a_long_text_token_by_token_stays_fast(drafter: SuffixDrafter | NgramDrafter) -> None:
    """A search through the text for each token would need minutes for this."""
    generator, growing = random.Random(0), sequence([1])
    for _ in range(20_000):
        growing.tokens.append(generator.randrange(50))
        assert len(drafter.draft(growing, 4)) <= 4
