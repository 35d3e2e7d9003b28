"""Facts about a checkpoint that this engine reads by itself: which one it is, and how long its sequences may be."""

import math
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from speculative.errors import ConfigError
from speculative.model.end_tokens import read_if_there
from speculative.model.file_names import QUANTIZED_FILE
from speculative.model.forms import quantization_of

_TIED = ("lm_head.weight", "model.embed_tokens.weight")
_OTHER_NUMBERS = ("quantization", "kv_cache_dtype", "hf_overrides", "model_impl")  # arguments that change the numbers
_NEUTRAL = {"sliding_window": None, "logit_scale": 1.0}  # fields that vLLM follows in models whose class has them not
_ROTATE_ALL = ("llama", "mistral", "qwen2", "qwen3")  # model types whose class knows no `partial_rotary_factor`
_LEAVES_MODEL_ALONE = {"_name_or_path", "transformers_version", "dtype", "torch_dtype", "held_out_acceptance"}


def came_quantized(folder: Path) -> bool:
    """Return whether the plain weights of a folder are those of a quantized checkpoint, written out."""
    return (folder / QUANTIZED_FILE).is_file()


def why_not_ours(folder: Path, engine_args: Mapping[str, Any]) -> str | None:
    """Return why our own engine would compute something else than vLLM with these arguments; None if it would not."""
    from speculative.model.config import ModelConfig  # imports torch, which reading a configuration need not

    for name in _OTHER_NUMBERS:
        if name in engine_args:
            return f"vllm.engine_args.{name} is set"
    try:
        model = ModelConfig.from_folder(folder)
    except ConfigError as error:
        return str(error)
    if model.rope.most_positions < math.inf:
        return "LongRoPE has other factors there, where requests may be longer than the model's original context"
    return "its weights are FP8" if quantization_of(folder) else None


def check_lm_head(folder: Path) -> None:
    """Check that an LM head under `tie_word_embeddings`, which vLLM passes over, is the embedding. Raises ConfigError:
    it is another one, which transformers would use."""
    if read_if_there(folder / "config.json").get("tie_word_embeddings") is not True:
        return
    from safetensors import safe_open  # imports torch, which reading a configuration need not

    found: dict[str, Any] = {}
    for path in weight_files(folder):
        with safe_open(path, framework="pt") as file:
            found |= {name: (path, file.get_tensor(name)) for name in _TIED if name in file.keys()}  # noqa: SIM118
    if len(found) < len(_TIED):
        return
    (path, head), (_, embedding) = (found[name] for name in _TIED)
    if head.shape != embedding.shape or not bool((head == embedding).all()):
        raise ConfigError(
            f"{path}: {_TIED[0]} and {_TIED[1]} differ, but config.json ties them, so vLLM would ignore the "
            f"first; set `tie_word_embeddings` to false, or remove {_TIED[0]} from the file."
        )


def check_rotary(folder: Path) -> None:
    """Check that vLLM rotates as much of a head as the model's class in transformers, which may know no part of one.
    Raises ConfigError: a `partial_rotary_factor` says otherwise."""
    config = read_if_there(folder / "config.json")
    for place in (config, *(config.get(name) for name in ("rope_parameters", "rope_scaling"))):
        factor = place.get("partial_rotary_factor") if isinstance(place, Mapping) else None
        if factor not in (None, 1) and config.get("model_type") in _ROTATE_ALL:
            raise ConfigError(
                f"{folder / 'config.json'}: `partial_rotary_factor` is {factor}, which vLLM would follow, but "
                f"transformers ignores in a {config['model_type']}; set it to 1, or take the file from its source."
            )


def neutral_overrides(folder: Path, engine_args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by which vLLM passes over fields of config.json that the model's class in transformers has not, and so
    passes over: a Llama's `sliding_window` would hide what is behind it. What `hf_overrides` sets is left alone.

    Args:
        folder: a checkpoint.
        engine_args: of the configuration.
    """
    given = engine_args.get("hf_overrides") or {}
    config = read_if_there(folder / "config.json")
    found = {name: value for name, value in _NEUTRAL.items() if config.get(name, value) != value}
    if not found or not isinstance(given, Mapping):
        return {}
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # imports torch, too

    kind = config.get("model_type")
    known = CONFIG_MAPPING[kind].__dataclass_fields__ if kind in CONFIG_MAPPING else found
    unknown = {name: value for name, value in found.items() if name not in known}
    return {"hf_overrides": {**unknown, **given}} if unknown else {}


def folder_fingerprint(folder: Path) -> str:
    """A hash of a checkpoint's configuration and of every byte of its weights, 32 hex digits. Raises ConfigError: there
    are no safetensors files."""
    weights = weight_files(folder)
    if not weights:
        raise ConfigError(f"{folder} holds no safetensors files; the vllm engine takes no other weights.")
    return hash_of((folder / "config.json", *weights))


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint that vLLM reads."""
    return sorted(folder.glob("*.safetensors"))


def hash_of(files: Iterable[Path]) -> str:
    """A hash of every byte of some files, 32 hex digits."""
    digest = blake2b(digest_size=16)
    for path in files:
        with path.open("rb") as file:
            while chunk := file.read(1 << 24):
                digest.update(chunk)
    return digest.hexdigest()


def most_tokens(folder: Path, wanted: int | None) -> int | None:
    """`max_model_len` for vLLM: a token more than requests may have, as far as the model goes."""
    longest = read_if_there(folder / "config.json").get("max_position_embeddings")
    if wanted is None or longest is None:
        return longest if wanted is None else wanted + 1
    return min(wanted + 1, int(longest))


def check_same_model(folder: Path, served: Path) -> None:
    """Check that two checkpoints differ in their weights only. Raises ConfigError: they are of two models; the message
    names the difference."""
    theirs, ours = (read_if_there(one / "config.json") for one in (folder, served))
    for name in sorted({*theirs, *ours} - _LEAVES_MODEL_ALONE):
        if theirs.get(name) != ours.get(name):
            raise ConfigError(
                f"{folder} is of another model: its {name} is {theirs.get(name)}, that of the served one "
                f"{ours.get(name)}. Restart the service with it instead."
            )
