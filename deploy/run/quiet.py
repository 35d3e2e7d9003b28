"""The load of a machine: processor time that others than this process and what it started took, in cores.

Read from Linux's /proc; what a hypervisor gave to other machines (steal) counts too.
"""

import os
import time
from pathlib import Path

from deploy.run.processes import process_tree, stat_of

MOST_CORES = 0.1
"""Most cores that others use while a machine still counts as quiet."""

_LOOK_S = 3.0
_IDLE, _IOWAIT = 3, 4  # columns of /proc/stat's first line
_NUM_COLUMNS = 8  # the guests' that follow are part of the users'
_TIMES = slice(11, 15)  # of /proc/PID/stat behind the name: user, system, and those of children that ended


class Others:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._before = others_s()

    @classmethod
    def now(cls) -> float | None:
        """The cores that others use at present, over three seconds; None where it cannot be known."""
        others = cls()
        if others._before is not None:
            time.sleep(_LOOK_S)
        return others.cores()

    def cores(self) -> float | None:
        """The mean since it was made; None where it cannot be known."""
        now = others_s()
        if self._before is None or now is None:
            return None
        return max(0.0, now - self._before) / max(time.monotonic() - self._began, 1e-3)


def others_s() -> float | None:
    """Processor seconds of everybody but this process and its descendants since the machine started; None where it
    cannot be known."""
    busy = busy_s()
    if busy is None:
        return None
    # One that has ended since has no fields; its parent counts its time once it has waited for it.
    own = sum(int(field) for pid in process_tree(os.getpid()) for field in stat_of(pid)[_TIMES])
    return busy - own / os.sysconf("SC_CLK_TCK")


def busy_s() -> float | None:
    """Processor seconds of everybody."""
    try:
        columns = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    except OSError:
        return None
    ticks = [int(column) for column in columns[:_NUM_COLUMNS]]
    return (sum(ticks) - ticks[_IDLE] - ticks[_IOWAIT]) / os.sysconf("SC_CLK_TCK")
