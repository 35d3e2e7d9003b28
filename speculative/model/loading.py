"""Finds a checkpoint and loads it: safetensors read directly, every parameter accounted for."""

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from torch import Tensor

from speculative.config import WeightsName, models_folder
from speculative.errors import ConfigError, UnsupportedModel
from speculative.kernels.chosen import ChosenKernels, choose_kernels
from speculative.model.catalogue import CATALOGUE, fetch_model
from speculative.model.config import ModelConfig
from speculative.model.cpu.native import Kind
from speculative.model.decoder import Decoder
from speculative.model.derived import is_derived
from speculative.model.end_tokens import read_json
from speculative.model.file_names import INDEX_FILE, LOWER_FILES, NEVER_READ, QUANTIZED_FILE, TOP_FILES, WEIGHTS_FILE
from speculative.model.forms import format_held
from speculative.model.fp8 import E4M3, check_fp8_sizes, quantize_rows, why_no_fp8
from speculative.model.quantized import Quantized, load_quantized
from speculative.model.tensor_files import check_tensors, read_header, read_tensors, require_finite
from speculative.weight_formats import format_wanted

_logger = logging.getLogger("truespec.model")

_PICKLED = ("*.bin", "*.pt", "*.pth")
_NOT_HAD = {  # a gated model's error is one of a missing model, too
    GatedRepoError: "its licence has to be accepted there, by the owner of the token in HF_TOKEN",
    RepositoryNotFoundError: "it has no such model for this token: check the id, or set HF_TOKEN for a private one",
    RevisionNotFoundError: "the model has no such revision",
}
_LM_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def resolve_model(name_or_path: str | Path, *others: Path) -> Path:
    """The folder of a model: a folder, a catalogue name, or a Hugging Face hub id (`org/name[@revision]`). The last two
    are fetched where they are not here yet; processes that want the same at once share one download.

    Args:
        name_or_path: the model.
        others: folders of further models, by name, where those that were fetched lack it.

    Raises:
        ConfigError: it is none of these, or the hub cannot be reached; the message says how to get a model.
        FetchFailed: a catalogue model could not be fetched.
    """
    name = str(name_or_path)
    path = Path(name).expanduser()
    if name and path.is_dir():
        return path
    if path.is_file():
        what = "a GGUF file, which is not read" if path.suffix == ".gguf" else "a file and not a model"
        raise ConfigError(f"{name} is {what}; give the folder of a checkpoint with safetensors.")
    for models in (models_folder(), *others):
        if name and (models / name / "config.json").is_file():
            return models / name
    if name in CATALOGUE:
        return fetch_model(name, progress=_logger.info)
    if isinstance(name_or_path, Path) or name.startswith((".", "/", "~")):
        raise ConfigError(
            f"There is no folder {name} here; put the checkpoint there, or give a hub id (org/name) or a name of "
            "`truespec model list`, which is fetched where it is needed."
        )
    if name.count("/") != 1:
        raise ConfigError(
            f"No model {name!r}: there is no such folder, and it is not among the fetched models in {models_folder()}. "
            "Give a folder, a hub id (org/name) or a name of `truespec model list`."
        )
    return _from_hub(name)


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    weights: Kind | Literal["fp8"] | None = None,
    kernels: ChosenKernels | None = None,
) -> Decoder:
    """A decoder with the folder's weights, converted to `dtype`.

    Args:
        folder: a checkpoint.
        dtype: of weights and activations.
        device: where to.
        weights: what `choose_weights` said: packed for our CPU kernels in this form, or FP8; None = left to torch.
        kernels: that the weights were chosen for; None = those for the device.

    Raises:
        ConfigError: files or tensors are missing, unexpected, damaged or of another shape, or a weight is not finite.
        UnsupportedModel: the model needs something this engine does not do, or its weights are pickled.
    """
    config = ModelConfig.from_folder(folder)
    files = checkpoint_files(folder)
    if weights == "fp8":
        check_fp8_sizes(config)
    decoder = Decoder(config, fp8=weights == "fp8", dtype=dtype, device=torch.device(device), kernels=kernels)
    _read_into(decoder, folder, files)
    if weights is not None and weights != "fp8":
        quantized = load_quantized(folder) if weights == "w4a8" else {}
        _check_quantized(folder, decoder.checkpoint_slots(), quantized)
        decoder.pack(weights, quantized)
    return decoder.eval()


def check_weights(folder: Path) -> None:
    """Read all weights of a checkpoint, and keep none: what `load_decoder` refuses of its files is refused here.

    Raises:
        ConfigError, UnsupportedModel: as for `load_decoder`.
    """
    config, fp8, nowhere = ModelConfig.from_folder(folder), format_held(folder) == "fp8", torch.device("meta")
    _read_into(Decoder(config, fp8=fp8, dtype=torch.bfloat16, device=nowhere), folder, checkpoint_files(folder))
    check_tensors(file for file in (folder / QUANTIZED_FILE,) if file.is_file())


def _read_into(decoder: Decoder, folder: Path, files: Iterable[Path]) -> None:
    """Fill the parameters of a decoder. Returns with nothing left that would keep the files mapped, or the plain
    weights alive.
    """
    if not (folder / WEIGHTS_FILE).is_file():
        _check_index(folder)
    slots = decoder.checkpoint_slots()
    filled: dict[str, tuple[str, Path]] = {}  # slot -> the tensor that went there, and its file
    for path, name, tensor in read_tensors(files):
        if is_derived(path, name, tensor, decoder.config):
            continue
        require_finite(path, name, tensor)
        slot = _EMBEDDING if name == _LM_HEAD and decoder.config.tie_word_embeddings else name
        if slot not in slots:
            raise ConfigError(f"{path}: unexpected tensor {name}; config.json and the weights do not belong together.")
        for part, numbers in _parts(slot, tensor, slots[slot]).items():
            if part in filled:
                _require_equal(filled[part], (name, path), slots[part], numbers)
            else:
                _fill(path, name, slots[part], numbers)
                filled[part] = name, path
    if missing := [name for name in slots if name not in filled]:
        raise ConfigError(f"{folder} lacks the tensors {_listed(missing)}; download the checkpoint again.")


def _require_equal(first: tuple[str, Path], second: tuple[str, Path], slot: Tensor, numbers: Tensor) -> None:
    """Two tensors of a checkpoint have one place in the model: they have to be the same."""
    fits = numbers.shape == _expected_shape(second[0], slot)
    if fits and (slot.is_meta or bool((numbers.to(slot) == slot).all())):
        return
    (one, its_file), (other, other_file) = first, second
    if one != other:
        raise ConfigError(
            f"{other_file}: {other} and {one} of {its_file.name} differ, and `tie_word_embeddings` in config.json says "
            "that they are one; set it to false, as transformers reads such a checkpoint, or remove "
            f"{_LM_HEAD} from the file if the embedding is the LM head."
        )
    raise ConfigError(
        f"{other_file}: {other} differs from the {one} of {its_file.name}, and the model has one of them; download the "
        "checkpoint again, or remove the wrong one."
    )


def choose_weights(
    wanted: WeightsName, folder: Path, *, dtype: str, device: torch.device, kernels: ChosenKernels | None = None
) -> Kind | Literal["fp8"] | None:
    """The form of a model's weights on this machine, as `load_decoder` takes it; None = torch's own, of `dtype`.

    Args:
        wanted: in the settings.
        folder: a checkpoint.
        dtype: of activations.
        device: where to.
        kernels: of the model; None = those for the device.

    Raises:
        ConfigError: it is not to be had here.
    """
    held = format_held(folder)
    form = format_wanted(wanted, held, dtype, "cuda" if device.type != "cpu" else "cpu")
    if held == "fp8" and form != "fp8":
        raise ConfigError(
            f"{folder} holds FP8 weights, and quantization is {wanted}; take quantization: auto, or the checkpoint "
            "that it was made of."
        )
    if form == "fp8":
        if why := why_no_fp8(device, dtype):
            raise ConfigError(f"quantization: fp8 is not to be had here: {why}.")
        return "fp8"
    if (kernels or choose_kernels(device)).model is None:
        if wanted in ("auto", dtype):
            return None
        raise ConfigError(
            f"quantization: {wanted} with dtype {dtype} needs a CPU with AVX-512 or AVX2, and a C++ compiler; "
            f"take quantization: auto{' or fp8' if device.type == 'cuda' else ''}."
        )
    return form  # type: ignore[return-value]


def checkpoint_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint, whole or sharded.

    Raises:
        ConfigError: there are none, or the index names one that is missing.
        UnsupportedModel: there are only pickled weights, or GGUF files.
    """
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        names = sorted(set(_weight_map(folder).values()))
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise ConfigError(f"{folder} lacks {_listed(missing)}, named in {INDEX_FILE}; download the rest.")
        return [folder / name for name in names]
    if any(file for pattern in _PICKLED for file in folder.glob(pattern)):
        raise UnsupportedModel(
            f"{folder} holds pickled weights only, which can run code when read; convert them to safetensors: "
            "load the model with transformers and call save_pretrained."
        )
    if any(folder.glob("*.gguf")):
        raise UnsupportedModel(f"{folder} holds GGUF files, which are not read; give what they were made of.")
    raise ConfigError(f"{folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; give the folder of a whole checkpoint.")


def _check_index(folder: Path) -> None:
    """Refuse an index that names tensors which their files lack."""
    stated = _weight_map(folder)
    headers = {name: read_header(folder / name) for name in set(stated.values())}
    missing = [name for name, file in stated.items() if name not in headers[file]]
    if missing:
        raise ConfigError(
            f"{folder / INDEX_FILE} names the tensors {_listed(missing)}, which its files lack; take all of them from "
            "one source."
        )


def _weight_map(folder: Path) -> dict[str, str]:
    """The file of each tensor, as the index says."""
    known = read_json(folder / INDEX_FILE).get("weight_map")
    if not isinstance(known, dict) or not all(isinstance(name, str) for name in known.values()):
        raise ConfigError(f"{folder / INDEX_FILE} has no `weight_map` of files; take it from its source again.")
    return known


def _parts(name: str, tensor: Tensor, slot: Tensor) -> dict[str, Tensor]:
    """A checkpoint's tensor as the model keeps it: quantized, with its scales, where the slot is FP8."""
    if slot.dtype != E4M3 or tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return {name: tensor}
    rows = quantize_rows(tensor.to(slot.device))
    return {name: rows.numbers, f"{name}_scale": rows.scales}


def _expected_shape(name: str, slot: Tensor) -> torch.Size:
    return slot.shape[-1:] if name.endswith("norm.weight") else slot.shape  # one norm row serves all heads


def _fill(path: Path, name: str, slot: Tensor, tensor: Tensor) -> None:
    expected = _expected_shape(name, slot)
    if tensor.shape != expected:
        raise ConfigError(
            f"{path}: tensor {name} has shape {list(tensor.shape)}, config.json asks for {list(expected)}; "
            "config.json and the weights do not belong together."
        )
    is_plain = tensor.is_floating_point() and tensor.element_size() > 1
    if not is_plain and tensor.dtype != slot.dtype:
        raise UnsupportedModel(
            f"{path}: tensor {name} is {tensor.dtype}: of quantized weights, only FP8 ones are read, on a GPU; take "
            "the checkpoint that this one was made of, or `engine.kind: vllm`."
        )
    slot.copy_(tensor)


def _check_quantized(folder: Path, slots: Mapping[str, Tensor], quantized: Mapping[str, Quantized]) -> None:
    """The plain weights beside quantized ones are those, dequantized and rounded to bfloat16."""
    for name, weight in quantized.items():
        if name not in slots or weight.numbers.shape != slots[name].shape or not weight.is_rounded_to(slots[name]):
            raise ConfigError(
                f"{folder / QUANTIZED_FILE}: {name} is not the weight of that name in the other files; fetch or "
                f"convert the model again, or if the others are right, remove {QUANTIZED_FILE}."
            )


def _from_hub(hub_id: str) -> Path:
    repository, _, revision = hub_id.partition("@")
    try:
        folder = Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=list(TOP_FILES), ignore_patterns=NEVER_READ
            )
        )
        shards = _weight_map(folder).values() if (folder / INDEX_FILE).is_file() else ()
        lower = [*LOWER_FILES, *(name for name in dict.fromkeys(shards) if "/" in name)]
        snapshot_download(repository, revision=folder.name, allow_patterns=lower)  # of the commit that was fetched
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = next(
            (said for kind, said in _NOT_HAD.items() if isinstance(error, kind)),
            (str(error).strip() or type(error).__name__).splitlines()[0][:200],
        )
        raise ConfigError(
            f"{hub_id!r} is no folder here and could not be had from the Hugging Face hub ({reason}). "
            "Without a hub, give a local folder, or a name of `truespec model list`."
        ) from error
    lacking = [what for what in ("config.json", "*.safetensors") if not any(folder.rglob(what))]
    if lacking:
        raise ConfigError(
            f"{hub_id} has no {' and no '.join(lacking)} on the hub; GGUF files and pickled weights are not read: give "
            "the checkpoint in safetensors."
        )
    return folder


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
