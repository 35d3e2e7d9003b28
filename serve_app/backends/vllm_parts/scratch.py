"""A folder for as long as its process lives. What killed processes have left behind goes when the next one comes."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "truespec-vllm-"
_LOCK = "lock"


class Scratch:
    """A folder of this process alone; its owner holds a lock in it, which the system lets go when the process ends.

    Args:
        parent: where it is made; None = where temporary files are.
    """

    def __init__(self, parent: Path | None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        # Nobody sweeps between a folder's making and its locking.
        with (parent / f".{_PREFIX}{os.getuid()}-{_LOCK}").open("w") as alone:
            fcntl.flock(alone, fcntl.LOCK_EX)
            for folder in parent.glob(f"{_PREFIX}*/"):
                with contextlib.suppress(OSError), (folder / _LOCK).open() as lock:  # it lives, or is another user's
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            self.folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            self._lock = (self.folder / _LOCK).open("w")
            fcntl.flock(self._lock, fcntl.LOCK_EX)

    def remove(self) -> None:
        """Remove it, and all that is in it."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self._lock.close()
