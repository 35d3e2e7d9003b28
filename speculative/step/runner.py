"""Runs the model on one step's rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from speculative.model.attention import PreparePass
from speculative.model.decoder import Decoder
from speculative.state.batch import StepInput
from speculative.state.kv_cache import KVCache


class ModelRunner:
    """The target model and its KV cache, eagerly."""

    def __init__(self, decoder: Decoder, cache: KVCache, device: torch.device, prepare: PreparePass) -> None:
        self.cache = cache
        self.device = device
        self.decoder, self._prepare = decoder, prepare

    def forward_with_features(self, step_input: StepInput, capture: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] of the step's rows, and the features [N, len(capture) * hidden] that enter the
        layers of `capture`; keys and values are in the cache afterwards."""
        attention, (input_ids, positions) = self._prepare(
            self.cache, step_input.attention_rows(), step_input.input_ids, step_input.positions
        )
        return self.decoder.run(input_ids, positions, attention, capture)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32 of chosen rows [R, hidden]."""
        return self.decoder.logits(hidden)


class TargetOutput(NamedTuple):
    """Results of the target for the rows of a step."""

    hidden: Tensor  # [N, hidden]
    features: Tensor  # [N, F], what a drafter reads
    logits: Tensor  # [R, V] float32, of the verify rows; none where nothing is sampled


def compute(runner: ModelRunner, step_input: StepInput, capture: tuple[int, ...]) -> TargetOutput:
    """Run the target over a step's rows; `capture` as for `ModelRunner.forward_with_features`."""
    hidden, features = runner.forward_with_features(step_input, capture)
    if not len(step_input.verify_rows):
        return TargetOutput(hidden, features, hidden[:0])
    decoding_only = len(step_input.verify_rows) == len(hidden)
    rows = hidden if decoding_only else hidden[torch.from_numpy(step_input.verify_rows).to(hidden.device)]
    return TargetOutput(hidden, features, runner.logits(rows))
