"""Processes of vLLM's, seen from outside."""

import subprocess
from pathlib import Path


def children(pid: int) -> list[int]:
    """All processes below one."""
    found = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False).stdout.split()
    return [process for child in map(int, found) for process in (child, *children(child))]


def alive(pid: int) -> bool:
    """Whether it runs; what is dead and not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
