"""Rows of made-up steps, and a captured and a plain runner for passes over them."""

from pathlib import Path

import numpy as np
import torch

from speculative.gpu.graph_step import GraphStep
from speculative.model.attention import prepare_by
from speculative.model.loading import load_decoder
from speculative.request import Request
from speculative.state.batch import StepInput
from speculative.state.kv_cache import KVCache
from speculative.state.sequence import Sequence
from speculative.step.runner import ModelRunner
from tests.support.engines import settings, tiny_engine
from tests.support.graph_scenes import VOCABULARY
from tests.support.torch_operators import torch_operators

HIDDEN_TOLERANCE = 1e-4


def input_of(lengths: list[int], counts: list[int], block_size: int, seed: int) -> StepInput:
    """Rows of sequences with `lengths` known positions, `counts` rows each, in blocks at random places."""
    random = np.random.default_rng(seed)
    blocks_each = [-(-(length + count) // block_size) for length, count in zip(lengths, counts, strict=True)]
    blocks = np.split(random.permutation(sum(blocks_each)), np.cumsum(blocks_each)[:-1])
    sequences = [Sequence(Request(f"r{index}", (1,))) for index in range(len(lengths))]
    for sequence, own, length in zip(sequences, blocks, lengths, strict=True):
        sequence.blocks, sequence.num_computed = own.tolist(), length
    starts = np.concatenate([[0], np.cumsum(counts)])
    positions = np.concatenate([length + np.arange(count) for length, count in zip(lengths, counts, strict=True)])
    empty = np.empty(0, np.int64)
    return StepInput(
        sequences=tuple(sequences), block_size=block_size, row_starts=starts,
        input_ids=random.integers(0, VOCABULARY, len(positions)), positions=positions, verify_rows=empty,
        verify_entries=empty, offsets=empty, drafts=empty, sampled_entries=(), draft_counts=empty,
    )  # fmt: skip


class Twins:
    """A captured runner and a plain one, over caches of the same random contents; in the captured one's trash block are
    NaN. The captured step has the drafter and the sampler of an engine."""

    def __init__(self, target: Path, capture: tuple[int, ...] = (), max_model_len: int = 1024, **sizes: int) -> None:
        config = settings(cuda_graphs=True, **sizes)
        decoder = load_decoder(target, dtype=torch.float32, device="cpu")
        shape, cpu = decoder.config.kv_shape, torch.device("cpu")
        self.block_size, self.live = config.block_size, config.num_blocks * config.block_size
        plain, self.cache = (
            KVCache(shape, num_slots, dtype=torch.float32, device=cpu)
            for num_slots in (self.live, self.live + self.block_size)
        )
        plain.data.copy_(torch.randn(plain.data.shape, generator=torch.Generator().manual_seed(1)))
        self.cache.data.fill_(torch.nan)
        self.cache.data[:, :, : self.live] = plain.data
        self.plain = ModelRunner(decoder, plain, cpu, prepare_by(decoder.kernels.model))
        engine = tiny_engine(target)
        engine.drafter.capture = capture
        operators = torch_operators(decoder.kernels)
        self.graphs = GraphStep(
            config, decoder, self.cache, engine.drafter, engine.parts.sampler, max_model_len, operators
        )

    def assert_same_cache(self, step_input: StepInput) -> None:
        """The same was written where the step's rows go, and nothing elsewhere."""
        slots = torch.from_numpy(step_input.attention_rows().slots)
        written, plain = self.cache.data[:, :, : self.live], self.plain.cache.data
        assert torch.allclose(written[:, :, slots], plain[:, :, slots], atol=HIDDEN_TOLERANCE, rtol=0)
        written[:, :, slots] = plain[:, :, slots]  # what they differ by in bits must not add up
        assert torch.equal(written, plain), "padding writes to nobody's blocks"
