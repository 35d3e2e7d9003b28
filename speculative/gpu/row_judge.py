"""The interface of what judges the rows of a plain step, from logits to one vector."""

from typing import NamedTuple, Protocol

from torch import Tensor


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


class RowJudge(Protocol):
    """Token-wise or coupled verification of R rows of E entries over V tokens."""

    def __call__(self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None) -> tuple[Tensor, tuple[str, ...]]:
        """Judge logits [R, V]; `sampled` is None where the drafts are deterministic, or there are none.

        Returns:
            One float64 vector: accepted drafts [E], last tokens [E], drafts [R], broken invariants [R], expected
            accepted drafts [E]; the logprobs' values [R] and ranks [R]; of the self-checks what could be accepted [1],
            and rows [3, R] and sums [C, S] of `Terms`; where drafts were sampled, q of each row's draft [R], its mass
            before that draft [R], and q of the last tokens [E], all 0 in rows without a draft. And the names of the C
            self-checks.
        """
