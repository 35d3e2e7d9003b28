"""An engine's weights: the target's and its drafter's, loaded together and changed together."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from speculative.config import EngineConfig
from speculative.drafting.draft_model import DecoderDraftModel
from speculative.drafting.head_drafters import Eagle3DraftModel
from speculative.drafting.neural_drafter import DraftModel
from speculative.errors import ConfigError
from speculative.kernels.chosen import choose_kernels
from speculative.model.applied import check_applied
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.fingerprint import model_fingerprint
from speculative.model.layers import pinned_parameters
from speculative.model.loading import choose_weights, load_decoder, resolve_model
from speculative.model.new_weights import Networks, require_host_memory, require_same_form


@dataclass(frozen=True, slots=True)
class Weights:
    """A target with the drafter that belongs to it: heads share the target's embedding or LM head."""

    decoder: Decoder
    fingerprint: str = ""  # of the target's configuration and weights
    draft_model: DraftModel | None = None

    @property
    def networks(self) -> dict[str, nn.Module]:
        """What is computed with: the target, and the drafter where it has weights."""
        return {"model": self.decoder} | ({} if self.draft_model is None else {"drafter": self.draft_model.network})


def load_weights(
    folder: Path,
    config: EngineConfig,
    device: torch.device,
    drafter: str | Path | None = None,
    decoder: Decoder | None = None,
    check: bool = False,
    replaced: Networks | None = None,
) -> Weights:
    """Load a checkpoint, and the drafter for it. Touches no engine, so it may be done beside one that runs.

    Args:
        folder: the target's checkpoint.
        config: what the engine is to be.
        device: that computes with it.
        drafter: the drafter's weights; None = those that `config` names.
        decoder: the target's weights, where they are loaded already.
        check: compare what was loaded with the checkpoints, tensor by tensor.
        replaced: what a GPU computes with by now: the new weights are kept in the host's pinned memory, to be copied
            over it. None, or on a CPU = they are loaded to the device.

    Raises:
        ConfigError: files are missing or damaged, target and drafter do not belong together, a tensor is not what its
            checkpoint says, or they cannot be copied over those that are replaced.
        UnsupportedModel: the checkpoint needs what this engine does not do.
    """
    if drafter is not None and config.drafter.model is None:
        raise ConfigError(f"drafter.kind {config.drafter.kind} has no weights, but an update names some ({drafter}).")
    config = config.on_cpu() if device.type == "cpu" else config
    kernels = choose_kernels(device) if decoder is None else decoder.kernels
    kind = choose_weights(config.quantization, folder, dtype=config.dtype, device=device, kernels=kernels)
    dtype = getattr(torch, config.dtype)
    place = device
    if device.type == "cpu":
        replaced = None
    elif replaced is not None:
        require_host_memory(replaced)
        place = torch.device("cpu")
    with pinned_parameters(pin=replaced is not None):
        if decoder is None:
            decoder = load_decoder(folder, dtype=dtype, device=place, weights=kind, kernels=kernels)
        draft_model = _load_draft_model(folder, config, decoder, drafter, device)
    if check:
        check_applied(decoder, folder, dtype)
        if draft_model is not None and isinstance(draft_model.network, Decoder):
            check_applied(draft_model.network, resolve_model(drafter or config.drafter.model or ""), dtype)
    weights = Weights(decoder, model_fingerprint(folder, weights=kind), draft_model)
    if replaced is not None:
        require_same_form(replaced, weights.networks)
    return weights


def longest_sequence(model: ModelConfig, config: EngineConfig) -> int:
    """Tokens of the longest sequence that an engine takes. Raises ConfigError: max_model_len is more than the model has
    positions."""
    positions = model.max_position_embeddings
    if config.max_model_len is None:
        return min(positions, config.kv_cache_tokens or positions)
    if config.max_model_len > positions:
        short = " (those of LongRoPE's `short_factor`; its `long_factor` is not used)"
        raise ConfigError(
            f"max_model_len is {config.max_model_len}, but the model has {positions} positions"
            f"{short if positions == model.rope.most_positions else ''}; lower max_model_len."
        )
    return config.max_model_len


def check_same_model(folder: Path, served: ModelConfig) -> None:
    """Refuse a checkpoint that is not of the model that is served: only weights can be changed while it runs. Raises
    ConfigError: it is of another model; the message names the first difference."""
    wanted = ModelConfig.from_folder(folder)
    for name in ModelConfig.__dataclass_fields__:
        theirs, ours = getattr(wanted, name), getattr(served, name)
        # A folder of weights alone names fewer end tokens; those that are served stay.
        fits = set(theirs) <= set(ours) if name == "eos_token_ids" else theirs == ours
        if not fits:
            raise ConfigError(
                f"{folder} is of another model: its {name} is {theirs}, and {ours} is served. Only the weights can "
                "change while the service runs; deploy another model as an application of its own."
            )


def _load_draft_model(
    folder: Path, config: EngineConfig, target: Decoder, drafter: str | Path | None, device: torch.device
) -> DraftModel | None:
    if config.drafter.model is None:
        return None
    if config.drafter.kind == "mtp":
        raise ConfigError("drafter.kind mtp needs engine.kind: vllm; set that, or use eagle3.")
    found, dtype = resolve_model(drafter or config.drafter.model), getattr(torch, config.dtype)
    if config.drafter.kind == "eagle3":
        return Eagle3DraftModel.load(found, target, dtype=dtype, device=target.device)
    longest = longest_sequence(target.config, config)
    return DecoderDraftModel.load(found, folder, target, longest, dtype=dtype, device=device)
