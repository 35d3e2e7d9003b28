"""Runs the model on one step's rows."""

import torch
from torch import Tensor

from speculative.cache.kv_cache import KVCache
from speculative.model.attention import PreparePass
from speculative.model.decoder import Decoder
from speculative.state.batch import StepInput


class ModelRunner:
    """The target model and its KV cache, eagerly."""

    def __init__(self, decoder: Decoder, cache: KVCache, device: torch.device, prepare: PreparePass) -> None:
        self.cache = cache
        self.device = device
        self._decoder, self._prepare = decoder, prepare

    def forward_with_features(self, step_input: StepInput, capture: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Hidden states [N, hidden] of the step's rows, and the features [N, len(capture) * hidden] that enter the
        layers of `capture`; keys and values are in the cache afterwards."""
        attention, (input_ids, positions) = self._prepare(
            self.cache, step_input.attention_rows(), step_input.input_ids, step_input.positions
        )
        return self._decoder.run(input_ids, positions, attention, capture)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [R, V] float32 of chosen rows [R, hidden]."""
        return self._decoder.logits(hidden)
