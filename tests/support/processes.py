"""Processes, seen from outside."""

import contextlib
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.support.waiting import wait_for


def alive(pid: int) -> bool:
    """Whether it runs; what is dead and not waited for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@contextlib.contextmanager
def until_interrupted(
    command: Sequence[str],
    shown: Path,
    until: str,
    environment: Mapping[str, str],
    *,
    cwd: Path | None = None,
    starts_within_s: float = 300.0,
    ends_within_s: float = 120.0,
) -> Iterator[tuple[Callable[[], str], subprocess.Popen[bytes]]]:
    """A program that is interrupted at the end of the block, which begins when it says `until`, or has ended: what it
    has said, kept in the file `shown`, and its process."""
    with shown.open("w") as out:
        program = subprocess.Popen(command, cwd=cwd, env=environment, stdout=out, stderr=out)
    try:
        wait_for(lambda: program.poll() is not None or until in shown.read_text(), until, starts_within_s)
        yield shown.read_text, program
    finally:
        program.send_signal(signal.SIGINT)
        program.wait(ends_within_s)
