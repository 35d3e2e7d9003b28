"""A pretence for tests: vLLM's CPU build, under a name by which Ray places it on what a node says are GPUs.

vLLM's Ray executor places each rank by the resource that the platform names; the CPU build names none. This platform is
the CPU build in all else, so ranks are placed, started and spoken to as on a cluster with GPUs, and compute on the CPU.
"""

from pathlib import Path

_PLATFORM = """
from vllm.platforms.cpu import CpuPlatform


class PretendedGpus(CpuPlatform):
    ray_device_key = "GPU"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"
"""


def write_pretended_gpus(folder: Path) -> Path:
    """A folder for `PYTHONPATH`, in which vLLM finds the platform as one of its plugins."""
    installed = folder / "pretended_gpus-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: pretended-gpus\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[vllm.platform_plugins]\npretended = pretended_gpus:platform\n")
    (folder / "pretended_gpus.py").write_text(
        "def platform():\n    return 'pretended_gpus_platform.PretendedGpus'\n", encoding="utf-8"
    )
    (folder / "pretended_gpus_platform.py").write_text(_PLATFORM, encoding="utf-8")
    return folder
