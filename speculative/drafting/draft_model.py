"""A smaller model of the same vocabulary drafts.

Source: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2211.17192).
"""

from pathlib import Path

import torch
from torch import Tensor

from speculative.errors import ConfigError
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.end_tokens import Json, read_if_there
from speculative.model.fingerprint import model_fingerprint
from speculative.model.layers import Attend
from speculative.model.loading import choose_weights, load_decoder
from speculative.scheduling.draft_length import ExpectedRates


class DecoderDraftModel:
    """A whole decoder as a draft model: it reads tokens, and nothing of the target.

    Models of one family may be padded to different numbers of ids behind the same tokens. The draft model then drafts
    the tokens alone, and reads an id that it has no embedding for as its own last one.
    """

    capture: tuple[int, ...] = ()
    num_features = 0
    held_out_rates: ExpectedRates = (), ()
    fused = None

    def __init__(self, decoder: Decoder, fingerprint: str, num_drafted: int | None = None) -> None:
        """Wrap a decoder that drafts its first `num_drafted` ids; None = all, and the target has as many."""
        config = decoder.config
        self.ids = None if num_drafted is None else torch.arange(num_drafted, device=decoder.device)
        self._last_id = config.vocab_size - 1
        self.name = f"draft_model:{fingerprint}"
        self.kv_shape = config.kv_shape
        self.hidden_size = config.hidden_size
        self.network = decoder

    @classmethod
    def load(
        cls,
        folder: Path,
        target_folder: Path,
        target: Decoder,
        max_model_len: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "DecoderDraftModel":
        """Load a checkpoint folder to where the target lies, for the same kernels.

        Args:
            folder: the draft model's.
            target_folder: the target's, whose vocabulary it has to have.
            target: the loaded one.
            max_model_len: tokens of the longest sequence that is drafted for.
            dtype: of its weights.
            device: that computes with them.

        Raises:
            ConfigError: its vocabulary is not the target's, or it has too few positions.
        """
        num_drafted = drafted_ids(folder, target_folder, max_model_len)
        name, kernels = str(dtype).removeprefix("torch."), target.kernels
        weights = choose_weights("auto", folder, dtype=name, device=device, kernels=kernels)
        decoder = load_decoder(folder, dtype=dtype, device=target.device, weights=weights, kernels=kernels)
        return cls(decoder, model_fingerprint(folder, weights=weights), num_drafted)

    def fuse(self, features: Tensor) -> Tensor:
        """Nothing is read."""
        return features

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """token_ids, positions [N] -> [N, hidden]; `hidden` is not read."""
        del hidden
        if self.ids is not None:
            token_ids = token_ids.clamp(max=self._last_id)
        return self.network.run(token_ids, positions, attend)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden] -> [R, W], W as in `ids`."""
        logits = self.network.project(hidden)
        return logits if self.ids is None else logits[:, : len(self.ids)].contiguous()


def drafted_ids(folder: Path, target_folder: Path, max_model_len: int) -> int | None:
    """Return the number of ids that a draft model may draft, which are those of tokens that both have; None = all.

    Args:
        folder: the draft model's.
        target_folder: the target's.
        max_model_len: tokens of the longest sequence that is drafted for.

    Raises:
        ConfigError: they have other tokens, or are padded differently and have no tokenizer.json to compare; or it has
            too few positions.
    """
    both = (folder, target_folder)
    models = [ModelConfig.from_folder(one) for one in both]
    if (positions := models[0].max_position_embeddings) < max_model_len:
        raise ConfigError(
            f"drafter.model {folder} has {positions} positions, and requests may have {max_model_len}; set "
            f"max_model_len to {positions}, or take another draft model."
        )
    sizes = [one.vocab_size for one in models]
    tokenizers = [read_if_there(one / "tokenizer.json") for one in both]
    tokens = [(one.get("model") or {}).get("vocab") for one in tokenizers]
    known = all(tokens)
    if (known and tokens[0] != tokens[1]) or (not known and sizes[0] != sizes[1]):
        why = "" if known else ", and without a tokenizer.json of each they cannot be compared"
        raise ConfigError(
            f"drafter.model {folder} has another vocabulary ({sizes[0]} ids) than the model ({sizes[1]}){why}; take a "
            "draft model of the same family."
        )
    return None if sizes[0] == sizes[1] else min(*sizes, *map(_num_ids, tokenizers))


def _num_ids(tokenizer: Json) -> int:
    """The ids below which all tokens of a tokenizer.json are."""
    tokens = tokenizer["model"]["vocab"]
    added = [int(token["id"]) for token in tokenizer.get("added_tokens") or ()]
    return max(len(tokens) - 1 if isinstance(tokens, list) else max(tokens.values()), *added) + 1
