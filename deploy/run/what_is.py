"""The first argument of commands about an application: a model or a file of settings, and what it is where neither."""

import difflib
import re
from pathlib import Path

from speculative.errors import ConfigError

CONFIGS = Path(__file__).parents[1] / "configs"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+(@\S+)?")

_HUB_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+?)(?:\.git)?(?:/.*)?")
_WEIGHTS = (".safetensors", ".gguf", ".bin", ".pt", ".pth")
_FOLDERS = {
    "adapter_config.json": "a LoRA adapter: merge it into its model and give that, or name it in vllm.lora_modules",
    "model_index.json": "a model of diffusers, which makes images: truespec serves language models",
    "snapshots": "the hub's cache of a model: give the model's id, ORG/MODEL, or the folder below snapshots/",
    "params.json": "weights in their maker's own layout: give the folder with config.json, as transformers reads it",
}
"""Kinds of folders without config.json, by a file that marks them, and what to give instead."""


def shipped(given: str) -> Path | None:
    """The configuration of this name that comes with truespec, where no file and no model's folder has the name."""
    path, named = Path(given), CONFIGS / f"{given}.yaml"
    is_name = str(path.parent) in (".", "recipes") and not path.is_file() and not (path / "config.json").is_file()
    return named if is_name and named.is_file() else None


def file_or_model(given: str) -> Path | str:
    """The file of settings that was given, or the source of a model: a folder, a catalogue name or a hub id. Raises
    ConfigError: it is neither; the message says what it is, and what to give instead."""
    from speculative.config import models_folder  # not for commands that name no model
    from speculative.model.catalogue import CATALOGUE

    try:
        if url := _HUB_URL.fullmatch(given):
            raise ConfigError(f"{given} is a page of the hub; give the model's id: {url[1]}.")
        path = Path(given).expanduser()
        if found := shipped(given):
            return found
        if path.is_dir():
            return _folder(given, path)
        if path.suffix == ".gguf" and path.exists():
            raise ConfigError(f"{given} is a GGUF file, which truespec does not serve; give a folder of safetensors.")
        if path.exists():
            if path.suffix in _WEIGHTS or (path.suffix == ".json" and (path.parent / "config.json").is_file()):
                raise ConfigError(f"{given} is one file of a model; give its folder: {path.parent}.")
            return path
        if path.is_symlink():
            raise ConfigError(f"{given} is a link to {path.readlink()}, which is not there; give another path.")
        is_path = given.startswith((".", "/", "~")) or path.suffix in (".yaml", ".yml", ".json", *_WEIGHTS)
        if given in CATALOGUE or (models_folder() / given / "config.json").is_file():
            return given
        if HUB_ID.fullmatch(given) and not is_path:
            return given
        raise ConfigError(_missing(given, path, is_path=is_path))
    except (OSError, ValueError) as error:  # no permission, too long a name, letters that no path has
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{given} cannot be read: {reason}; let this user read it, or give another path.") from error


def _folder(given: str, path: Path) -> str:
    if (path / "config.json").is_file():
        return given
    for name, what in _FOLDERS.items():
        if (path / name).exists():
            raise ConfigError(f"{given} is {what}.")
    inside = sorted(path.iterdir())
    below = [one.name for one in inside if (one / "config.json").is_file()]
    files = [one.name for one in inside if one.suffix in (".yaml", ".yml")]
    named = [str(Path(given) / name) for name in (below or files)[:3]]
    if any(one.suffix == ".gguf" for one in inside):
        raise ConfigError(f"{given} is a folder of GGUF files, which truespec does not serve; give the safetensors.")
    if not inside:
        raise ConfigError(f"{given} is an empty folder; put a checkpoint into it, or give another folder or a hub id.")
    hint = f"Did you mean {' or '.join(named)}?" if named else "Give the folder that has it, or a file of settings."
    raise ConfigError(f"{given} is a folder without config.json, so it holds no model. {hint}")


def _missing(given: str, path: Path, *, is_path: bool) -> str:
    from speculative.model.catalogue import CATALOGUE

    names = sorted(one.relative_to(CONFIGS).with_suffix("").as_posix() for one in CONFIGS.rglob("*.yaml"))
    ours = [name for name in names if shipped(name)]
    known = [*ours, *CATALOGUE]
    beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(given, known, n=1) or [
        str(path.parent / name) for name in difflib.get_close_matches(path.name, beside, n=1)
    ]
    hint = f" Did you mean {near[0]}?" if near else ""
    if is_path:
        what = "file" if path.suffix in (".yaml", ".yml", ".json", *_WEIGHTS) else "file or folder"
        parent = "" if path.parent.is_dir() else f", nor a folder {path.parent}"
        return f"There is no {what} {given} here{parent}.{hint} Give a model's folder, a hub id (ORG/MODEL) or a file."
    return (
        f"{given!r} is no file or folder here, no hub id (ORG/MODEL), no name of `truespec model list` and no "
        f"configuration that comes with truespec ({', '.join(ours)}).{hint}"
    )
