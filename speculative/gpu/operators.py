"""The operators of captured steps, chosen once for an engine: Triton's kernels on a CUDA device, torch's elsewhere."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.config import EngineConfig, LogprobsMode, keep_triton_kernels, why_no_triton
from speculative.gpu.filters import FindFloors, torch_floors
from speculative.gpu.packed_attention import AttendPacked, SendPacked
from speculative.gpu.paged_attention import AttendPaged, AttentionSizes, TorchAttend
from speculative.gpu.row_drafts import SampleDrafts, TorchDrafts
from speculative.gpu.row_edits import EditLogits, torch_edit
from speculative.gpu.row_judge import RowJudge, TorchJudge
from speculative.kernels.bindings import Kernels
from speculative.kernels.chosen import ChosenKernels
from speculative.model.attention import PreparePass, prepare_by
from speculative.model.layers import LayerOps, TorchLayerOps
from speculative.sampling.probs import SamplingRows
from speculative.verification.coupled import NoiseRows, choose
from speculative.vocabulary.ops import TorchOps

Choose = Callable[[Tensor, Tensor, NoiseRows, Tensor | None, int], Tensor]
"""Signature of `VocabularyOps.choose`."""


class CapturedVocabularyOps(TorchOps):
    """torch's operators over the vocabulary where they neither wait for the host nor sort, and others in the place of
    the rest: what a graph can hold.

    Args:
        find_floors: of the filters.
        choose: the columns of coupled drafts.
        host: CPU kernels for random numbers.
    """

    def __init__(self, find_floors: FindFloors, choose: Choose, host: Kernels | None = None) -> None:
        super().__init__(host)
        self._find_floors, self._choose = find_floors, choose

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

    def choose(self, probs: Tensor, columns: Tensor, rows: NoiseRows, ids: Tensor | None, vocab_size: int) -> Tensor:
        """Implement `VocabularyOps`."""
        return self._choose(probs, columns, rows, ids, vocab_size)


@dataclass(frozen=True, slots=True)
class GraphOperators:
    """The operators of captured steps.

    attend: paged attention, of these sizes. attend_packed: of the rows of prompts; None where it cannot be captured.
    prepare: attention of passes that run eagerly, by block size and the
    position of a context's first slot. layers: what lies between a layer's products. edit: of logits. vocabulary: of
    distributions. sample_drafts: of a model. judge_token_wise: the judge of rows, for token-wise verification and
    this mode.
    """

    attend: Callable[[AttentionSizes], AttendPaged]
    attend_packed: AttendPacked | None
    prepare: Callable[[int, int], PreparePass]
    layers: LayerOps
    edit: EditLogits
    vocabulary: CapturedVocabularyOps
    sample_drafts: SampleDrafts
    judge_token_wise: Callable[[LogprobsMode], RowJudge]

    @classmethod
    def on(cls, device: torch.device, kernels: ChosenKernels) -> "GraphOperators":
        """Choose those of a device, whose eager passes and host have these kernels."""
        if not uses_triton(device):
            return cls.by_torch(kernels)
        keep_triton_kernels()
        return cls.by_triton(kernels)

    @classmethod
    def by_torch(cls, kernels: ChosenKernels) -> "GraphOperators":
        """torch's, on any device."""
        vocabulary = CapturedVocabularyOps(torch_floors, choose, kernels.host)
        return cls(
            attend=lambda sizes: TorchAttend(sizes.block_size),
            attend_packed=None,
            prepare=lambda block_size, first: prepare_by(kernels.model),
            layers=TorchLayerOps(),
            edit=torch_edit,
            vocabulary=vocabulary,
            sample_drafts=TorchDrafts(vocabulary),
            judge_token_wise=lambda mode: TorchJudge(vocabulary, mode),
        )

    @classmethod
    def by_triton(cls, kernels: ChosenKernels) -> "GraphOperators":
        """Triton's kernels, on a CUDA device."""
        from speculative.gpu.triton_attention import TritonAttend
        from speculative.gpu.triton_drafts import triton_drafts
        from speculative.gpu.triton_edits import triton_edit
        from speculative.gpu.triton_filters import triton_floors
        from speculative.gpu.triton_judge import TritonJudge
        from speculative.gpu.triton_layers import TritonLayerOps
        from speculative.gpu.triton_noise import triton_choose
        from speculative.gpu.triton_prompts import TritonAttendPacked

        attend_packed = TritonAttendPacked()
        return cls(
            attend=TritonAttend,
            attend_packed=attend_packed,
            prepare=lambda block_size, first: SendPacked(block_size, first, attend_packed),
            layers=TritonLayerOps(),
            edit=triton_edit,
            vocabulary=CapturedVocabularyOps(triton_floors, triton_choose, kernels.host),
            sample_drafts=triton_drafts,
            judge_token_wise=TritonJudge,
        )

    def judge(self, config: EngineConfig) -> RowJudge:
        """The judge of an engine's rows; block verification has torch's operators only."""
        if config.verifier == "block":
            return TorchJudge(self.vocabulary, config.logprobs_mode, config.drafter.max_drafts)
        return self.judge_token_wise(config.logprobs_mode)


def uses_triton(device: torch.device) -> bool:
    """Tell whether Triton's kernels run on a device, or are compiled for one."""
    return device.type == "meta" or (device.type == "cuda" and not why_no_triton())
