"""A smaller model of the same vocabulary drafts.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2211.17192).
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from speculative.errors import ConfigError
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.fingerprint import model_fingerprint
from speculative.model.layers import Attend
from speculative.model.loading import choose_weights, load_decoder
from speculative.scheduling.draft_length import ExpectedRates


class DecoderDraftModel:
    """A whole decoder as a draft model: it reads tokens, and nothing of the target."""

    capture: tuple[int, ...] = ()
    num_features = 0
    ids: Tensor | None = None
    held_out_rates: ExpectedRates = (), ()
    fused = None

    def __init__(self, decoder: Decoder, fingerprint: str) -> None:
        config = decoder.config
        self.name = f"draft_model:{fingerprint}"
        self.kv_shape = config.kv_shape
        self.hidden_size = config.hidden_size
        self.network = decoder

    @classmethod
    def load(
        cls, folder: Path, target_folder: Path, target: Decoder, max_model_len: int, *, dtype: torch.dtype
    ) -> "DecoderDraftModel":
        """Load a checkpoint folder to the target's device, for the same kernels.

        Args:
            folder: the draft model's.
            target_folder: the target's, whose vocabulary it has to have.
            target: the loaded one.
            max_model_len: tokens of the longest sequence that is drafted for.
            dtype: of its weights.

        Raises:
            ConfigError: its vocabulary is not the target's, or it has too few positions.
        """
        _check_vocabulary(folder, target_folder)
        positions = ModelConfig.from_folder(folder).max_position_embeddings
        if positions < max_model_len:
            raise ConfigError(
                f"drafter.model {folder} has {positions} positions, but max_model_len is {max_model_len}; "
                f"set max_model_len to {positions}, or take another draft model."
            )
        device, kernels = target.device, target.kernels
        name = str(dtype).removeprefix("torch.")
        weights = choose_weights("auto", folder, dtype=name, device=device, kernels=kernels)
        decoder = load_decoder(folder, dtype=dtype, device=device, weights=weights, kernels=kernels)
        return cls(decoder, model_fingerprint(folder, weights=weights))

    def fuse(self, features: Tensor) -> Tensor:
        """Nothing is read."""
        return features

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions [N] -> [N, hidden]; `hidden` is not read."""
        del hidden
        return self.network.run(token_ids, positions, attend)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, V]."""
        return self.network.lm_head(hidden)  # type: ignore[no-any-return]


def _check_vocabulary(folder: Path, target_folder: Path) -> None:
    sizes = [ModelConfig.from_folder(one).vocab_size for one in (folder, target_folder)]
    vocabularies = [_vocabulary(one) for one in (folder, target_folder)]
    known = None not in vocabularies
    if sizes[0] != sizes[1] or (known and vocabularies[0] != vocabularies[1]):
        raise ConfigError(
            f"drafter.model {folder} has another vocabulary ({sizes[0]} tokens) than the model ({sizes[1]}); "
            "take a draft model of the same family."
        )


def _vocabulary(folder: Path) -> object:
    """The tokenizer's tokens and ids; None where there is no tokenizer to look at."""
    file = folder / "tokenizer.json"
    if not file.is_file():
        return None
    return json.loads(file.read_text(encoding="utf-8")).get("model", {}).get("vocab")
