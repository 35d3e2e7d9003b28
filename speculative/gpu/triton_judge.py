"""`RowJudge` by the kernels of `triton_vocabulary`; imported only where Triton is installed."""

import torch
import triton
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.gpu import triton_vocabulary as kernels
from speculative.gpu.row_judge import Layout, RowFields, SampledFrom
from speculative.gpu.triton_filters import triton_floors
from speculative.selfcheck.eprocess import STAKES
from speculative.selfcheck.invariants import MASS_ROUNDING
from speculative.selfcheck.terms import (
    CHECKS_OF_DETERMINISTIC,
    CHECKS_OF_SAMPLED,
    COUPLED_CHECKS_OF_DETERMINISTIC,
    COUPLED_CHECKS_OF_SAMPLED,
    stakes_on,
)

BLOCK = 2048  # tokens of a program: what fits into registers, and a constant, so that no result depends on the batch
_LANES = 128  # rows whose terms are added up together


class TritonJudge:
    """Launches the kernels: nothing waits for the host, and every grid follows from the shapes."""

    def __init__(self, mode: LogprobsMode) -> None:
        self._mode = mode

    def __call__(self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None) -> tuple[Tensor, Layout]:
        """Implement `RowJudge`."""
        launches = _Launches(logits, rows, sampled)
        launches.settle()
        launches.report(self._mode)
        launches.take_terms()
        return launches.vector, launches.layout


class _Launches:
    """Those of one step."""

    def __init__(self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None) -> None:
        checks: tuple[str, ...] = COUPLED_CHECKS_OF_DETERMINISTIC + CHECKS_OF_DETERMINISTIC
        # q, its columns, and where its rows are; anything stands in the place of what no kernel reads.
        q, kind = (logits, rows.drafts, rows.packed, rows.packed), kernels.POINT_MASS
        if sampled is not None:
            checks = COUPLED_CHECKS_OF_SAMPLED + CHECKS_OF_SAMPLED
            columns = sampled.places if sampled.columns is None else sampled.columns
            q = (sampled.probs, columns, rows.packed, sampled.places)
            kind = kernels.DENSE if sampled.columns is None else kernels.PART
        self._kind = {"Q": kind.value}
        self._logits, self._rows = logits, rows
        self._num_rows, self._num_entries = len(rows.drafts), len(rows.first_rows)
        self._num_blocks = num_blocks = triton.cdiv(logits.shape[1], BLOCK)
        self.layout = Layout(self._num_rows, self._num_entries, checks, sampled is not None)
        self.vector = torch.empty(self.layout.size, dtype=torch.float64, device=logits.device)
        self._out = self.layout.parts(self.vector)
        self._room = _Workspace(self._num_rows, self._num_entries, num_blocks, len(checks), logits.device)
        self._filters = (rows.log_min_p, rows.top_k, rows.top_p)
        self._floors = triton_floors(logits, rows.temperature, *self._filters)
        self._target = (logits, rows.temperature, rows.greedy, self._room.facts, self._floors)
        self._given = (*self._target, *q, rows.drafts)
        self._mass_before = self._out.expected if sampled is None else sampled.mass_before
        self._strides = (logits.stride(0), q[0].stride(0), self._num_rows)
        self._settled = (self._out.num_accepted, self._out.token_ids)
        self._blocked = {"NUM_BLOCKS": num_blocks, "VOCABULARY": logits.shape[1], "BLOCK": BLOCK}
        self._by_row = {"NUM_BLOCKS": num_blocks, "PADDED": triton.next_power_of_2(num_blocks)}

    def settle(self) -> None:
        """Determine the drafts that survive, and the token after them."""
        rows, room, num_rows = self._rows, self._room, self._num_rows
        per_block = (num_rows, self._num_blocks)
        kernels._reduce_blocks[per_block](
            self._logits, rows.temperature, self._floors, room.maxima, self._logits.stride(0), num_rows, **self._blocked
        )
        kernels._find_facts[(num_rows,)](room.maxima, rows.temperature, room.facts, num_rows, **self._by_row)
        kernels._sum_blocks[per_block](
            *self._given, *self._filters, rows.checked, room.sums, *self._strides, **self._blocked, **self._kind
        )
        kernels._choose_blocks[per_block](
            *self._target,
            rows.entries,
            rows.coupled,
            rows.seeds,
            rows.positions,
            room.choices,
            self._logits.stride(0),
            num_rows,
            **self._blocked,
            num_warps=8,
        )
        kernels._settle_entries[(self._num_entries,)](
            *self._given,
            rows.coupled,
            room.choices,
            room.sums,
            rows.first_rows,
            rows.counts,
            rows.accept_uniforms,
            rows.sample_uniforms,
            *self._settled,
            self._out.expected,
            self._out.last_probs,
            room.drawn,
            *self._strides,
            **(self._blocked | self._by_row),
            **self._kind,
        )

    def report(self, mode: LogprobsMode) -> None:
        """Invariants and logprobs of every row."""
        rows, room, out = self._rows, self._room, self._out
        kernels._compare_blocks[(self._num_entries, self._num_blocks)](
            *self._given,
            *self._filters,
            rows.checked,
            rows.reported,
            rows.first_rows,
            *self._settled,
            room.drawn,
            room.compared,
            *self._strides,
            **self._blocked,
            **self._kind,
        )
        kernels._report_rows[(self._num_rows,)](
            *self._given,
            *self._filters,
            rows.reported,
            room.sums,
            room.compared,
            rows.entries,
            rows.offsets,
            *self._settled,
            self._mass_before,
            out.drafts,
            out.broken,
            out.values,
            out.ranks,
            out.draft_probs,
            out.mass_before,
            *self._strides,
            self._num_entries,
            MASS_ROUNDING,
            VOCABULARY=self._logits.shape[1],
            **self._by_row,
            **self._kind,
            PROCESSED=mode == "processed_logprobs",
        )

    def take_terms(self) -> None:
        """Those of the self-checks, summed up over the rows."""
        rows, room, out = self._rows, self._room, self._out
        kernels._take_terms[(self._num_rows,)](
            *self._given,
            room.sums,
            room.compared,
            room.drawn,
            rows.entries,
            rows.offsets,
            *self._settled,
            rows.checked,
            rows.counted,
            rows.coupled,
            room.row_terms,
            out.rows,
            *self._strides,
            self._num_entries,
            **self._by_row,
            **self._kind,
        )
        kernels._sum_terms[(len(room.row_terms),)](
            rows.checked,
            room.row_terms,
            stakes_on(self._logits.device),
            out.achievable,
            out.sums,
            self._num_rows,
            NUM_STAKES=len(STAKES),
            PADDED_STAKES=triton.next_power_of_2(len(STAKES)),
            LANES=_LANES,
        )


class _Workspace:
    """Memory in which the kernels hand results to one another; `triton_vocabulary` says what lies where."""

    def __init__(self, num_rows: int, num_entries: int, num_blocks: int, num_checks: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.maxima = empty(kernels.NUM_FACTS, num_rows, num_blocks, dtype=torch.float32)
        self.facts = empty(kernels.NUM_FACTS, num_rows, dtype=torch.float32)
        self.sums = empty(kernels.NUM_SUMS, num_rows, num_blocks)
        self.drawn = empty(kernels.NUM_DRAWN, num_entries)
        self.choices = empty(2, num_rows, num_blocks)
        self.compared = empty(kernels.NUM_COMPARED, num_entries, num_blocks)
        self.row_terms = empty(num_checks + 1, num_rows)
