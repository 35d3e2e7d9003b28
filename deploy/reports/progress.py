"""Progress of long commands: a bar on a terminal, plain lines in a log."""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_SILENT_S = 10.0  # in a log, until a line says what goes on
_REFRESH_S = 0.5


class View:
    """Shows what a long command is doing: a bar on a terminal; in a log a line whenever ten seconds passed without one.

    A view may be called in place of `say`, as every function that reports progress expects it.

    Args:
        console: where it is shown; None = nowhere.
    """

    def __init__(self, console: Console | None = None, silent_s: float = _SILENT_S) -> None:
        self._console = console
        self._silent_s = silent_s
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._stage = ""
        self._share: float | None = None
        self._note: Callable[[], str] = str
        self._began = self._reported = time.monotonic()
        self._lock = threading.RLock()
        self._ended = threading.Event()
        self._ticker: threading.Thread | None = None

    def __enter__(self) -> Self:
        if self._console is None:
            return self
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[share]}"))
            self._progress = Progress(
                *columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=self._console
            )
            self._progress.start()
        self._ended.clear()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)
        self._ticker.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        if self._ticker is not None:
            self._ticker.join()
        if self._progress is not None:
            self._progress.stop()
        self._progress = self._task = None

    def __call__(self, message: str) -> None:
        self.say(message)

    def say(self, message: str) -> None:
        """A line that stays."""
        if self._console is None:
            return
        with self._lock:
            self._reported = time.monotonic()
            elapsed = self._reported - self._began
            self._console.print(
                f"{elapsed:8.1f} s  {message}", soft_wrap=True, highlight=False, markup=False, emoji=False
            )

    def stage(self, name: str, note: Callable[[], str] = str) -> None:
        """A new stage begins; a log has a line of it.

        Args:
            name: what it does.
            note: asked now and then, from another thread, for how far it is; such as what was found so far.
        """
        with self._lock:
            self._stage, self._share, self._note = name, None, note
            if self._progress is None:
                self.say(name)
                return
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(name, total=None, note="", share="")

    def count(self, done: int, total: int, things: str = "conversations") -> None:
        """Show how many of a stage's things are done."""
        share, note = done / total, f"{done} of {total} {things}"
        with self._lock:
            self._share, self._note = share, lambda: note
            if self._progress is not None and self._task is not None:
                self._progress.update(self._task, total=1.0, completed=share, share=f"{share:4.0%}", note=note)

    def _tick(self) -> None:
        while not self._ended.wait(min(_REFRESH_S, self._silent_s)):
            with self._lock, contextlib.suppress(RuntimeError):  # what the note counts is changing just now
                if self._progress is not None and self._task is not None:
                    self._progress.update(self._task, note=self._note())
                elif self._progress is None and self._stage and time.monotonic() - self._reported >= self._silent_s:
                    parts = (self._stage, "" if self._share is None else f"{self._share:.0%}", self._note())
                    self.say(", ".join(part for part in parts if part))
