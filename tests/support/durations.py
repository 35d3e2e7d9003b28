"""CPU seconds of every test: a limit for new ones, and the order in which files are given to workers.

`make durations` writes `tests/durations.json`: the wall time of each file, and the CPU seconds of each test that takes
more than a few. A test fails if it needs more than `LIMIT_S` (twice that on a processor without AVX-512, and where
other programs have the processors too), is not listed there and is not marked `slow`.
"""

import json
import os
import resource
import time
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

RECORD = Path(__file__).parents[1] / "durations.json"
LIMIT_S = 10.0
_NARROW = 2.0  # times as long: what computes, on a processor without AVX-512
_SHARED = 2.0  # times as long: a second, where two programs share a core and its caches
_BUSY = 1.5  # runnable programs a processor; a run of its own has one
_NOTED_S = 3.0  # what a machine three times as slow may find above the limit
_SPENT = "cpu_s"
# What these take is other programs' time, and depends on what else the machine does.
_UNLIMITED = ("slow", "gpu", "vllm", "ray")
_UNLIMITED_FOLDER = "clients"


class Durations:
    """The hooks; one object a pytest process. writes: whether this run makes the record, and so exceeds nothing."""

    def __init__(self, *, writes: bool, record: Path = RECORD) -> None:
        self._writes, self._record = writes, record
        known = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {}
        self.files_s: dict[str, float] = known.get("files", {})
        self._tests_s: dict[str, float] = known.get("tests", {})
        self._seen_files_s: defaultdict[str, float] = defaultdict(float)
        self._seen_tests_s: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        __tracebackhide__ = True
        before_s, began = _cpu_s(), time.monotonic()
        try:
            result = yield
        finally:
            # What children took that began before the test, and ended in it, is not the test's.
            most_s = (time.monotonic() - began) * (os.cpu_count() or 1)
            spent_s = min(_cpu_s() - before_s, most_s)
            item.user_properties.append((_SPENT, spent_s))
        known = self._writes or item.nodeid in self._tests_s
        unlimited = any(map(item.get_closest_marker, _UNLIMITED)) or item.path.parent.name == _UNLIMITED_FOLDER
        if spent_s > LIMIT_S and not known and not unlimited and spent_s > _limit_s():
            pytest.fail(
                f"{item.nodeid} took {spent_s:.1f} CPU seconds; a new test may take {LIMIT_S:.0f}. Make it cheaper, "
                "mark it `slow`, or accept its price with `make durations`.",
                pytrace=False,
            )
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seen_files_s[report.nodeid.partition("::")[0]] += report.duration
        if report.when == "call":
            self._seen_tests_s[report.nodeid] = dict(report.user_properties).get(_SPENT, 0.0)  # type: ignore[arg-type]

    def write(self) -> None:
        """Replace the record by what this run took."""
        files = {name: round(seconds, 1) for name, seconds in sorted(self._seen_files_s.items()) if seconds >= 1.0}
        tests = {name: round(seconds, 1) for name, seconds in sorted(self._seen_tests_s.items()) if seconds >= _NOTED_S}
        self._record.write_text(json.dumps({"files": files, "tests": tests}, indent=1) + "\n", encoding="utf-8")


def _limit_s() -> float:
    import torch  # which not every run needs

    wide = torch.backends.cpu.get_cpu_capability() == "AVX512"
    busy = os.getloadavg()[0] > _BUSY * (os.cpu_count() or 1)
    return LIMIT_S * (1.0 if wide else _NARROW) * (_SHARED if busy else 1.0)


def _cpu_s() -> float:
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)
