"""One kit of checks for every way to compute a step over the vocabulary: torch's operators, the CPU kernels, and
Triton's, of captured steps.

A test runs each of `CHECKS` on each of `ARITHMETICS`; what Triton's interpreter computes in minutes has one kind of
drafts a check, all kinds in turn. Tokens and drafts are those of torch's operators, values within
`TOLERANCE` of theirs; or both are what a definition says.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from speculative.config import LogprobsMode
from speculative.gpu.operators import GraphOperators
from speculative.gpu.row_edits import EditLogits
from speculative.gpu.row_judge import RowJudge
from speculative.kernels.chosen import ChosenKernels
from speculative.request import SamplingParams
from speculative.sampling.coupled import NoiseRows
from speculative.sampling.logits_processors import adjust
from speculative.sampling.probs import SamplingRows
from speculative.selfcheck.terms import TermScope
from speculative.state.batch import row_contexts
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.edited_rows import ALL, EOS, LARGEST, edited, input_of, logits_of, make_edits, masks_of, small_steps
from tests.support.judged_rows import (
    COUNTS,
    KINDS,
    TOLERANCE,
    VOCABULARY,
    Scene,
    assert_equal,
    filtered,
    generator,
    parts,
    scene,
    step_of,
    torch_judge,
)
from tests.support.torch_operators import TorchJudge
from tests.support.triton_interpreter import poisoned_workspaces
from tests.support.vocabulary import CPU_OPS

BLOCK = 64  # tokens of a block of Triton's kernels, here: the last one is not full
NO_FILTER = (0.0, 0, 1.0)  # min_p, top_k, top_p
FILTERS = ((0.0, 5, 1.0), NO_FILTER, (0.0, 0, 0.7), (0.05, 20, 0.9))
CPU = torch.device("cpu")
EDGE = 1e-7  # of a token's mass
TORCH = VocabularyOps()
SIZES = (1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1)
MODES: tuple[LogprobsMode, ...] = ("raw_logprobs", "processed_logprobs")


@dataclass(frozen=True)
class Arithmetic:
    """One way to compute a step.

    ops: over the vocabulary. make_judge: of rows, for a mode of logprobs. edit: of captured steps' logits; None where
    steps are not captured. kinds: of drafts, in scenes that have one after the other.
    """

    ops: VocabularyOps
    make_judge: Callable[[LogprobsMode], RowJudge]
    edit: EditLogits | None = None
    kinds: tuple[str, ...] = tuple(KINDS)

    @property
    def judge(self) -> RowJudge:
        return self.make_judge("raw_logprobs")


@contextmanager
def _by_triton() -> Iterator[Arithmetic]:
    """In its interpreter, with small blocks."""
    from speculative.gpu import triton_edits, triton_filters, triton_judge

    changes: list[tuple[Any, str, Any]] = [(triton_filters, "_TILE", 256), (triton_judge, "BLOCK", BLOCK)]
    changes += [(triton_edits, "BLOCK", BLOCK), (triton_edits, "_CELLS", 16)]
    with ExitStack() as stack:
        for module, name, value in changes:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(poisoned_workspaces())
        operators = GraphOperators.by_triton(ChosenKernels())
        yield Arithmetic(operators.vocabulary, operators.judge, operators.edit)


@contextmanager
def _eager(ops: VocabularyOps) -> Iterator[Arithmetic]:
    yield Arithmetic(ops, lambda mode: TorchJudge(ops, mode))


ARITHMETICS: dict[str, Callable[[], AbstractContextManager[Arithmetic]]] = {
    "torch": lambda: _eager(TORCH),
    "kernels": lambda: _eager(CPU_OPS),
    "captured, triton": _by_triton,
}


# -- the judge of rows: filters, verification, terms, invariants, logprobs --------------------------------------------


def rows_are_judged_as_by_torch_with_filters_beside_rows_without(one: Arithmetic) -> None:
    for kind in one.kinds:
        counts = COUNTS if kind == "sub-vocabulary" else (2, 0, 3, 1, 2)
        given = scene(kind, counts)
        without, found = assert_equal(one.judge, given), assert_equal(one.judge, filtered(given, *FILTERS))
        assert 0 < int(without["num_accepted"].sum()) < sum(counts)
        assert not without["broken"].any() and not found["broken"].any()
        assert found["expected"].tolist() != without["expected"].tolist()
        own = [entry for entry in range(len(counts)) if FILTERS[entry % len(FILTERS)] == NO_FILTER]
        for name in ("num_accepted", "token_ids", "expected"):
            assert torch.equal(found[name][own], without[name][own]), f"{name}: they are their own rows' alone"


def every_mode_of_logprobs_is_torchs(one: Arithmetic) -> None:
    for number, mode in enumerate((*MODES, None)):
        for checked in (False, True):
            used, kind = mode or "raw_logprobs", KINDS[(number + checked) % len(KINDS)]
            wanted = {"checked": torch.tensor([checked]), "reported": torch.tensor([mode is not None])}
            given = filtered(scene(kind, (2, 1)), (0.1, 0, 0.8), NO_FILTER)
            assert_equal(one.make_judge(used), given.with_rows(**wanted), used)


def vocabularies_of_any_size_are_judged_as_by_torch(one: Arithmetic) -> None:
    """One token, and sizes around the edges of blocks; with an entry that is coupled, and one that is filtered."""
    for number, size in enumerate(SIZES):
        for kind in one.kinds if size == BLOCK + 1 else KINDS[number % 3 :][:1]:
            given = filtered(scene(kind, (2, 0, 1), size), NO_FILTER, *FILTERS[2:])
            given.rows.coupled[0] = True
            assert_equal(one.judge, given)


def half_precision_logits_are_read_as_they_are(one: Arithmetic) -> None:
    given = scene("dense", (2, 0, 1, 1))
    for each in (given, filtered(given, *FILTERS)):
        assert_equal(one.judge, replace(each, logits=each.logits.half()))


def coupled_entries_are_judged_as_by_torch(one: Arithmetic) -> None:
    for kind, every in (*((kind, 2) for kind in one.kinds), ("sub-vocabulary", 1)):
        given = filtered(scene(kind, (2, 1, 3)), NO_FILTER, (0.0, 5, 1.0))
        given.rows.coupled[:] = torch.arange(3) % every == 0
        given.logits[0, given.rows.drafts[0]] = 9.0  # so that one of them survives
        plain = parts(one.judge, given.with_rows(coupled=torch.zeros(3, dtype=torch.bool)))
        found = assert_equal(one.judge, given)
        assert not found["broken"].any() and found["num_accepted"][0] > 0
        others = ~given.rows.coupled
        for name in ("num_accepted", "token_ids", "expected"):
            assert torch.equal(found[name][others], plain[name][others])
        assert not torch.equal(found["expected"], plain["expected"])


def ties_at_the_edge_of_a_filter_stay(one: Arithmetic) -> None:
    """Two tokens of five tie for the second place."""
    given = scene("point mass", (0,) * 12)
    given.logits[:] = -torch.inf
    possible = torch.tensor([3, BLOCK - 1, BLOCK, 2 * BLOCK + 5, VOCABULARY - 2])
    given.logits[:, possible] = torch.tensor([0.0, 3.0, 2.0, 2.0, 1.0])
    given = filtered(given.with_rows(greedy=torch.zeros(12, dtype=torch.bool)), (0.0, 2, 1.0), (0.0, 0, 0.7))
    given.rows.sample_uniforms[:] = (torch.arange(12) + 0.5) / 12
    found = assert_equal(one.judge, given)
    assert set(found["token_ids"].tolist()) == set(possible[1:4].tolist())
    assert not found["broken"].any()


def rows_that_are_no_distribution_are_reported_and_harm_no_other(one: Arithmetic) -> None:
    for kind in one.kinds:
        filters = FILTERS if kind == "dense" else (NO_FILTER, *FILTERS)
        given = filtered(scene(kind, (2, 0, 1, 2, 1)), *filters).with_rows(reported=torch.tensor([False]))
        logits, (first, second, third) = given.logits.clone(), given.rows.first_rows[[0, 2, 3]].tolist()
        logits[first, 70], logits[second, 70], logits[third] = torch.nan, torch.inf, -torch.inf
        damaged = replace(given, logits=logits)
        sound, found, theirs = parts(one.judge, given), parts(one.judge, damaged), parts(torch_judge(), damaged)
        assert found["broken"].tolist() == theirs["broken"].tolist()
        assert found["broken"][[first, second, third]].tolist() == [1, 1, 2]
        assert ((found["token_ids"] >= 0) & (found["token_ids"] < VOCABULARY)).all()
        for name in ("num_accepted", "token_ids", "expected"):
            assert torch.equal(found[name][[1, 4]], sound[name][[1, 4]]), name
        # q of the last token, too: the damaged rows' is any.
        for check in found.keys() - {"num_accepted", "token_ids", "drafts", "broken", "expected", "last_probs"}:
            torch.testing.assert_close(found[check], theirs[check], **TOLERANCE, equal_nan=True, msg=check)


def a_q_that_is_no_distribution_is_reported(one: Arithmetic) -> None:
    for kind in ("dense", "sub-vocabulary"):
        for damage in ("no number", "negative", "too much", "no mass on the draft"):
            given = scene(kind, (2, 0, 2)).with_rows(reported=torch.tensor([False]))
            assert given.sampled is not None
            place = given.sampled.places[1]
            own, column = given.sampled.probs[place], given.sampled.own_columns[place]
            if damage == "no number":
                own[0 if column else 1] = torch.nan
            elif damage == "negative":
                own[(column + 1) % len(own)] = -1e-6
            elif damage == "too much":
                own *= 1.1
            else:
                own[column] = 0.0
                own /= own.sum()
            found, theirs = (parts(judge, given) for judge in (one.judge, torch_judge()))
            assert found["broken"].tolist() == theirs["broken"].tolist()
            assert found["broken"][1] == (4 if damage == "no mass on the draft" else 3)
            for check in found.keys() - {"num_accepted", "token_ids", "drafts", "broken"}:
                torch.testing.assert_close(found[check], theirs[check], **TOLERANCE, equal_nan=True, msg=check)


def the_one_token_that_is_left_is_drawn(one: Arithmetic) -> None:
    """Whatever the uniform; the only token lies in a block's first, middle, or last place."""
    for token in (0, BLOCK - 1, BLOCK, VOCABULARY - 1):
        given = scene("point mass", (0, 0, 0))
        given.logits[:] = -torch.inf
        given.logits[:, token] = -30.0
        given.rows.sample_uniforms[:] = torch.tensor([1e-300, 0.5, 1 - 2**-53], dtype=torch.float64)
        assert assert_equal(one.judge, given)["token_ids"].tolist() == [token] * 3


def a_token_without_mass_is_never_drawn(one: Arithmetic) -> None:
    """Uniforms at and around every edge of the distribution, most tokens of which have no mass."""
    given = scene("point mass", (0,) * 64)
    given.rows.temperature[:], given.rows.greedy[:] = 1.0, False
    possible = torch.tensor([3, BLOCK - 1, BLOCK, 2 * BLOCK + 5, VOCABULARY - 2])
    given.logits[:] = -torch.inf
    given.logits[:, possible] = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]).log()
    p = torch.softmax(given.logits[0], dim=-1).double()
    edges = p[possible].cumsum(0) / p.sum()
    middles = edges - p[possible] / 2
    around = torch.cat([middles, *(edges + step * 2.0**-53 for step in range(-6, 7))])[:64].clamp(2**-60, 1 - 2**-53)
    given.rows.sample_uniforms[:] = around
    found = parts(one.judge, given)
    assert set(found["token_ids"].tolist()) == set(possible.tolist())
    assert not found["broken"].any()


def uniforms_meet_the_edges_of_equal_tokens(one: Arithmetic) -> None:
    """Just below and above edges that lie at whole multiples of one mass: of p, of what a rejection leaves of it, and
    of p where it leaves nothing. Masses that were added up in float32 would be several times as far off."""
    possible = (torch.arange(VOCABULARY) * 7 % 11 > 2).nonzero()[:, 0]
    draft = possible[50]
    for kind, num_drafts in (("point mass", 0), ("point mass", 1), ("dense", 1)):
        given = scene(kind, (num_drafts,) * 6)
        given = given.with_rows(checked=torch.tensor([False]), reported=torch.tensor([False]))
        given.rows.temperature[:], given.rows.greedy[:] = 1.0, False
        given.rows.accept_uniforms[:] = 1 - 2**-20
        given.logits[:] = -torch.inf
        given.logits[:, possible] = 0.3
        left = possible
        if num_drafts:
            given.rows.drafts[::2] = draft
            left = possible[possible != draft] if given.sampled is None else possible
        if given.sampled is not None:  # everywhere a little more than p
            given.sampled.probs[:] = 0.0
            given.sampled.probs[:, possible] = (1 + 4e-6) / len(possible)
            given.sampled.own_columns[:] = draft
        edges = torch.linspace(1, len(left) - 1, 3, dtype=torch.float64).round()
        uniforms = torch.cat([edges - EDGE, edges + EDGE]) / len(left)
        given.rows.sample_uniforms[given.rows.first_rows] = uniforms
        found = parts(one.judge, given)
        assert not found["num_accepted"].any() and not found["broken"].any()
        assert found["token_ids"].tolist() == left[torch.cat([edges - 1, edges]).long()].tolist()


def emitted_tokens_follow_p_exactly(one: Arithmetic) -> None:
    """One draft: over all drafts with their chances, accepted or replaced, tokens come as often as p has it. The
    replacements are enumerated by uniforms on a grid, so they are exact up to the grid."""
    size, num_draws = 5, 10
    for kind in one.kinds:
        given = scene(kind, (1,), size)
        q, p = given.q_at(0).double(), torch.softmax(given.logits[0] / given.rows.temperature[0], dim=-1).double()
        drafts = q.nonzero()[:, 0].repeat_interleave(num_draws)
        survival = (p / q).clamp(max=1.0)[drafts]
        grid = (torch.arange(num_draws, dtype=torch.float64) + 0.5) / num_draws
        emitted = torch.zeros(size, dtype=torch.float64)
        for coins, weights, accepted in ((survival * 0.999, survival, 1.0), (survival * 1.001, 1 - survival, 0.0)):
            chosen = (weights > 0).nonzero()[:, 0][:: num_draws if accepted else 1]
            num_entries = len(chosen)
            if num_entries == 0:
                continue
            rows = scene(kind, (1,) * num_entries, size).rows._replace(
                drafts=torch.stack([drafts[chosen], torch.full_like(chosen, -1)], dim=1).flatten(),
                greedy=given.rows.greedy.repeat(num_entries),
                temperature=given.rows.temperature.repeat(num_entries, 1),
                accept_uniforms=coins[chosen].repeat_interleave(2),
                sample_uniforms=grid.repeat(len(drafts))[chosen].repeat_interleave(2),
            )
            sampled, first = given.sampled, drafts[chosen]
            if sampled is not None:
                sampled = sampled._replace(
                    probs=sampled.probs[sampled.places].repeat(num_entries, 1),
                    places=torch.arange(num_entries),
                    own_columns=first if sampled.columns is None else sampled.columns[first].long(),
                    mass_before=torch.zeros(num_entries, dtype=torch.float64),
                )
            found = parts(one.judge, Scene(given.logits.repeat(num_entries, 1), rows, sampled))
            assert found["num_accepted"].tolist() == [accepted] * num_entries
            tokens = first if accepted else found["token_ids"].long()
            emitted.index_add_(0, tokens, (q[drafts] * weights)[chosen] / (1 if accepted else num_draws))
        assert (emitted - p).abs().max() < 0.5 / num_draws  # half a cell an edge


# -- edits of logits --------------------------------------------------------------------------------------------------


def edits_are_the_plain_ones(one: Arithmetic) -> None:
    """Smaller and larger steps in turn in the same buffers: nothing is left of the one before."""
    if one.edit is None:
        return
    for size, dtype in ((64, torch.float32), (203, torch.bfloat16)):
        edits = make_edits(one.edit, size)
        for number, (drafted, bucket) in enumerate(small_steps()):
            logits, masks = logits_of(drafted, size, number, dtype), masks_of(drafted, size, number)
            expected = adjust(logits.float(), row_contexts(input_of(drafted), masks), EOS)
            found = edited(edits, drafted, logits, bucket, masks)
            assert torch.equal(found, expected), number
            assert not torch.equal(found, logits.float())


def edited_rows_of_no_numbers_stay_so(one: Arithmetic) -> None:
    if one.edit is None:
        return
    logits = logits_of(ALL, 64)
    logits[0], logits[9] = torch.nan, torch.inf
    found = edited(make_edits(one.edit, 64), ALL, logits, LARGEST, masks_of(ALL, 64))
    assert found[0].isnan().all() and found[9].amax() == torch.inf
    others = [row for row in range(len(logits)) if row not in (0, 9)]
    expected = adjust(logits, row_contexts(input_of(ALL), masks_of(ALL, 64)), EOS)
    assert torch.equal(found[others], expected[others])


# -- filters, noise and draws, by themselves --------------------------------------------------------------------------

PARAMS = (
    SamplingParams(), SamplingParams(top_k=1), SamplingParams(top_k=40, temperature=1.3), SamplingParams(min_p=0.1),
    SamplingParams(top_k=700), SamplingParams(temperature=0), SamplingParams(top_p=0.9),
    SamplingParams(top_p=0.05, temperature=0.7), SamplingParams(top_p=1e-6), SamplingParams(top_p=0.999),
    SamplingParams(top_k=50, top_p=0.8), SamplingParams(min_p=0.01, top_k=30, top_p=0.7, temperature=1.5),
)  # fmt: skip
NO_NUCLEUS = 6  # the first ones
EDGE_MASS = 1e-4  # of tokens at a nucleus' edge, where the mass before them and top_p are the same to rounding


def filters_keep_the_tokens_that_torchs_keep(one: Arithmetic) -> None:
    for size, spreads in ((1, (3.0,)), (BLOCK, (0.1, 12.0)), (400, (0.1, 3.0, 12.0))):
        for spread in spreads:
            logits = torch.randn(len(PARAMS), size, generator=generator(15)) * spread
            logits[:, ::7] = logits[:, :1].clone()  # ties
            logits[:, 5::11] = -torch.inf
            before, rows = logits.clone(), SamplingRows.build(PARAMS, size, CPU)
            ours, theirs = one.ops.process(logits, rows), TORCH.process(logits, rows)
            assert torch.equal(logits, before)
            differ = (ours > -torch.inf) != (theirs > -torch.inf)
            kept = torch.maximum(ours, theirs)
            assert torch.equal(kept[ours > -torch.inf], ours[ours > -torch.inf])
            assert (torch.softmax(kept, dim=-1) * differ).sum(dim=-1).max() < EDGE_MASS
            assert not differ[:NO_NUCLEUS].any(), "no nucleus, no rounding"


def filtered_rows_of_no_numbers_stay_so(one: Arithmetic) -> None:
    logits = torch.randn(4, 100, generator=generator(16))
    rows = SamplingRows.build([SamplingParams(top_k=5, top_p=0.9, min_p=0.1)] * 4, 100, CPU)
    sound = one.ops.process(logits, rows)
    logits[1, 40], logits[3] = torch.nan, -torch.inf
    found = one.ops.process(logits, rows)
    assert found[1].isnan().any(), "to be found by the invariants, not hidden by filters"
    assert not (found[3] > -torch.inf).any()
    assert torch.equal(found[[0, 2]], sound[[0, 2]]) and found[[0, 2]].isfinite().sum(dim=-1).max() <= 5


def drafts_are_chosen_with_the_noise_of_their_tokens(one: Arithmetic) -> None:
    for ids in (None, torch.randperm(VOCABULARY, generator=generator(0))[:75]):
        width = VOCABULARY if ids is None else len(ids)
        probs = torch.softmax(torch.randn((9, width), generator=generator(1)), dim=-1)
        probs[:, 3] = 0.0
        columns, coupled = torch.full((9,), -7), torch.arange(9) % 3 != 2
        seeds = torch.randint(-(2**63), 2**63 - 1, (9,), generator=generator(2))
        rows = NoiseRows(coupled, seeds, torch.tensor([0, 1, 2, 3, 2**31 + 1, 2**32 - 1, 6, 7, 8]))
        expected = TORCH.choose(probs, columns, rows, ids, VOCABULARY)
        assert one.ops.choose(probs, columns.clone(), rows, ids, VOCABULARY).tolist() == expected.tolist()
        assert (expected[~coupled] == -7).all() and (expected[coupled] >= 0).all()


def draws_are_torchs(one: Arithmetic) -> None:
    for size in (1, 255, 256, 257, 1000):
        distributions = torch.rand(100, size, generator=generator(3)).pow(8)
        distributions[:, torch.rand(size, generator=generator(4)) < 0.3] = 0
        distributions[:, size // 2] = 0.5
        uniforms = torch.rand(100, generator=generator(5), dtype=torch.float64)
        assert torch.equal(one.ops.draw(distributions, uniforms), TORCH.draw(distributions, uniforms))


def terms_are_torchs(one: Arithmetic) -> None:
    """Some entries do not count; p is NaN in one row and 0 at a draft, or q of a draft that survives is NaN.

    What replaces a rejected draft without q is nobody's: an invariant fails its request.
    """
    for kind in one.kinds:
        for damage in ("none", "p", "q"):
            step = step_of(scene(kind))
            judged = step.judged.nonzero()[:, 0].tolist()
            if damage == "p":
                step.probs[judged[2], 17] = torch.nan
                step.probs[judged[4], step.drafts[judged[4]]] = 0.0
            if damage == "q" and kind != "point mass":
                step.draft_probs.probs[step.packed[judged[0]], 3] = torch.nan  # type: ignore[union-attr]
            verified = one.ops.verify_token_wise(step)
            emitted = one.ops.emitted_at_rows(verified, step)
            scope = TermScope(torch.arange(len(step.counts)) % 4 > 0)
            ours, theirs = (ops.take_terms(step, verified, emitted, scope) for ops in (one.ops, TORCH))
            sums = dict(zip(theirs.checks, theirs.sums, strict=True))
            assert set(ours.checks) == set(sums)
            for check, row in zip(ours.checks, ours.sums, strict=True):
                torch.testing.assert_close(row, sums[check], **TOLERANCE, msg=check)
            torch.testing.assert_close(ours.achievable, theirs.achievable, **TOLERANCE)
            torch.testing.assert_close(ours.rows, theirs.rows, **TOLERANCE, equal_nan=True)


def the_q_of_rounds_is_torchs(one: Arithmetic) -> None:
    for kind in ("dense", "sub-vocabulary"):
        step = step_of(scene(kind))
        verified, judged = TORCH.verify_token_wise(step), step.judged
        ours, theirs = (ops.round_probs(step, verified, places=True) for ops in (one.ops, TORCH))
        for found, expected, where in zip(ours, theirs, (judged, slice(None), judged), strict=True):
            assert found is not None and expected is not None
            torch.testing.assert_close(found[where].double(), expected[where].double(), **TOLERANCE)
        assert one.ops.round_probs(step, verified, places=False)[2] is None
        assert float(ours[0][judged].max()) > 0


CHECKS: tuple[Callable[[Arithmetic], None], ...] = (
    rows_are_judged_as_by_torch_with_filters_beside_rows_without, every_mode_of_logprobs_is_torchs,
    vocabularies_of_any_size_are_judged_as_by_torch, half_precision_logits_are_read_as_they_are,
    coupled_entries_are_judged_as_by_torch, ties_at_the_edge_of_a_filter_stay,
    rows_that_are_no_distribution_are_reported_and_harm_no_other, a_q_that_is_no_distribution_is_reported,
    the_one_token_that_is_left_is_drawn, a_token_without_mass_is_never_drawn, uniforms_meet_the_edges_of_equal_tokens,
    emitted_tokens_follow_p_exactly, edits_are_the_plain_ones, edited_rows_of_no_numbers_stay_so,
    filters_keep_the_tokens_that_torchs_keep, filtered_rows_of_no_numbers_stay_so,
    drafts_are_chosen_with_the_noise_of_their_tokens, draws_are_torchs, terms_are_torchs, the_q_of_rounds_is_torchs,
)  # fmt: skip
