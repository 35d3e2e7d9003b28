"""Safetensors files as a checkpoint has them: whole by their own headers, their tensors one by one, and finite."""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from speculative.errors import ConfigError
from speculative.model.end_tokens import LFS_POINTER

_LENGTH_BYTES = 8  # of the header's length, which begins a file
_FP8 = torch.float8_e4m3fn  # torch does not compare it on every device
PLAIN = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def read_tensors(files: Iterable[Path]) -> Iterator[tuple[Path, str, Tensor]]:
    """Each tensor of some safetensors files, with its file and name.

    Raises:
        ConfigError: a file is damaged.
    """
    for path in files:
        read_header(path)
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  (a safetensors file is no mapping)
                    yield path, name, file.get_tensor(name)
        except SafetensorError as error:
            raise ConfigError(f"{path} is damaged ({error}); download it again.") from error


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of some safetensors files, each read when it is asked for.

    Raises:
        ConfigError: a file is damaged.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._files = {name: path for path in files for name in read_header(path)}

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def check_tensors(files: Iterable[Path]) -> None:
    """Read all tensors of some files, and keep none.

    Raises:
        ConfigError: a file is damaged, or a tensor holds NaN or an infinity.
    """
    for path, name, tensor in read_tensors(files):
        require_finite(path, name, tensor)


def read_header(path: Path) -> dict[str, Any]:
    """Return what the header of a file says of each tensor, by its name.

    Raises:
        ConfigError: the file is shorter or longer than its header says, or has none.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            begins = file.read(len(LFS_POINTER))
            length = int.from_bytes(begins[:_LENGTH_BYTES], "little")
            file.seek(_LENGTH_BYTES)
            header = file.read(min(length, size))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); let this user read it, or fetch it.") from error
    if begins == LFS_POINTER.encode():
        raise ConfigError(f"{path} is a pointer of Git LFS and not the file; fetch it with `git lfs pull`.")
    try:
        tensors = {name: tensor for name, tensor in json.loads(header).items() if name != "__metadata__"}
        wanted = _LENGTH_BYTES + length + max((int(one["data_offsets"][1]) for one in tensors.values()), default=0)
    except (AttributeError, KeyError, IndexError, TypeError, ValueError):
        raise ConfigError(
            f"{path} is damaged: its {size:,} bytes do not begin with the header of a safetensors file; download it "
            "again."
        ) from None
    if size != wanted:
        what = "it was cut off" if size < wanted else "something was added"
        raise ConfigError(f"{path} has {size:,} bytes, and its header says {wanted:,}: {what}; download it again.")
    return tensors


def require_finite(path: Path, name: str, tensor: Tensor) -> None:
    """Refuse a tensor that holds NaN or an infinity, which nearly every answer would be made of.

    Raises:
        ConfigError: it does.
    """
    if tensor.dtype == _FP8:  # has no infinity
        found = "NaN" if bool((tensor.view(torch.uint8) & 0x7F == 0x7F).any()) else ""
    elif tensor.dtype not in PLAIN or not tensor.numel():
        found = ""
    else:
        extremes = torch.stack(torch.aminmax(tensor))  # NaN where there is one; nothing else is as fast
        found = "NaN" if bool(extremes.isnan().any()) else "an infinity" if bool(extremes.isinf().any()) else ""
    if found:
        raise ConfigError(f"{path}: tensor {name} holds {found}; download the checkpoint again, or take another.")
