"""The operators of captured steps: Triton's kernels, chosen once for an engine."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.config import LogprobsMode
from speculative.errors import ConfigError
from speculative.gpu.filters import FindFloors
from speculative.gpu.packed_attention import AttendPacked, sending_packed
from speculative.gpu.paged_attention import AttendPaged, AttentionSizes
from speculative.gpu.row_drafts import SampleDrafts
from speculative.gpu.row_edits import EditLogits
from speculative.gpu.row_judge import RowJudge
from speculative.gpu.triton_here import keep_triton_kernels
from speculative.kernels.bindings import Kernels
from speculative.kernels.chosen import ChosenKernels
from speculative.model.attention import PreparePass
from speculative.model.layers import LayerOps
from speculative.sampling.probs import SamplingRows
from speculative.step.vocabulary_ops import VocabularyOps


class CapturedVocabularyOps(VocabularyOps):
    """torch's operators over the vocabulary, with filters that neither wait for the host nor sort.

    Args:
        find_floors: of the filters.
        host: CPU kernels for random numbers.
    """

    def __init__(self, find_floors: FindFloors, host: Kernels | None = None) -> None:
        super().__init__(host)
        self._find_floors = find_floors

    def process(self, logits: Tensor, rows: SamplingRows) -> Tensor:
        """Implement `VocabularyOps`."""
        filters = rows.filters
        if filters is None:
            return super().process(logits, rows)
        every = len(filters.rows) == len(logits)
        which = slice(None) if every else filters.rows
        parameters = (filters.log_min_p, filters.top_k, filters.top_p)
        floors = self._find_floors(logits[which], rows.temperature[which], *parameters)
        if not every:
            floors = floors.new_full((len(logits),), -torch.inf).index_copy(0, filters.rows, floors)
        processed = logits / rows.temperature
        return processed.masked_fill_(processed < floors[:, None], -torch.inf)


@dataclass(frozen=True, slots=True)
class GraphOperators:
    """The operators of captured steps.

    attend: paged attention, of these sizes. attend_packed: of the rows of prompts. prepare: attention of passes that
    run eagerly, by block size and the position of a context's first slot. layers: what lies between a layer's products.
    edit: of logits. vocabulary: of distributions. sample_drafts: of a model. judge: of rows, for this mode.
    """

    attend: Callable[[AttentionSizes], AttendPaged]
    attend_packed: AttendPacked
    prepare: Callable[[int, int], PreparePass]
    layers: LayerOps
    edit: EditLogits
    vocabulary: CapturedVocabularyOps
    sample_drafts: SampleDrafts
    judge: Callable[[LogprobsMode], RowJudge]

    @classmethod
    def on(cls, device: torch.device, kernels: ChosenKernels) -> "GraphOperators":
        """Choose those of a device, whose host has these kernels.

        Raises:
            ConfigError: the device is a CPU.
        """
        if device.type == "cpu":
            raise ConfigError(
                "cuda_graphs is true, and this engine computes on a CPU, which has no graphs; remove it: on a GPU, "
                "steps are captured without it."
            )
        keep_triton_kernels()
        return cls.by_triton(kernels)

    @classmethod
    def by_triton(cls, kernels: ChosenKernels) -> "GraphOperators":
        """Triton's kernels, on a CUDA device or as compiled for one."""
        from speculative.gpu.triton_attention import TritonAttend
        from speculative.gpu.triton_drafts import triton_drafts
        from speculative.gpu.triton_edits import triton_edit
        from speculative.gpu.triton_filters import triton_floors
        from speculative.gpu.triton_judge import TritonJudge
        from speculative.gpu.triton_layers import TritonLayerOps
        from speculative.gpu.triton_prompts import triton_attend_packed

        return cls(
            attend=TritonAttend,
            attend_packed=triton_attend_packed,
            prepare=lambda block_size, first: sending_packed(block_size, first, triton_attend_packed),
            layers=TritonLayerOps(),
            edit=triton_edit,
            vocabulary=CapturedVocabularyOps(triton_floors, kernels.host),
            sample_drafts=triton_drafts,
            judge=TritonJudge,
        )
