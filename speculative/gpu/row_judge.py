"""The interface of what judges the rows of a plain step, and the record of what it finds: parts of one vector, so that
one copy brings all of them to the host."""

import math
from typing import Generic, NamedTuple, Protocol, TypeVar

from torch import Tensor

from speculative.gpu.staged_inputs import Array
from speculative.selfcheck.eprocess import STAKES

Part = TypeVar("Part")
Vector = TypeVar("Vector", Tensor, Array)


class RowFields(NamedTuple):
    """The rows, as in `VerifyInput`; all on the device.

    temperature: [R, 1] float32. greedy: [R] bool. log_min_p, top_p: [R] float32, and top_k: [R] int64, as in `Filters`.
    counted: [E] bool, entries whose terms count. coupled: [E] bool, entries that the coupled verifier judges. checked,
    reported: [1] bool, whether the terms of the self-checks are taken, and whether logprobs are returned; where not,
    anything stands in their place.
    """

    temperature: Tensor
    greedy: Tensor
    log_min_p: Tensor
    top_k: Tensor
    top_p: Tensor
    drafts: Tensor
    packed: Tensor
    entries: Tensor
    offsets: Tensor
    first_rows: Tensor
    counts: Tensor
    accept_uniforms: Tensor
    sample_uniforms: Tensor
    seeds: Tensor
    positions: Tensor
    counted: Tensor
    coupled: Tensor
    checked: Tensor
    reported: Tensor


class SampledFrom(NamedTuple):
    """Distributions that drafts were sampled from, where they lie.

    probs: [N, W] float32. places: [D] int64, its row for each packed draft. columns: [V] int32, its column for each
    token, -1 = none; None where W = V. ids: [W] int64, the token of each column. own_columns: [N] int64, that of the
    draft that was sampled from each row. mass_before: [N] float64, the row's mass before that draft.
    """

    probs: Tensor
    places: Tensor
    columns: Tensor | None
    ids: Tensor | None
    own_columns: Tensor
    mass_before: Tensor


class Verified(NamedTuple, Generic[Part]):
    """The findings about R rows of E entries, as float64: tensors on the device, arrays on the host.

    num_accepted, token_ids, expected: [E] drafts that survived, the token behind them, and how many drafts could be
    expected to survive. drafts: [R] those judged, -1 in last rows. broken: [R] as `broken_rows` returns it. values,
    ranks: [R] of the emitted tokens' logprobs. achievable: [1], rows: [3, R], and sums: [C, S], of `Terms`.
    draft_probs, mass_before: [R], and last_probs: [E], as in `Verdicts`, 0 in rows without a draft; empty where none is
    sampled.
    """

    num_accepted: Part
    token_ids: Part
    drafts: Part
    broken: Part
    expected: Part
    values: Part
    ranks: Part
    achievable: Part
    rows: Part
    sums: Part
    draft_probs: Part
    mass_before: Part
    last_probs: Part


class Layout(NamedTuple):
    """Where the parts of a vector lie. checks: names of the C self-checks. samples: whether drafts were sampled."""

    num_rows: int
    num_entries: int
    checks: tuple[str, ...]
    samples: bool

    @property
    def shapes(self) -> Verified[tuple[int, ...]]:
        """The shape of each part; they lie one after another."""
        rows, entries = (self.num_rows,), (self.num_entries,)
        own_rows, own_entries = (rows, entries) if self.samples else ((0,), (0,))
        return Verified(
            num_accepted=entries, token_ids=entries, drafts=rows, broken=rows, expected=entries,
            values=rows, ranks=rows, achievable=(1,), rows=(3, *rows), sums=(len(self.checks), len(STAKES) + 4),
            draft_probs=own_rows, mass_before=own_rows, last_probs=own_entries,
        )  # fmt: skip

    @property
    def size(self) -> int:
        """Numbers of all parts."""
        return sum(map(math.prod, self.shapes))

    def parts(self, vector: Vector) -> Verified[Vector]:
        """The parts of a vector, which may be longer."""
        found, begin = list[Vector](), 0
        for shape in self.shapes:
            end = begin + math.prod(shape)
            found.append(vector[begin:end].reshape(shape))
            begin = end
        return Verified(*found)


class RowJudge(Protocol):
    """Token-wise or coupled verification of R rows of E entries over V tokens."""

    def __call__(self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None) -> tuple[Tensor, Layout]:
        """Judge logits [R, V]; `sampled` is None where the drafts are deterministic, or there are none."""
