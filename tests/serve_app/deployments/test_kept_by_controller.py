"""Responses go to the controller; an answer does not wait for one that is gone."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve.exceptions import RayServeException

from serve_app.deployments import http_front
from serve_app.deployments.http_front import ControllersResponses


def controller(put: Any) -> Any:
    return lambda: SimpleNamespace(put_response=SimpleNamespace(remote=put))


async def hang(*args: Any) -> bool:
    await asyncio.sleep(60)
    return True


async def fail(*args: Any) -> bool:
    raise RayServeException("the controller is gone")


async def test_a_controller_that_does_not_answer_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_front, "_KEEP_PATIENCE_S", 0.01)
    for put in (hang, fail):
        assert await ControllersResponses(controller(put)).put("resp_1", "key", b"{}") is False
