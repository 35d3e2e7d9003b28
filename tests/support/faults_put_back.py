"""A plugin of pytest: a test that `CAUGHT_BY` names has its fault in every engine that it makes."""

import contextlib
from collections.abc import Generator
from typing import Any

import pytest

from speculative.engine import EngineCore
from tests.mutants.test_mutants import CAUGHT_BY
from tools.faults.mutants import MUTANTS


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """Install it behind the constructor of engines; one that it cannot be put into has not what it spoils."""
    make = EngineCore.__init__

    def made(engine: EngineCore, *args: Any, **named: Any) -> None:
        make(engine, *args, **named)
        for fault, test in CAUGHT_BY.items():
            if item.nodeid.startswith(test):
                with contextlib.suppress(AttributeError):
                    MUTANTS[fault].install(engine)

    EngineCore.__init__ = made  # type: ignore[method-assign]
    try:
        return (yield)
    finally:
        EngineCore.__init__ = make  # type: ignore[method-assign]
