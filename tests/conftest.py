"""Settings for every test: one thread a process, no network, and a word on what was not selected."""

import os
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

# Before anything imports torch: two OpenMP threads beside another busy process are far slower than one.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
# As `truespec serve` has it: with Ray's 15 any other process starves the replicas.
os.environ.update(RAY_worker_niceness="0")
if not Path("/dev/nvidiactl").exists():  # without a GPU, Triton's kernels are run by its interpreter
    os.environ["TRITON_INTERPRET"] = "1"

# CI repeats itself; at a developer's desk new examples are looked for.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

LEFT_OUT_BY_DEFAULT = ("gpu", "slow")
_LEFT_OUT = "truespec_left_out"
_deselected = pytest.StashKey[Counter[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_deselected] = Counter()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file run in one worker, one after the other, and so do all files with tests that start Ray."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(config.rootpath / nodeid.partition("::")[0])

    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers leave out the same tests."""
    node.config.stash[_deselected] = Counter(getattr(node, "workeroutput", {}).get(_LEFT_OUT, {}))


@cache
def _group(path: Path) -> str:
    return "ray" if "mark.ray" in path.read_text(encoding="utf-8") else str(path)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (output := getattr(session.config, "workeroutput", None)) is not None:
        output[_LEFT_OUT] = dict(session.config.stash[_deselected])


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        marks = [name for name in LEFT_OUT_BY_DEFAULT if item.get_closest_marker(name)]
        item.config.stash[_deselected][" and ".join(marks) or "other"] += 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    skipped = Counter(_reason(report) for report in terminalreporter.stats.get("skipped", ()))
    if skipped:
        reasons = "; ".join(f"{count}: {reason}" for reason, count in skipped.most_common())
        terminalreporter.write_line(f"Skipped: {skipped.total()} tests ({reasons}).")
    counts = config.stash[_deselected]
    if counts:
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        terminalreporter.write_line(f"Not selected: {counts.total()} tests ({kinds}). `make test-all` runs them too.")


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test was skipped, as its `longrepr` has it: file, line, and the reason behind a word of pytest's own."""
    assert isinstance(report.longrepr, tuple)
    return report.longrepr[2].removeprefix("Skipped: ")
