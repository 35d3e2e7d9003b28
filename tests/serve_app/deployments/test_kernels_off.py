"""A service that computes without its kernels says so: once in the log, on the status page, and in a metric."""

import asyncio
import importlib.util
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from serve_app.backends.torch_backend import TorchBackend
from serve_app.config.files import parse_args
from serve_app.page.status import StatusBook
from serve_app.telemetry.metrics import PrometheusSink
from speculative.config import why_no_triton
from speculative.gpu.operators import GraphOperators
from speculative.gpu.paged_attention import AttentionSizes, TorchAttend
from speculative.kernels.chosen import ChosenKernels
from speculative.kernels.library import cpu_kernels, find_kernels
from tests.support.engines import settings
from tests.support.referees import RefereeHandle, Worker
from tests.support.tiny_models import write_tiny_model


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PATH", "")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    caches = (find_kernels, cpu_kernels, why_no_triton)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


async def test_a_replica_without_its_kernels_says_so(
    no_compiler: None, referee: RefereeHandle, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_model(tmp_path / "m", tokenizer=True)
    made = object.__new__(Worker)
    made.make_backend = lambda *_: TorchBackend(str(folder), "tiny", settings())  # type: ignore[assignment, method-assign]
    with caplog.at_level(logging.WARNING):
        await made.__init__(parse_args({"model": {"source": "fake"}}), "decode", referee)  # type: ignore[misc]
        await made.host.reporter.report()
    (shown,) = StatusBook({}, PrometheusSink(), lambda: 0.0).render(referee.registry.overview())["replicas"]
    for task in made.host.runtime.tasks:
        task.cancel()
    await asyncio.gather(*made.host.runtime.tasks, return_exceptions=True)
    await made.host.backend.stop()
    assert shown["kernels"] == "cpu"
    why = shown["kernels_off"]
    assert "install g++" in why or "AVX-512" in why, "the reason, and what to do"
    warnings = [record.getMessage() for record in caplog.records if "without its kernels" in record.getMessage()]
    assert len(warnings) == 1 and why in warnings[0]
    for report in referee.reports:
        gauges = {name: value for (name, _), value in report.batch.gauges.items()}
        assert gauges["truespec_kernels_active"] == 0


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_without_a_c_compiler_a_gpu_attends_by_torch(no_compiler: None) -> None:
    assert "install gcc" in why_no_triton()
    assert isinstance(
        GraphOperators.on(torch.device("cuda"), ChosenKernels()).attend(AttentionSizes(16, 1, 4)), TorchAttend
    )
