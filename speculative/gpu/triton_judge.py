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
        num_rows, num_entries, size = len(rows.drafts), len(rows.first_rows), logits.shape[1]
        num_blocks = triton.cdiv(size, BLOCK)
        checks: tuple[str, ...] = COUPLED_CHECKS_OF_DETERMINISTIC + CHECKS_OF_DETERMINISTIC
        # q, its columns, and where its rows are; anything stands in the place of what no kernel reads.
        q, kind = (logits, rows.drafts, rows.packed, rows.packed), kernels.POINT_MASS
        if sampled is not None:
            checks = COUPLED_CHECKS_OF_SAMPLED + CHECKS_OF_SAMPLED
            columns = sampled.places if sampled.columns is None else sampled.columns
            q = (sampled.probs, columns, rows.packed, sampled.places)
            kind = kernels.DENSE if sampled.columns is None else kernels.PART
        layout = Layout(num_rows, num_entries, checks, sampled is not None)

        def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=logits.device)

        vector = empty(layout.size)
        out = layout.parts(vector)
        # What the kernels hand to one another; `triton_vocabulary` says what lies where.
        maxima = empty(kernels.NUM_FACTS, num_rows, num_blocks, dtype=torch.float32)
        facts = empty(kernels.NUM_FACTS, num_rows, dtype=torch.float32)
        sums, choices = empty(kernels.NUM_SUMS, num_rows, num_blocks), empty(2, num_rows, num_blocks)
        drawn = empty(kernels.NUM_DRAWN, num_entries)
        compared = empty(kernels.NUM_COMPARED, num_entries, num_blocks)
        terms = empty(len(checks) + 1, num_rows)

        filters = (rows.log_min_p, rows.top_k, rows.top_p)
        floors = triton_floors(logits, rows.temperature, *filters)
        target = (logits, rows.temperature, rows.greedy, facts, floors)
        given = (*target, *q, rows.drafts)
        strides, settled = (logits.stride(0), q[0].stride(0), num_rows), (out.num_accepted, out.token_ids)
        of_kind, padded = {"Q": kind.value}, {"PADDED": triton.next_power_of_2(num_blocks)}
        blocked = {"NUM_BLOCKS": num_blocks, "VOCABULARY": size, "BLOCK": BLOCK}
        by_row = {"NUM_BLOCKS": num_blocks} | padded

        # The drafts that survive, and the token after them.
        kernels._reduce_blocks[num_rows, num_blocks](
            *(logits, rows.temperature, floors, maxima, logits.stride(0), num_rows), **blocked
        )
        kernels._find_facts[(num_rows,)](maxima, rows.temperature, facts, num_rows, **by_row)
        kernels._sum_blocks[num_rows, num_blocks](*given, *filters, rows.checked, sums, *strides, **blocked, **of_kind)
        kernels._choose_blocks[num_rows, num_blocks](
            *(*target, rows.entries, rows.coupled, rows.seeds, rows.positions, choices, logits.stride(0), num_rows),
            **blocked,
            num_warps=8,
        )
        kernels._settle_entries[(num_entries,)](
            *(*given, rows.coupled, choices, sums, rows.first_rows, rows.counts),
            *(rows.accept_uniforms, rows.sample_uniforms, *settled, out.expected, out.last_probs, drawn, *strides),
            **(blocked | padded | of_kind),
        )
        # Invariants and logprobs of every row.
        kernels._compare_blocks[num_entries, num_blocks](
            *(*given, *filters, rows.checked, rows.reported, rows.first_rows, *settled, drawn, compared, *strides),
            **blocked,
            **of_kind,
        )
        kernels._report_rows[(num_rows,)](
            *(*given, *filters, rows.reported, sums, compared, rows.entries, rows.offsets, *settled),
            out.expected if sampled is None else sampled.mass_before,
            *(out.drafts, out.broken, out.values, out.ranks, out.draft_probs, out.mass_before),
            *(*strides, num_entries, MASS_ROUNDING),
            VOCABULARY=size,
            PROCESSED=self._mode == "processed_logprobs",
            **by_row,
            **of_kind,
        )
        # The terms of the self-checks, summed up over the rows.
        kernels._take_terms[(num_rows,)](
            *(*given, sums, compared, drawn, rows.entries, rows.offsets, *settled),
            *(rows.checked, rows.counted, rows.coupled, terms, out.rows, *strides, num_entries),
            **by_row,
            **of_kind,
        )
        kernels._sum_terms[(len(terms),)](
            *(rows.checked, terms, stakes_on(logits.device), out.achievable, out.sums, num_rows),
            NUM_STAKES=len(STAKES),
            PADDED_STAKES=triton.next_power_of_2(len(STAKES)),
            LANES=_LANES,
        )
        return vector, layout
