"""Ends vLLM's engine when its replica is gone.

vLLM's engine is a process of its own. It is not notified when its parent is killed, and would keep its memory and a GPU
forever. Its workers end with it.
"""

import os
import signal
import threading
import time

_LOOK_EVERY_S = 1.0


def end_with_parent() -> None:
    """Watch this process' parent from a thread, and end this process when the parent changes."""
    parent = os.getppid()
    threading.Thread(target=_watch, args=(parent,), name="truespec-orphan", daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_LOOK_EVERY_S)
    os.kill(os.getpid(), signal.SIGKILL)
