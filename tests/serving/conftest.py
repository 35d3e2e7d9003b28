"""One Ray cluster for all tests of this folder, with the same tiny model behind both topologies."""

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support.services import disaggregated, monolith, ray_port, tiny_folder

__all__ = ["disaggregated", "monolith", "ray_port", "tiny_folder"]

_LOGS = Path("/tmp/ray/session_latest/logs/serve")
_MOST_LINES = 60


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[Any]) -> Generator[None, pytest.TestReport]:
    """A failure shows what Ray Serve's processes warned of, since their files are gone by the time it is read."""
    report = yield
    if report.failed and ray.is_initialized():
        recent = (path for path in sorted(_LOGS.glob("*.log")) if path.stat().st_mtime >= call.start)
        lines = [f"{path.name}: {line}" for path in recent for line in path.read_text(errors="replace").splitlines()]
        worrying = [line for line in lines if "WARNING" in line or "ERROR" in line]
        report.sections.append(("Ray Serve's warnings", "\n".join(worrying[-_MOST_LINES:])))
    return report
