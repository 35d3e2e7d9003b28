"""A referee that tests of several modules ask."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.referees import Court


@pytest.fixture
async def court(tmp_path: Path) -> AsyncIterator[Court]:
    made = Court(tmp_path)
    work = asyncio.create_task(made.checker.run())
    yield made
    work.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await work
