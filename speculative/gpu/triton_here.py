"""Requirements of Triton: a compiler and headers, a GPU that its kernels fit, a folder for what it compiles."""

import importlib.util
import logging
import os
import shutil
import sys
import sysconfig
from pathlib import Path

import torch

from speculative.config import kernels_folder
from speculative.errors import ConfigError

_log = logging.getLogger("truespec.config")
_LEAST_CAPABILITY = (8, 0)  # below it Triton multiplies without tensor cores, and prompts' tiles do not fit


def why_no_triton(device: torch.device | None = None) -> str:
    """Say why Triton's kernels cannot be used on a GPU, and what to do about it; "" = they can.

    device: of CUDA; None = each that this process sees, since Ray may give any of them to a replica.
    """
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; install it (pip install triton)"
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):  # as Triton looks for it
        return "Triton finds no C compiler to compile its launchers with; install gcc, or set CC"
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    if not header.is_file():
        package = "python{}.{}-dev".format(*sys.version_info)
        return (
            f"Triton compiles its launchers with {header}, which is not there; install Python's headers ({package} on "
            "Debian and Ubuntu, python3-devel on Fedora)"
        )
    for each in range(torch.cuda.device_count()) if device is None else (device,):
        if (capability := torch.cuda.get_device_capability(each)) < _LEAST_CAPABILITY:
            return (
                f"they need compute capability {{}}.{{}}, and {torch.cuda.get_device_name(each)} has {{}}.{{}}; take a "
                "GPU since Ampere (CUDA_VISIBLE_DEVICES hides others)"
            ).format(*_LEAST_CAPABILITY, *capability)
    return ""


def require_triton(device: torch.device) -> None:
    """Refuse a GPU whose kernels cannot be compiled here. Raises ConfigError: why, and what to do."""
    if why := why_no_triton(device):
        raise ConfigError(
            f"device {str(device)!r}: an engine computes on a GPU with Triton's kernels, of which there are none here: "
            f"{why}, or set device to cpu (for a replica, num_gpus of its pool to 0)."
        )


def keep_triton_kernels() -> Path | None:
    """Have Triton keep what it compiles in truespec's cache, unless TRITON_CACHE_DIR says where. None where that cannot
    be written to: then Triton keeps it in the home folder."""
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or kernels_folder() / "triton")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is read-only")
    except OSError as error:
        _log.warning("The GPU kernels cannot be kept in %s (%s): each start compiles them again.", folder, error)
        return None
    os.environ["TRITON_CACHE_DIR"] = str(folder)
    return folder
