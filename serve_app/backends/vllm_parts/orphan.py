"""Ends vLLM's engine when the replica that it belongs to is gone.

vLLM's engine is a process of its own. It is not told when its parent is killed at once, and would keep its memory, and
a GPU, for ever. Its workers end with it.
"""

import os
import signal
import threading
import time

_LOOK_EVERY_S = 1.0


def end_with_parent() -> None:
    """Watch the parent of this process from a thread, and end this process when it has another."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="truespec-orphan", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)
