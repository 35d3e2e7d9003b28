"""Judging rows from their logits: Triton's kernels (in Triton's interpreter) against torch's operators, and enumeration."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.gpu.row_judge import DrawnFrom, RowFields, RowJudge, TorchJudge, Wanted, columns_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed: `pip install triton`"
)

BLOCK, VOCABULARY, WIDTH = 64, 203, 75  # the last block is not full
COUNTS = (2, 0, 3, 1, 19, 2)  # drafts of each entry; more than the kernels look at together
NOBODIES, PADDING = 2, 3  # entries with a row of their own and no request, and rows of nobody
KINDS = ("dense", "sub-vocabulary", "point mass")
NEVER = 1 << 20


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Iterator[RowJudge]:
    """Triton's, with workspaces of NaN: what a program does not write, nobody may read."""
    from speculative.gpu import triton_judge

    real = torch.empty
    monkeypatch.setattr(triton_judge, "BLOCK", BLOCK)
    monkeypatch.setattr(triton_judge.torch, "empty", lambda *args, **named: real(*args, **named).fill_(torch.nan))
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        yield triton_judge.TritonJudge()


@dataclass(frozen=True)
class Scene:
    logits: Tensor
    rows: RowFields
    drawn: DrawnFrom | None

    def q_at(self, row: int) -> Tensor:
        """[V] what the draft of a row was drawn from."""
        if self.drawn is None:
            q = torch.zeros(self.logits.shape[1])
            q[self.rows.drafts[row]] = 1.0
            return q
        own = self.drawn.probs[self.drawn.places[self.rows.packed[row]]]
        if self.drawn.ids is None:
            return own
        return torch.zeros(self.logits.shape[1]).index_copy(0, self.drawn.ids, own)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scene(kind: str, counts: tuple[int, ...] = COUNTS, size: int = VOCABULARY, seed: int = 0) -> Scene:
    """Entries with these many drafts each, of which some survive; one in three is greedy; some do not count."""
    random = generator(seed)
    num_drafts, num_rows = sum(counts), sum(counts) + len(counts)
    width = min(WIDTH, size) if kind == "sub-vocabulary" else size
    ids = torch.randperm(size, generator=random)[:width] if kind == "sub-vocabulary" else torch.arange(size)
    stored = torch.softmax(torch.randn((num_drafts + 5, width), generator=random) * 3, dim=-1)
    places = torch.randperm(num_drafts + 5, generator=random)[:num_drafts]
    entries = torch.tensor([e for e, count in enumerate(counts) for _ in range(count + 1)])
    offsets = torch.tensor([o for count in counts for o in range(count + 1)])
    greedy_entries = torch.arange(len(counts)) % 3 == 2
    greedy = greedy_entries[entries]
    judged = offsets < torch.tensor(counts)[entries]
    packed = torch.where(judged, judged.cumsum(0) - 1, NEVER)
    drafts, own_columns = torch.full((num_rows,), -1), torch.zeros(num_drafts + 5, dtype=torch.int64)
    logits = torch.randn((num_rows, size), generator=random) * 3 - 7
    for row in judged.nonzero()[:, 0].tolist():
        place = places[packed[row]]
        if greedy[row]:
            best = stored[place].argmax()
            stored[place] = 0.0
            stored[place, best] = 1.0
        column = int(torch.multinomial(stored[place], 1, generator=random))
        own_columns[place], drafts[row] = column, ids[column]
        logits[row, ids] = torch.where(stored[place] > 1e-6, stored[place].clamp(min=1e-6).log(), logits[row, ids])
        logits[row] += torch.randn(size, generator=random)
        logits[row, drafts[row]] += 2.0  # else hardly any would survive
    temperature = torch.where(greedy, 1.0, 0.3 + torch.rand(num_rows, generator=random))[:, None]
    starts = torch.tensor(counts) + 1
    rows = RowFields(
        temperature=temperature,
        greedy=greedy,
        drafts=drafts,
        packed=packed,
        entries=entries,
        offsets=offsets,
        first_rows=starts.cumsum(0) - starts,
        counts=torch.tensor(counts),
        accept_uniforms=torch.rand(num_rows, generator=random, dtype=torch.float64),
        sample_uniforms=torch.rand(num_rows, generator=random, dtype=torch.float64),
        counted=torch.arange(len(counts)) % 4 != 3,
        judged_rows=judged.nonzero()[:, 0],
    )
    part = (columns_of(ids, size), ids) if kind == "sub-vocabulary" else (None, None)
    return Scene(logits, rows, None if kind == "point mass" else DrawnFrom(stored, places, *part, own_columns))


def padded(given: Scene) -> Scene:
    """With entries and rows of nobody behind, as a captured step has them."""
    rows, extra = given.rows, NOBODIES + PADDING
    num_rows, num_entries = len(rows.drafts), len(rows.counts)
    num_drafts = len(rows.judged_rows)

    def behind(tensor: Tensor, *values: Any) -> Tensor:
        return torch.cat([tensor, torch.tensor(values).to(tensor.dtype).reshape(-1, *tensor.shape[1:])])

    nobodies = list(range(num_entries, num_entries + NOBODIES))
    fields = {
        "temperature": behind(rows.temperature, *[1.0] * extra),
        "greedy": behind(rows.greedy, *[True] * extra),
        "drafts": behind(rows.drafts, *[-1] * extra),
        "packed": behind(rows.packed, *[0] * extra),
        "entries": behind(rows.entries, *nobodies, *[nobodies[-1]] * PADDING),
        "offsets": behind(rows.offsets, *[0] * NOBODIES, *[NEVER] * PADDING),
        "first_rows": behind(rows.first_rows, *[num_rows + index for index in range(NOBODIES)]),
        "counts": behind(rows.counts, *[0] * NOBODIES),
        "accept_uniforms": behind(rows.accept_uniforms, *[0.5] * extra),
        "sample_uniforms": behind(rows.sample_uniforms, *[0.5] * extra),
        "counted": behind(rows.counted, *[False] * NOBODIES),
        "judged_rows": behind(rows.judged_rows, *[num_rows] * PADDING),
    }
    drawn = given.drawn and given.drawn._replace(places=behind(given.drawn.places, *[0] * PADDING))
    assert len(fields["judged_rows"]) == num_drafts + PADDING
    return Scene(torch.cat([given.logits, torch.zeros(extra, given.logits.shape[1])]), RowFields(**fields), drawn)


def parts(judge: RowJudge, given: Scene, wanted: Wanted) -> dict[str, Tensor]:
    """The vector's parts, by name."""
    vector, checks = judge(given.logits, given.rows, given.drawn, wanted)
    num_rows, num_entries = len(given.rows.drafts), len(given.rows.counts)
    sizes = {"accepted": num_entries, "tokens": num_entries, "drafts": num_rows, "broken": num_rows}
    sizes |= {"expected": num_entries}
    if wanted.logprobs is not None:
        sizes |= {"values": num_rows, "ranks": num_rows}
    if wanted.checked:
        sizes |= {"achievable": 1} | dict.fromkeys(checks, 16)
    assert vector.dtype == torch.float64 and len(vector) == sum(sizes.values())
    return dict(zip(sizes, vector.split(list(sizes.values())), strict=True))


def assert_equal(judge: RowJudge, given: Scene, wanted: Wanted) -> dict[str, Tensor]:
    ours, theirs = parts(judge, given, wanted), parts(TorchJudge(), given, wanted)
    assert ours.keys() == theirs.keys()
    for name in ("accepted", "tokens", "drafts", "broken"):
        assert ours[name].tolist() == theirs[name].tolist(), name
    emitted = given.rows.offsets <= ours["accepted"][given.rows.entries]
    for name in ours.keys() - {"accepted", "tokens", "drafts", "broken"}:
        where = emitted if name in ("values", "ranks") else slice(None)
        torch.testing.assert_close(ours[name][where], theirs[name][where], rtol=1e-4, atol=3e-5, msg=name)
    return ours


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(2))
def test_everything_is_torchs(judge: RowJudge, kind: str, seed: int) -> None:
    given = scene(kind, seed=seed)
    found = assert_equal(judge, given, Wanted(checked=True, logprobs="raw_logprobs"))
    assert 0 < int(found["accepted"].sum()) < sum(COUNTS)
    assert not found["broken"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_alone_and_padded_is_judged_alike(judge: RowJudge, kind: str) -> None:
    wanted = Wanted(checked=True, logprobs="processed_logprobs")
    alone, whole = (parts(judge, given, wanted) for given in (scene(kind, (2, 0, 1)), padded(scene(kind, (2, 0, 1)))))
    for name, values in alone.items():
        found = whole[name][: len(values)]
        assert torch.equal(found, values) or name not in ("accepted", "tokens", "drafts", "broken", "values")
        torch.testing.assert_close(found, values, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("checked", [False, True])
@pytest.mark.parametrize("mode", [None, "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"])
def test_every_mode(judge: RowJudge, checked: bool, mode: LogprobsMode | None) -> None:
    for kind in KINDS:
        assert_equal(judge, scene(kind, (2, 1)), Wanted(checked, mode))


@pytest.mark.parametrize("size", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 4 * BLOCK, 4 * BLOCK + 1])
@pytest.mark.parametrize("kind", KINDS)
def test_vocabularies_around_the_edges_of_blocks(judge: RowJudge, kind: str, size: int) -> None:
    assert_equal(judge, scene(kind, (2, 0, 1), size), Wanted(checked=True, logprobs="raw_logprobs"))


def test_half_precision_logits_are_read_as_they_are(judge: RowJudge) -> None:
    given = scene("dense")
    assert_equal(judge, replace(given, logits=given.logits.half()), Wanted(checked=True, logprobs="raw_logprobs"))


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_drafted(judge: RowJudge, kind: str) -> None:
    assert_equal(judge, scene(kind, (0, 0, 0, 0)), Wanted(checked=True, logprobs="raw_logprobs"))


# -- rows that are not sound -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_that_are_no_distribution_are_reported_and_harm_no_other(
    judge: RowJudge, kind: str, damage: float
) -> None:
    given, wanted = scene(kind, (2, 0, 1, 2)), Wanted(checked=True, logprobs=None)
    sound = parts(judge, given, wanted)
    logits = given.logits.clone()
    if damage == -torch.inf:
        logits[0] = damage
    else:
        logits[0, 70] = damage
    given = replace(given, logits=logits)
    found, theirs = parts(judge, given, wanted), parts(TorchJudge(), given, wanted)
    assert found["broken"].tolist() == theirs["broken"].tolist()
    assert found["broken"][0] == (2 if damage == -torch.inf else 1)
    assert 0 <= found["tokens"][0] < VOCABULARY
    for name in ("accepted", "tokens", "expected"):
        assert torch.equal(found[name][1:], sound[name][1:])
    for check in found.keys() - {"accepted", "tokens", "drafts", "broken", "expected"}:
        torch.testing.assert_close(found[check], theirs[check], rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("kind", ["dense", "sub-vocabulary"])
@pytest.mark.parametrize("damage", ["no number", "negative", "too much", "no mass on the draft"])
def test_a_q_that_is_no_distribution_is_reported(judge: RowJudge, kind: str, damage: str) -> None:
    given = scene(kind, (2, 0, 2))
    assert given.drawn is not None
    place = given.drawn.places[1]
    own = given.drawn.probs[place]
    if damage == "no number":
        own[0 if given.drawn.own_columns[place] else 1] = torch.nan
    elif damage == "negative":
        own[(given.drawn.own_columns[place] + 1) % len(own)] = -1e-6
    elif damage == "too much":
        own *= 1.1
    else:
        own[given.drawn.own_columns[place]] = 0.0
        own /= own.sum()
    found, theirs = (parts(one, given, Wanted(checked=True, logprobs=None)) for one in (judge, TorchJudge()))
    assert found["broken"].tolist() == theirs["broken"].tolist()
    assert found["broken"][1] == (4 if damage == "no mass on the draft" else 3)
    for check in found.keys() - {"accepted", "tokens", "drafts", "broken"}:
        torch.testing.assert_close(found[check], theirs[check], rtol=1e-4, atol=3e-5, equal_nan=True)


# -- distributions -----------------------------------------------------------------------------------------------------


def test_one_token_is_left(judge: RowJudge) -> None:
    """Whatever the uniform; the only token lies in a block's first, middle, or last place."""
    for token in (0, BLOCK - 1, BLOCK, VOCABULARY - 1):
        given = scene("point mass", (0, 0, 0))
        given.logits[:] = -torch.inf
        given.logits[:, token] = -30.0
        given.rows.sample_uniforms[:] = torch.tensor([1e-300, 0.5, 1 - 2**-53], dtype=torch.float64)
        found = assert_equal(judge, given, Wanted(checked=True, logprobs="raw_logprobs"))
        assert found["tokens"].tolist() == [token] * 3


def test_a_token_without_mass_is_never_drawn(judge: RowJudge) -> None:
    """Uniforms at and around every edge of the distribution, most tokens of which have no mass."""
    given = scene("point mass", (0,) * 64)
    given.rows.temperature[:], given.rows.greedy[:] = 1.0, False
    possible = torch.tensor([3, BLOCK - 1, BLOCK, 2 * BLOCK + 5, VOCABULARY - 2])
    given.logits[:] = -torch.inf
    given.logits[:, possible] = torch.tensor([0.1, 0.2, 0.3, 0.25, 0.15]).log()
    p = torch.softmax(given.logits[0], dim=-1).double()
    edges = p[possible].cumsum(0) / p.sum()
    around = torch.cat([edges + step * 2.0**-53 for step in range(-6, 7)])[:64].clamp(2**-60, 1 - 2**-53)
    given.rows.sample_uniforms[: len(around)] = around
    found = parts(judge, given, Wanted(checked=False, logprobs=None))
    assert set(found["tokens"].tolist()) == set(possible.tolist())
    assert not found["broken"].any()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_emitted_follows_p_exactly(
    judge: RowJudge, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """One draft: over all drafts with their chances, accepted or replaced, tokens come as often as p has it. What
    replaces it is enumerated by uniforms on a grid, so it is exact up to the grid."""
    monkeypatch.setattr("speculative.gpu.triton_judge.BLOCK", 2)
    size, num_draws = 5, 20
    one = scene(kind, (1,), size)
    q, p = one.q_at(0).double(), torch.softmax(one.logits[0] / one.rows.temperature[0], dim=-1).double()
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
            greedy=one.rows.greedy.repeat(num_entries),
            temperature=one.rows.temperature.repeat(num_entries, 1),
            accept_uniforms=coins[chosen].repeat_interleave(2),
            sample_uniforms=grid.repeat(len(drafts))[chosen].repeat_interleave(2),
        )
        drawn = one.drawn and one.drawn._replace(places=one.drawn.places.repeat(num_entries))
        found = parts(judge, Scene(one.logits.repeat(num_entries, 1), rows, drawn), Wanted(False, None))
        assert found["accepted"].tolist() == [accepted] * num_entries
        first = drafts[chosen] if accepted else found["tokens"].long()
        shares = (q[drafts] * weights)[chosen] / (1 if accepted else num_draws)
        emitted.index_add_(0, first, shares)
    assert (emitted - p).abs().max() < 0.5 / num_draws  # half a cell an edge


# -- what it costs -----------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    launches: int = 0
    numbers: int = 0


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Traffic:
    """Counts kernels, and the numbers that they load or store."""
    from triton.runtime import interpreter

    counted = Traffic()

    def count(name: str, which_mask: int) -> None:
        real = getattr(interpreter.InterpreterBuilder, name)

        def counting(self: Any, *args: Any) -> Any:
            counted.numbers += int(args[which_mask].data.sum())
            return real(self, *args)

        monkeypatch.setattr(interpreter.InterpreterBuilder, name, counting)

    count("create_masked_load", 1)
    count("create_masked_store", 2)
    real = interpreter.GridExecutor.__call__

    def launch(self: Any, *args: Any, **named: Any) -> Any:
        counted.launches += 1
        return real(self, *args, **named)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", launch)
    return counted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("counts", [(4, 4), (1, 1), (0, 0)])
def test_the_vocabulary_is_read_a_few_times(
    judge: RowJudge, traffic: Traffic, monkeypatch: pytest.MonkeyPatch, kind: str, counts: tuple[int, ...]
) -> None:
    """At most 6 matrices [R, V] are read or written without self-checks, 8 with: the kernels', and the LM head's."""
    from speculative.gpu import triton_judge
    from tests.support.pretended_cuda import judge_launches

    monkeypatch.setattr(triton_judge, "BLOCK", 2048)
    given = scene(kind, counts, size=16384)
    for checked, mode, most in ((False, None, 4.2), (False, "raw_logprobs", 5.2), (True, "raw_logprobs", 7.2)):
        traffic.launches = traffic.numbers = 0
        wanted = Wanted(checked, mode)
        parts(judge, given, wanted)
        assert traffic.launches == judge_launches(wanted, drawn=given.drawn is not None)
        assert 1 + traffic.numbers / given.logits.numel() < most
