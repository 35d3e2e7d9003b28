"""Finds a checkpoint and loads it: safetensors read directly, every parameter accounted for."""

import logging
from collections.abc import Iterable
from pathlib import Path

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

from speculative.config import models_folder
from speculative.errors import ConfigError, UnsupportedModel
from speculative.kernels.chosen import ChosenKernels, choose_kernels
from speculative.model.catalogue import CATALOGUE, fetch_model
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.derived import is_derived
from speculative.model.end_tokens import read_json
from speculative.model.file_names import INDEX_FILE, LOWER_FILES, NEVER_READ, TOP_FILES, WEIGHTS_FILE
from speculative.model.formats import EMBEDDING, LM_HEAD, format_of
from speculative.model.forms import format_held, own_files
from speculative.model.tensor_files import PLAIN, check_tensors, read_header, read_tensors, require_finite
from speculative.weight_formats import FORMATS, format_wanted

_logger = logging.getLogger("truespec.model")

_OTHERS = "take the checkpoint that this one was made of, or `engine.kind: vllm`"
_PICKLED = ("*.bin", "*.pt", "*.pth")
_NOT_HAD = {  # a gated model's error is one of a missing model, too
    GatedRepoError: "its licence has to be accepted there, by the owner of the token in HF_TOKEN",
    RepositoryNotFoundError: "it has no such model for this token: check the id, or set HF_TOKEN for a private one",
    RevisionNotFoundError: "the model has no such revision",
}


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
    repository, _, revision = name.partition("@")
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
            f"{name!r} is no folder here and could not be had from the Hugging Face hub ({reason}). "
            "Without a hub, give a local folder, or a name of `truespec model list`."
        ) from error
    lacking = [what for what in ("config.json", "*.safetensors") if not any(folder.rglob(what))]
    if lacking:
        raise ConfigError(
            f"{name} has no {' and no '.join(lacking)} on the hub; GGUF files and pickled weights are not read: give "
            "the checkpoint in safetensors."
        )
    return folder


def load_decoder(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    weights: str | None = None,
    kernels: ChosenKernels | None = None,
) -> Decoder:
    """A decoder with the folder's weights, converted to `dtype`.

    Args:
        folder: a checkpoint.
        dtype: of weights and activations.
        device: where to.
        weights: the format, as `choose_weights` said; None = plain, and not packed for our CPU kernels.
        kernels: that the weights were chosen for; None = those for the device.

    Raises:
        ConfigError: files or tensors are missing, unexpected, damaged or of another shape, or a weight is not finite.
        UnsupportedModel: the model needs something this engine does not do, or its weights are pickled.
    """
    config = ModelConfig.from_folder(folder)
    files, form = checkpoint_files(folder), format_of(weights or "")
    form.check(config)
    decoder = Decoder(config, weights=form, dtype=dtype, device=torch.device(device), kernels=kernels)
    _read_into(decoder, folder, files)
    if weights is not None and FORMATS[weights].packed and decoder.kernels.model is not None:
        form.check_given(folder, decoder.checkpoint_slots())
        decoder.pack(folder)
    return decoder.eval()


def check_weights(folder: Path) -> None:
    """Read all weights of a checkpoint, and keep none: what `load_decoder` refuses of its files is refused here.

    Raises:
        ConfigError, UnsupportedModel: as for `load_decoder`.
    """
    config, form = ModelConfig.from_folder(folder), format_of(format_held(folder) or "")
    nowhere = Decoder(config, weights=form, dtype=torch.bfloat16, device=torch.device("meta"))
    _read_into(nowhere, folder, checkpoint_files(folder))
    check_tensors(own_files(folder, *FORMATS))


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
        slot = EMBEDDING if name == LM_HEAD and decoder.config.tie_word_embeddings else name
        if name.endswith((".qweight", ".qzeros", ".g_idx")):  # an older one, whose config.json says nothing
            raise UnsupportedModel(f"{path}: {name} is of weights quantized by GPTQ or AWQ; {_OTHERS}.")
        if slot not in slots:
            raise ConfigError(f"{path}: unexpected tensor {name}; config.json and the weights do not belong together.")
        parts, rounded = {slot: tensor}, decoder.weights.rounded
        if rounded is not None and slots[slot].dtype not in PLAIN and tensor.dtype in PLAIN:
            own = rounded(tensor.to(slots[slot].device)).parameters()
            parts = {f"{slot.removesuffix('weight')}{part}": numbers for part, numbers in own.items()}
        for part, numbers in parts.items():
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
            f"{LM_HEAD} from the file if the embedding is the LM head."
        )
    raise ConfigError(
        f"{other_file}: {other} differs from the {one} of {its_file.name}, and the model has one of them; download the "
        "checkpoint again, or remove the wrong one."
    )


def choose_weights(
    wanted: str, folder: Path, *, dtype: str, device: torch.device, kernels: ChosenKernels | None = None
) -> str:
    """The format of a model's weights on this machine, as `load_decoder` takes it.

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
    form = format_wanted(wanted, held, dtype, "cpu" if device.type == "cpu" else "cuda")
    alone = held is not None and bool(FORMATS[held].scheme)
    if alone and form != held:
        raise ConfigError(
            f"{folder} holds weights in {held}, and quantization is {wanted}; take quantization: auto, or the "
            "checkpoint that it was made of."
        )
    why = format_of(form).why_not(device, dtype, (kernels or choose_kernels(device)).model)
    if why and (wanted != "auto" or alone):
        raise ConfigError(f"quantization: {form} is not to be had here: {why}.")
    return dtype if why else form


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
            f"{path}: tensor {name} is {tensor.dtype}: of quantized weights, FP8 alone is read, on a GPU; {_OTHERS}."
        )
    slot.copy_(tensor)


def _listed(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
