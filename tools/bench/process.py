"""An engine in a process of its own: started, asked, ended."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import deploy
import tools
from deploy.run.processes import process_tree
from speculative.errors import TruespecError
from tools.bench.engines import Launch
from tools.bench.workers.channel import BatchOfPrompts

_LOG_LINES = 12
_SETTLE_S = 0.3  # for what an engine has missed while it was stopped
_END_S = 60.0  # for an application on Ray to stop


class EngineFailed(TruespecError):
    """An engine of the bench could not start, or gave up; the message ends with its last words."""


class EngineProcess:
    """Starts when entered, ends when left. Between answers it and all processes it started are stopped: a cluster of
    Ray's is busy even when nobody asks.

    Args:
        launch: what to start.
        folder: for its log.
    """

    def __init__(self, launch: Launch, folder: Path) -> None:
        self._launch = launch
        self._log = folder / f"{launch.name.text.replace('/', '-').replace(':', '_')[:80]}.log"
        self._folder = folder
        self.max_streams: int | None = None
        self.versions: dict[str, str] = {}
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [self._launch.python, "-m", self._launch.module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=engine_environment(self._launch, self._folder),
                start_new_session=True,  # Ctrl-C is for the bench alone; a worker ends with its input
                text=True,
            )
        try:
            reported = self._exchange(self._launch.settings)
        except BaseException:
            self.close()
            raise
        self.max_streams, self.versions = reported["max_streams"], reported["versions"]
        self._signal(signal.SIGSTOP)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """The process's id while it runs."""
        return None if self._process is None else self._process.pid

    def run(self, ask: BatchOfPrompts) -> dict[str, Any]:
        """One batch of prompts. Raises EngineFailed: the engine said so, or has ended."""
        self._signal(signal.SIGCONT)
        time.sleep(_SETTLE_S)
        try:
            return self._exchange(asdict(ask))
        finally:
            self._signal(signal.SIGSTOP)

    def close(self) -> None:
        """End the process; one that does not by itself is killed."""
        process = self._process
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        self._signal(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()
        self._process = None

    def _signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        for pid in process_tree(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(message) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = process.wait()  # the log is whole then
            lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            last = "\n".join(lines[-_LOG_LINES:]) or "it said nothing"
            if status < 0:
                advice = f" ({self._launch.if_killed})" if self._launch.if_killed else ""
                raise EngineFailed(f"{signal.Signals(-status).name} ended it{advice}: {last}")
            raise EngineFailed(f"it ended with status {status}: {last}")
        reported: dict[str, Any] = json.loads(line)
        if "error" in reported:
            raise EngineFailed(reported["error"])
        return reported


def engine_environment(launch: Launch, folder: Path) -> dict[str, str]:
    """This process's, with the engine's threads, and of ours only `deploy` and `tools` to import. How threads wait for
    work is left to each engine."""
    path = os.environ.get("PYTHONPATH", "")
    if launch.python != sys.executable:
        packages = folder / "packages"
        packages.mkdir(exist_ok=True)
        for ours in (deploy, tools):
            package = packages / ours.__name__
            if not package.exists():
                package.symlink_to(Path(str(ours.__file__)).parent)
        path = str(packages)
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": str(launch.threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        **launch.environment,
    }
