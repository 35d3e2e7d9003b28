"""The arithmetic over the vocabulary by our CPU kernels, which read a step where it lies."""

import numpy as np
from torch import Tensor

from speculative.kernels.bindings import Kernels, TermStruct, VerifyStruct
from speculative.kernels.chosen import ChosenKernels
from speculative.sampling.draft_probs import PointMass, columns_of
from speculative.sampling.probs import SamplingRows
from speculative.sampling.verification import VerifyInput, VerifyOutput
from speculative.selfcheck.eprocess import ROUNDING, STAKES
from speculative.selfcheck.invariants import MASS_ROUNDING
from speculative.selfcheck.terms import (
    CHECKS_OF_DETERMINISTIC,
    CHECKS_OF_SAMPLED,
    EQUAL,
    LEAST_RESIDUAL,
    LEAST_SPREAD,
    TermScope,
)
from speculative.state.batch import Terms
from speculative.step.vocabulary_ops import VocabularyOps

_STAKES = np.array(STAKES)
_RULES = TermStruct(_STAKES.ctypes.data, len(STAKES), LEAST_RESIDUAL, LEAST_SPREAD, EQUAL, ROUNDING)


class KernelOps(VocabularyOps):
    """By our kernels, for float32 on a CPU."""

    def __init__(self, kernels: Kernels) -> None:
        super().__init__(kernels)
        self._kernels = kernels

    def process(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        if rows.filters is None:
            return super().process(logits, rows)
        processed, filters = logits / rows.temperature, rows.filters
        self._kernels.filter(processed, filters.rows, filters.log_min_p, filters.top_k, filters.top_p)
        return processed

    def target_probs(self, processed: Tensor, rows: SamplingRows) -> Tensor:
        return self._kernels.distributions(processed, rows.greedy)

    def draw(self, distribution: Tensor, uniform: Tensor) -> Tensor:
        return self._kernels.draw(distribution, uniform)

    def verify_token_wise(self, step: VerifyInput) -> VerifyOutput:
        return VerifyOutput(*self._kernels.verify(_struct(step), step.accept_uniforms, step.sample_uniforms))

    def emitted_at_rows(self, verified: VerifyOutput, step: VerifyInput) -> Tensor:
        return self._kernels.emitted(_struct(step), verified.num_accepted, verified.token_ids)

    def round_probs(
        self, step: VerifyInput, verified: VerifyOutput, *, places: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        q, column_of = step.draft_probs, None
        if not isinstance(q, PointMass) and q.ids is not None:
            column_of = columns_of(q.ids, step.probs.shape[1])
        decided = (verified.num_accepted, verified.token_ids, column_of)
        return self._kernels.round_probs(_struct(step), *decided, places=places)

    def broken_rows(
        self, step: VerifyInput, verified: VerifyOutput, emitted: Tensor, highest: Tensor, outside: Tensor
    ) -> Tensor:
        found = (verified.num_accepted, emitted, highest, outside)
        return self._kernels.broken_rows(_struct(step), *found, MASS_ROUNDING)

    def take_terms(self, step: VerifyInput, verified: VerifyOutput, emitted: Tensor, scope: TermScope) -> Terms:
        if scope.coupled is not None:
            return super().take_terms(step, verified, emitted, scope)
        struct = _struct(step)
        checks = CHECKS_OF_SAMPLED if struct.q else CHECKS_OF_DETERMINISTIC
        reported = (verified.num_accepted, emitted, scope.counted, _RULES, len(checks))
        return Terms(checks, *self._kernels.terms(struct, *reported))


def choose_ops(kernels: ChosenKernels) -> VocabularyOps:
    """Those of a model with these kernels."""
    return VocabularyOps(kernels.host) if kernels.model is None else KernelOps(kernels.model)


def _struct(step: VerifyInput) -> VerifyStruct:
    """The step as the kernels read it, made once."""
    made: VerifyStruct | None = step.prepared.get(VerifyStruct)
    if made is not None:
        return made
    q = None if isinstance(step.draft_probs, PointMass) else step.draft_probs
    tensors = {
        "p": step.probs,
        "q": None if q is None else q.probs.float(),
        "ids": None if q is None else q.ids,
        "columns": None if q is None else q.columns,
        "drafts": step.drafts,
        "packed": step.packed,
        "entries": step.entries,
        "first_rows": step.first_rows,
    }
    kept = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    struct = VerifyStruct(
        num_rows=len(step.drafts),
        num_entries=len(step.first_rows),
        size=step.probs.shape[1],
        width=0 if q is None else q.probs.shape[1],
        **{name: tensor.data_ptr() for name, tensor in kept.items()},
    )
    struct.kept = kept  # as long as it points there
    step.prepared[VerifyStruct] = struct
    return struct
