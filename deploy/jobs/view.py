"""How a long job shows its progress: a bar on a terminal, plain lines in a log."""

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

_LOG_EVERY_S = 30.0


class View:
    """Shows how a long job goes: a bar on a terminal, plain lines with the time in a log."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress: Progress | None = None
        self._task: TaskID | None = None
        self._began = self._reported = time.monotonic()

    def __enter__(self) -> "View":
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:3.0f} %"))
            self._progress = Progress(
                *columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=self._console
            )
            self._progress.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._progress is not None:
            self._progress.stop()

    def say(self, message: str) -> None:
        """A line that stays."""
        elapsed = time.monotonic() - self._began
        self._console.print(f"{elapsed:8.1f} s  {message}", soft_wrap=True, highlight=False, markup=False)

    def stage(self, name: str) -> None:
        """A new stage of the job begins."""
        if self._progress is None:
            self.say(name)
            return
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._task = self._progress.add_task(name, total=1.0, note="")

    def advance(self, share: float, note: str) -> None:
        """The stage is done by this share, 0 to 1."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=share, note=note)
        elif time.monotonic() - self._reported >= _LOG_EVERY_S:
            self._reported = time.monotonic()
            self.say(f"{share:6.1%}  {note}")

    def count(self, done: int, total: int) -> None:
        """So many of a stage's conversations are done."""
        self.advance(done / total, f"{done} of {total} conversations")
