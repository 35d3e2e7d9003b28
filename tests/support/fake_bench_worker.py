"""A worker of the bench without an engine behind it: it notes who was asked when, and fails when asked to."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.bench.workers.channel import BatchOfPrompts, Meter, serve


class Fake:
    """Its settings are name, log (a file), pause_s (between tokens, by a clock of its own), fails_at (the number of the
    answer that fails), dies (by this status, or the signal of this name) and child (it starts a process)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._asked = 0
        self.max_streams: int | None = settings.get("max_streams")
        self.versions = {"fake": "1"}
        if settings.get("child"):
            subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        if settings.get("fails_at") == 0:
            raise ValueError("no such fake")

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        self._asked += 1
        with Path(self._settings["log"]).open("a") as log:
            log.write(f"{self._settings['name']} {ask.seed}\n")
        if self._asked == self._settings.get("fails_at"):
            if self._settings.get("dies"):
                os.write(2, b"a last word\n")
                if isinstance(self._settings["dies"], int):
                    os._exit(self._settings["dies"])
                os.kill(os.getpid(), signal.Signals[self._settings["dies"]])
            raise RuntimeError("it would not")
        meter = Meter(len(ask.prompts))
        pause_s = self._settings.get("pause_s", 0.001)
        for number in range(ask.max_tokens):  # reported, not slept: a busy machine changes no speed
            for stream in range(len(ask.prompts)):
                meter.emit(stream, [number], at=meter.began + (number + 1) * pause_s)
        return meter.sample() | {"environment": dict(os.environ)}

    def processes(self) -> list[int]:
        return [os.getpid()]


if __name__ == "__main__":
    serve(Fake)
