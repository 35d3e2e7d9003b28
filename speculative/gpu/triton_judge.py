"""`RowJudge` by the kernels of `triton_vocabulary`; imported only where Triton is installed."""

from typing import Any

import torch
import triton
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.gpu import triton_vocabulary as kernels
from speculative.gpu.row_judge import RowFields, SampledFrom, Wanted
from speculative.selfcheck.eprocess import STAKES
from speculative.selfcheck.invariants import MASS_ROUNDING
from speculative.selfcheck.terms import (
    CHECKS_OF_DETERMINISTIC,
    CHECKS_OF_SAMPLED,
    LEAST_RESIDUAL,
    LEAST_SPREAD,
    stakes_on,
)

BLOCK = 2048  # tokens of a program: what fits into registers, and a constant, so that no result depends on the batch
_LANES = 128  # rows whose terms are added up together


class TritonJudge:
    """Launches the kernels: nothing waits for the host, and every grid follows from the shapes."""

    def __call__(
        self, logits: Tensor, rows: RowFields, sampled: SampledFrom | None, wanted: Wanted
    ) -> tuple[Tensor, tuple[str, ...]]:
        """As `RowJudge`."""
        num_rows, num_entries = len(rows.drafts), len(rows.first_rows)
        checks = () if not wanted.checked else CHECKS_OF_DETERMINISTIC if sampled is None else CHECKS_OF_SAMPLED
        out = _Outputs(num_rows, num_entries, len(checks), wanted, logits.device)
        sizes = {"NUM_BLOCKS": triton.cdiv(logits.shape[1], BLOCK)}
        padded = {"PADDED": triton.next_power_of_2(sizes["NUM_BLOCKS"])}
        blocked = sizes | {"VOCABULARY": logits.shape[1], "BLOCK": BLOCK}
        room = _Workspace(num_rows, num_entries, sizes["NUM_BLOCKS"], logits.device)
        q, kind = _q(sampled, rows, logits)
        strides = (logits.stride(0), q[0].stride(0), num_rows)
        ranked = {"RANKED": wanted.logprobs is not None}
        given = (logits, rows.temperature, rows.greedy, room.facts, *q, rows.drafts)  # p, q and the drafts
        by_row = sizes | padded | kind
        per_block = (num_rows, sizes["NUM_BLOCKS"])

        kernels._reduce_blocks[per_block](logits, rows.temperature, room.maxima, strides[0], num_rows, **blocked)
        kernels._find_facts[(num_rows,)](room.maxima, rows.temperature, room.facts, num_rows, **sizes, **padded)
        kernels._sum_blocks[per_block](*given, room.sums, *strides, **blocked, **kind, **ranked, CHECKED=wanted.checked)
        settled = (out.num_accepted, out.token_ids)
        kernels._settle_entries[(num_entries,)](
            *given,
            room.sums,
            rows.first_rows,
            rows.counts,
            rows.accept_uniforms,
            rows.sample_uniforms,
            *settled,
            out.expected,
            room.drawn,
            *strides,
            **blocked,
            **padded,
            **kind,
        )
        overlapped = wanted.checked and sampled is not None
        if overlapped or ranked["RANKED"]:
            kernels._compare_blocks[(num_entries, sizes["NUM_BLOCKS"])](
                *given,
                rows.first_rows,
                *settled,
                room.drawn,
                room.compared,
                *strides,
                **blocked,
                **kind,
                **ranked,
                OVERLAPPED=overlapped,
            )
        kernels._report_rows[(num_rows,)](
            *given,
            room.sums,
            room.compared,
            rows.entries,
            rows.offsets,
            *settled,
            out.drafts,
            out.broken,
            out.values,
            out.ranks,
            *strides,
            num_entries,
            MASS_ROUNDING,
            **by_row,
            **ranked,
            **_reported(wanted.logprobs),
        )
        if wanted.checked:
            kernels._take_terms[(num_rows,)](
                *given,
                room.sums,
                room.compared,
                room.drawn,
                rows.entries,
                rows.offsets,
                *settled,
                rows.counted,
                out.row_terms,
                *strides,
                num_entries,
                LEAST_RESIDUAL,
                LEAST_SPREAD,
                **by_row,
            )
            kernels._sum_terms[(len(checks) + 1,)](
                out.row_terms,
                stakes_on(logits.device),
                out.achievable,
                out.sums,
                num_rows,
                NUM_STAKES=len(STAKES),
                PADDED_STAKES=triton.next_power_of_2(len(STAKES)),
                LANES=_LANES,
            )
        return out.vector, checks


class _Workspace:
    """What the kernels hand to one another; `triton_vocabulary` says what lies where."""

    def __init__(self, num_rows: int, num_entries: int, num_blocks: int, device: torch.device) -> None:
        def empty(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        self.maxima = empty(kernels.NUM_FACTS, num_rows, num_blocks, dtype=torch.float32)
        self.facts = empty(kernels.NUM_FACTS, num_rows, dtype=torch.float32)
        self.sums = empty(kernels.NUM_SUMS, num_rows, num_blocks)
        self.drawn = empty(kernels.NUM_DRAWN, num_entries)
        self.compared = empty(2, num_entries, num_blocks)


class _Outputs:
    """The vector of `RowJudge`, and its parts as the kernels write them."""

    def __init__(self, num_rows: int, num_entries: int, num_checks: int, wanted: Wanted, device: torch.device) -> None:
        num_logprobs = num_rows if wanted.logprobs is not None else 0
        num_sums = num_checks * (len(STAKES) + 4)
        lengths = [num_entries, num_entries, num_rows, num_rows, num_entries, num_logprobs, num_logprobs]
        lengths += [1 if num_checks else 0, num_sums]
        self.vector = torch.empty(sum(lengths), dtype=torch.float64, device=device)
        (
            self.num_accepted,
            self.token_ids,
            self.drafts,
            self.broken,
            self.expected,
            self.values,
            self.ranks,
            self.achievable,
            self.sums,
        ) = self.vector.split(lengths)
        self.row_terms = torch.empty((num_checks + 1, num_rows), dtype=torch.float64, device=device)


def _q(sampled: SampledFrom | None, rows: RowFields, logits: Tensor) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """q, its columns, and where its rows are; anything stands in the place of what no kernel reads."""
    if sampled is None:
        return (logits, rows.drafts, rows.packed, rows.packed), {"Q": kernels.POINT_MASS.value}
    kind = kernels.DENSE if sampled.columns is None else kernels.PART
    columns = sampled.places if sampled.columns is None else sampled.columns
    return (sampled.probs, columns, rows.packed, sampled.places), {"Q": kind.value}


def _reported(mode: LogprobsMode | None) -> dict[str, bool]:
    name = mode or ""
    return {"PROCESSED": name.startswith("processed"), "NORMALIZED": name.endswith("logprobs")}
