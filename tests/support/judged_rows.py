"""Rows to judge, of every kind, and the parts of what a judge returns; on any device."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.gpu.filters import sampling_rows
from speculative.gpu.row_judge import RowFields, RowJudge, SampledFrom
from speculative.sampling.draft_probs import columns_of
from speculative.sampling.verification import VerifyInput
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.torch_operators import TorchJudge, draft_probs_of, verify_input

VOCABULARY, WIDTH = 203, 75
COUNTS = (2, 0, 3, 1, 19, 2)  # drafts of each entry; more than the kernels look at together
NOBODIES, PADDING = 2, 3  # entries with a row of their own and no request, and rows of nobody
TOLERANCE = {"rtol": 1e-4, "atol": 3e-5}  # of float32 sums over a vocabulary, added up in another order
KINDS = ("dense", "sub-vocabulary", "point mass")
NEVER = 1 << 20


@dataclass(frozen=True)
class Scene:
    logits: Tensor
    rows: RowFields
    sampled: SampledFrom | None

    def to(self, device: torch.device) -> "Scene":
        rows = RowFields(*(tensor.to(device) for tensor in self.rows))
        sampled = self.sampled and SampledFrom(*(part if part is None else part.to(device) for part in self.sampled))
        sampled = sampled and sampled._replace(probs=of_wider(sampled.probs))
        return Scene(of_wider(self.logits.to(device)), rows, sampled)

    def with_rows(self, **changes: Tensor) -> "Scene":
        return Scene(self.logits, self.rows._replace(**changes), self.sampled)

    def q_at(self, row: int) -> Tensor:
        """[V] what the draft of a row was sampled from."""
        if self.sampled is None:
            q = torch.zeros(self.logits.shape[1])
            q[self.rows.drafts[row]] = 1.0
            return q
        own = self.sampled.probs[self.sampled.places[self.rows.packed[row]]]
        if self.sampled.ids is None:
            return own
        return torch.zeros(self.logits.shape[1]).index_copy(0, self.sampled.ids, own)


def of_wider(rows: Tensor) -> Tensor:
    """The same rows, further apart than they are wide, with NaN in between."""
    wide = rows.new_full((*rows.shape[:-1], rows.shape[-1] + 5), torch.nan)
    wide[..., :-5] = rows
    return wide[..., :-5]


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
        seeds=torch.randint(-(2**63), 2**63 - 1, (len(counts),), generator=random)[entries],
        positions=2**12 * torch.randint(0, 2**20, (len(counts),), generator=random)[entries] + offsets,
        coupled=torch.zeros(len(counts), dtype=torch.bool),
        checked=torch.tensor([True]),
        reported=torch.tensor([True]),
        **no_filters(num_rows, size),
    )
    part = (columns_of(ids, size), ids) if kind == "sub-vocabulary" else (None, None)
    own = stored.double().masked_fill(torch.arange(width) >= own_columns[:, None], 0.0)
    sampled = SampledFrom(of_wider(stored), places, *part, own_columns, own.sum(dim=-1))
    sampled = None if kind == "point mass" else sampled
    return Scene(of_wider(logits), rows, sampled)


def padded(given: Scene) -> Scene:
    """With entries and rows of nobody behind, as a captured step has them."""
    rows, extra, size = given.rows, NOBODIES + PADDING, given.logits.shape[1]
    num_rows, num_entries = len(rows.drafts), len(rows.counts)

    def behind(tensor: Tensor, *values: Any) -> Tensor:
        return torch.cat([tensor, torch.tensor(values).to(tensor.dtype).reshape(-1, *tensor.shape[1:])])

    nobodies = list(range(num_entries, num_entries + NOBODIES))
    of_rows = {"temperature": 1.0, "greedy": True, "drafts": -1, "packed": 0, "seeds": 0, "positions": 0}
    of_rows |= {"accept_uniforms": 0.5, "sample_uniforms": 0.5}
    of_entries = {"counts": 0, "counted": False, "coupled": False}
    fields = {
        "entries": behind(rows.entries, *nobodies, *[nobodies[-1]] * PADDING),
        "offsets": behind(rows.offsets, *[0] * NOBODIES, *[NEVER] * PADDING),
        "first_rows": behind(rows.first_rows, *[num_rows + index for index in range(NOBODIES)]),
        "checked": rows.checked,
        "reported": rows.reported,
        **{name: behind(getattr(rows, name), *[value] * extra) for name, value in of_rows.items()},
        **{name: behind(getattr(rows, name), *[value] * NOBODIES) for name, value in of_entries.items()},
        **{name: behind(getattr(rows, name), *none) for name, none in no_filters(extra, size).items()},
    }
    sampled = given.sampled and given.sampled._replace(places=behind(given.sampled.places, *[0] * PADDING))
    return Scene(of_wider(torch.cat([given.logits, torch.zeros(extra, size)])), RowFields(**fields), sampled)


def no_filters(num_rows: int, size: int) -> dict[str, Tensor]:
    return {
        "log_min_p": torch.full((num_rows,), -torch.inf),
        "top_k": torch.full((num_rows,), size),
        "top_p": torch.ones(num_rows),
    }


def filtered(given: Scene, *filters: tuple[float, int, float]) -> Scene:
    """With min_p, top_k (0 = all) and top_p of its entries, in turn."""
    return given.with_rows(**in_turn(filters, given.rows.entries.tolist(), given.logits))


def in_turn(filters: tuple[tuple[float, int, float], ...], owners: Iterable[int], logits: Tensor) -> dict[str, Tensor]:
    """The filters of rows, by the numbers of those whose rows they are."""
    size, device = logits.shape[1], logits.device
    min_p, top_k, top_p = zip(*(filters[owner % len(filters)] for owner in owners), strict=True)
    return {
        "log_min_p": torch.tensor(min_p, device=device).log(),
        "top_k": torch.tensor([min(count, size) or size for count in top_k], device=device),
        "top_p": torch.tensor(top_p, device=device),
    }


def parts(judge: RowJudge, given: Scene) -> dict[str, Tensor]:
    """The findings of a judge that were wanted, by name; the rows and sums of `Terms` by names of their own."""
    vector, layout = judge(given.logits, given.rows, given.sampled)
    assert vector.dtype == torch.float64 and len(vector) == layout.size
    found = layout.parts(vector)._asdict()
    terms = dict(zip(("chance", "below", "own"), found.pop("rows"), strict=True))
    terms |= dict(zip(layout.checks, found.pop("sums"), strict=True))
    terms["achievable"] = found.pop("achievable")
    if not given.rows.reported:
        del found["values"], found["ranks"]
    found |= terms if given.rows.checked else {}
    return {name: values for name, values in found.items() if len(values)}


def assert_equal(judge: RowJudge, given: Scene, mode: LogprobsMode = "raw_logprobs") -> dict[str, Tensor]:
    ours, theirs = parts(judge, given), parts(torch_judge(mode), given)
    assert ours.keys() == theirs.keys()
    for name in ("num_accepted", "token_ids", "drafts", "broken"):
        assert ours[name].tolist() == theirs[name].tolist(), name
    emitted = given.rows.offsets <= ours["num_accepted"][given.rows.entries]
    for name in ours.keys() - {"num_accepted", "token_ids", "drafts", "broken"}:
        where = emitted if name in ("values", "ranks") else slice(None)
        torch.testing.assert_close(ours[name][where], theirs[name][where], **TOLERANCE, msg=name, equal_nan=True)
    return ours


def step_of(given: Scene) -> VerifyInput:
    """Compute the input of its verifier by torch's operators."""
    sampling = sampling_rows(given.rows._asdict())
    probs = VocabularyOps().target_probs(VocabularyOps().process(given.logits, sampling), sampling)
    return verify_input(probs, given.rows, draft_probs_of(given.sampled))


def torch_judge(mode: LogprobsMode = "raw_logprobs") -> TorchJudge:
    return TorchJudge(VocabularyOps(), mode)
