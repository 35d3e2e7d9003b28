"""Processes of vLLM's, seen from outside."""

from pathlib import Path


def alive(pid: int) -> bool:
    """Whether it runs; what is dead and not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"
