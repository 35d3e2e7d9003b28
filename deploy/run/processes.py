"""Processes of this machine. Standard library only, since workers of other environments use it."""

from pathlib import Path


def stat_of(pid: int | str) -> list[str]:
    """The fields of /proc/PID/stat behind the name: the state, the parent, and so on; none where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def process_tree(pid: int) -> list[int]:
    """The process and all that descend from it. Linux."""
    stats = {int(folder.name): stat_of(folder.name) for folder in Path("/proc").glob("[0-9]*")}
    parents = {child: int(stat[1]) for child, stat in stats.items() if stat}
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found
