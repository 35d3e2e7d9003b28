"""Reads configuration files and arguments, and names what is wrong in them."""

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from serve_app.config.app_config import AppConfig
from serve_app.config.base import FieldError, FieldErrors, SomeModel, fault_in_words
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError


def load_config(path: Path | str, origin: str | None = None) -> ServeFile:
    """Read and check the application's YAML file; `origin` names it in messages, instead of its path.

    Raises:
        ConfigError: as of `read_file`.
    """
    return check_file(read_yaml(path), origin or path)


def check_file(data: Any, origin: Path | str) -> ServeFile:
    """Check what an application's file holds.

    Raises:
        ConfigError: as of `check_data`.
    """
    if isinstance(data, Mapping) and data and data.keys() <= AppConfig.model_fields.keys():
        raise ConfigError(
            f"{origin}: settings of the model ({', '.join(data)}) stand at the top; put them under "
            "applications[0].args, as in the file that `truespec config show MODEL` writes."
        )
    return check_data(data, ServeFile, origin)


def read_file(path: Path | str, kind: type[SomeModel]) -> SomeModel:
    """Read and check a YAML file.

    Raises:
        ConfigError: the file cannot be read, is not YAML, or a field is wrong; one line `file: field: message` a fault.
    """
    return check_data(read_yaml(path), kind, path)


def check_data(data: Any, kind: type[SomeModel], origin: Path | str) -> SomeModel:
    """Check what a YAML file holds; `origin` is where it comes from, for the messages.

    Raises:
        ConfigError: a field is wrong; one line `origin: field: message` a fault.
    """
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(f"{origin}: {line}" for line in _faults(error))) from error


def read_yaml(path: Path | str) -> Any:
    """Read a YAML file. Raises ConfigError: it cannot be read, or is not YAML."""
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {why_unread(error)}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not YAML: {why_unread(error)}.") from error
    except yaml.MarkedYAMLError as error:
        place = error.problem_mark or error.context_mark
        at = f"line {place.line + 1}, column {place.column + 1}: " if place is not None else ""
        raise ConfigError(f"{path}: is not YAML: {at}{error.problem or error.context}.") from error
    except _NOT_YAML as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from error


def why_unread(error: OSError | ValueError) -> str:
    """Say why a file cannot be read, and what to do about it."""
    if isinstance(error, OSError):
        return f"{error.strerror or error}{_REMEDIES.get(error.errno or 0, '')}"
    return "it is no text in UTF-8; give another file"


def parse_args(args: Mapping[str, Any]) -> AppConfig:
    """Check the `args` that Ray Serve hands to the application builder.

    Raises:
        ConfigError: a field is wrong; one line `args.field: message` a fault.
    """
    try:
        return AppConfig.model_validate(args)
    except ValidationError as error:
        raise ConfigError("\n".join(_faults(error, "args"))) from error


_REMEDIES = {
    errno.EACCES: "; let this user read it (chmod), or give another file",
    errno.ENOENT: "; check the path",
    errno.EISDIR: "; give a file in it",
}

# PyYAML lets through what its constructors run into, and what a deep file does to it.
_NOT_YAML = (yaml.YAMLError, ValueError, KeyError, TypeError, AttributeError, RecursionError)


class _Loader(yaml.SafeLoader):
    """YAML that refuses a key given twice, where PyYAML would silently keep the last, and says which value is wrong."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            made = super().construct_object(node, deep)
            if isinstance(made, int):
                str(made)  # Python writes no number of thousands of digits, so nothing could tell or show it
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            kind, value = node.tag.rpartition(":")[2], str(node.value)[:40]
            raise yaml.constructor.ConstructorError(
                None, None, f"{value!r} is not a valid {kind}", node.start_mark
            ) from error
        return made

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key.value!r} is given twice", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def _faults(error: ValidationError, root: str = "") -> list[str]:
    lines = []
    for fault in error.errors(include_url=False):
        cause = fault.get("ctx", {}).get("error")
        path = fault["loc"]
        if isinstance(cause, FieldError | FieldErrors):
            found = cause.errors if isinstance(cause, FieldErrors) else [cause]
            lines += [f"{_dotted(root, (*path, one.field))}: {one}" for one in found]
            continue
        lines.append(f"{_dotted(root, path)}: {fault_in_words(fault)}")
    return lines


def _dotted(root: str, path: tuple[int | str, ...]) -> str:
    text = root
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".") or "the file"
