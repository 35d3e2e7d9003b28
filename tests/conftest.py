"""Settings for every test: one thread a process, no network, and a word on what was not selected."""

import gc
import importlib.util
import os
import sys
from collections import Counter
from collections.abc import Generator
from functools import cache
from pathlib import Path
from typing import Any

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
if importlib.util.find_spec("hypothesis"):  # which the tests that need a GPU do without
    import hypothesis

    hypothesis.settings.register_profile("ci", derandomize=True)
    if os.environ.get("CI"):
        hypothesis.settings.load_profile("ci")

LEFT_OUT_BY_DEFAULT = ("gpu", "slow")
_LEFT_OUT = "truespec_left_out"
_RAY = "ray"
_SHARED_CLUSTER = "ray_port"
_deselected = pytest.StashKey[Counter[str]]()
_cluster_shared = pytest.StashKey[bool]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_deselected] = Counter()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put tests in an order that holds in any shuffle: those with a cluster of their own before the shared one starts,
    those marked `first` as it does, and behind the others of their file those marked `last`, or with a browser, whose
    event loop is its thread's.

    The worker that runs all that start Ray gets them first, since they take longest together.
    """
    places: dict[Path, int] = {}
    for item in items:
        if _has(item, _SHARED_CLUSTER) and item.get_closest_marker("ray") is None:
            raise pytest.UsageError(
                f"{item.nodeid} uses the shared Ray cluster: mark its file `ray`, so that it runs there"
            )
        places.setdefault(item.path, len(places))
    items.sort(
        key=lambda item: (places[item.path], item.get_closest_marker("last") is not None or _has(item, "browser"))
    )
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: _group(item.path) != _RAY)
    items.sort(key=lambda item: (_has(item, _SHARED_CLUSTER), item.get_closest_marker("first") is None))


def pytest_collection_finish() -> None:
    """Imports are no garbage. Some tests and engines collect garbage often, and would search all of them each time."""
    gc.collect()
    gc.freeze()


def _has(item: pytest.Item, fixture: str) -> bool:
    return fixture in getattr(item, "fixturenames", ())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None]:
    """A cluster that a test left running, often one that Ray started by itself, would be everybody's after it; and the
    shared one lives until the last test has ended."""
    yield
    ray = sys.modules.get("ray")
    if ray is None:
        return
    stash = item.config.stash
    started = _has(item, _SHARED_CLUSTER) and ray.is_initialized()  # a test that was skipped starts nothing
    shared = stash[_cluster_shared] = stash.get(_cluster_shared, False) or started
    if shared and nextitem is not None and not ray.is_initialized():
        pytest.fail(f"{item.nodeid} ended the Ray cluster that other tests share", pytrace=False)
    if not shared and ray.is_initialized():
        ray.shutdown()
        pytest.fail(f"{item.nodeid} leaves a Ray cluster running: end it with the fixture `ray_ended`", pytrace=False)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Tests of a file run in one worker, one after the other, and so do all files with tests that start Ray."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group(config.rootpath / nodeid.partition("::")[0])

    config.option.loadscopereorder = False  # they are collected in order
    return ByFile(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """All workers leave out the same tests."""
    node.config.stash[_deselected] = Counter(getattr(node, "workeroutput", {}).get(_LEFT_OUT, {}))


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer that knows fewer than its 512 ids: the rest is padding."""
    from tests.support.tiny_models import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", tokenizer=True)


@cache
def _group(path: Path) -> str:
    return _RAY if "mark.ray" in path.read_text(encoding="utf-8") else str(path)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
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
