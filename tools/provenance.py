"""The provenance of figures: the day, the machine, the versions, the commit, and what else the machine was doing."""

import datetime
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from deploy.run.quiet import MOST_CORES, Others
from serve_app.versions import version_of

_REPORTING_FLAGS = (
    *("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16"),
    *("amx_tile", "amx_bf16", "amx_int8"),
    *("asimd", "sve"),
)
COMMIT = Path("build/gpu-parts/commit")  # where a tree that travels without its history says it
_LIBRARIES = ("truespec", "torch", "ray", "transformers", "numpy")


def provenance() -> dict[str, Any]:
    """Everything but the settings of the run; take it before anything starts. It looks for three seconds at what else
    the machine does."""
    cpu = _cpu()
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(),
        "commit": commit(),
        "cpu": cpu.get("model name", platform.processor() or platform.machine()),
        "cpu_flags": [flag for flag in _REPORTING_FLAGS if flag in cpu.get("flags", cpu.get("Features", "")).split()],
        "cores": os.cpu_count() or 1,
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "gpu": _gpu(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version_of(name) for name in _LIBRARIES},
        "others_before": Others.now(),
    }


def mark() -> str:
    """A line for figures that are printed one by one: their day, commit, device and versions."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    python = f"Python {platform.python_version()}, torch {torch.__version__}"
    return f"{now}, commit {commit() or 'unknown'}, {_gpu() or 'no GPU'}, {python}"


def command_line() -> str:
    """The command line of this process, as a shell reads it."""
    spec = sys.modules["__main__"].__spec__
    program = ["truespec"] if spec is None else ["python", "-m", spec.name.removesuffix(".__main__")]
    return shlex.join([*program, *sys.argv[1:]])


def describe(found: dict[str, Any]) -> str:
    """One paragraph for people."""
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    machine = f"{found['cpu']}, {found['cores']} cores ({' '.join(found['cpu_flags'])}), {found['memory_gib']:.0f} GiB"
    gpu = f", {found['gpu']}" if found["gpu"] else ""
    text = f"{found['date']}, commit {found['commit']}. {machine}{gpu}. Python {found['python']}, {versions}."
    others = (found["others_before"], found.get("others_meanwhile"))
    seen = [cores for cores in others if cores is not None]
    if not seen:
        return f"{text} What else ran is not known."
    if max(seen) > MOST_CORES:
        used = f"others used up to {max(seen):.2f} cores"
        return f"{text} **The machine was not quiet**: {used}. Do not quote these figures."
    return f"{text} The machine was quiet: others used {max(seen):.2f} cores at most."


def _cpu() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _gpu() -> str | None:
    """Name, compute capability, memory, and the versions that make its code; None where there is none."""
    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    chip = f"{found.name}, sm_{found.major}{found.minor}, {found.total_memory / 2**30:.0f} GiB"
    return f"{chip} (CUDA {torch.version.cuda}, driver {_driver()}, triton {version_of('triton')})"


def _driver() -> str:
    try:
        reported = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return "unknown"
    return next(iter(reported.stdout.split()), "unknown")


def commit() -> str:
    """Return the commit of the source tree, with `+` when it was edited since. Of a tree that travelled without its
    history it is the one that was written down; empty where nothing is known."""
    folder = Path(__file__).parent
    if not (folder.parent / ".git").exists() and COMMIT.exists():
        return COMMIT.read_text(encoding="utf-8").strip()
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""  # no git
