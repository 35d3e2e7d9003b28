"""Settings for every test: one thread a process, no network, and a word on what was not selected."""

import os
from collections import Counter
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
    if config.pluginmanager.hasplugin("dsession"):
        config.pluginmanager.register(_OfWorkers(config))


class _OfWorkers:
    """What the process that starts the workers of `-n` hears of them: all of them leave out the same tests."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_testnodedown(self, node: Any) -> None:
        self._config.stash[_deselected] = Counter(node.workeroutput.get(_LEFT_OUT, {}))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of a module run in one worker, one after the other, and so do all that start Ray."""
    for item in items:
        group = "ray" if item.get_closest_marker("ray") or "serving" in item.path.parts else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))


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
