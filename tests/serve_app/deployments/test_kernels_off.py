"""A service that computes without its kernels says so: once in the log, on the status page, and in a metric. On a GPU
it does not compute without them."""

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from deploy.run.machine import Machine
from deploy.run.preflight import check_machine
from serve_app.backends.torch_backend import TorchBackend
from serve_app.config.files import parse_args
from serve_app.http.page.status import StatusBook
from serve_app.telemetry.metrics import PrometheusSink
from speculative.config import why_no_triton
from speculative.errors import ConfigError
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


NO_TRITON = {
    "no compiler": "Triton finds no C compiler .* install gcc",
    "no Triton": "the package triton is not installed; .*pip install",
}


@pytest.mark.parametrize("lacking", NO_TRITON)
async def test_a_gpu_without_triton_is_refused(
    lacking: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded, whose files are broken: by the check of a configuration and by a replica alike."""
    if lacking == "no Triton":
        monkeypatch.setattr("speculative.config.importlib.util.find_spec", lambda _: None)
        request.addfinalizer(why_no_triton.cache_clear)
        why_no_triton.cache_clear()
    else:
        request.getfixturevalue("no_compiler")
    folder = write_tiny_model(tmp_path / "m", tokenizer=True)
    config = parse_args(
        {"model": {"source": str(folder)}, "topology": "monolith", "pools": {"monolith": {"num_gpus": 1}}}
    )
    (fault,) = check_machine(config, Machine(8, 2**34, (2**34,))).faults
    assert re.search(rf"args\.pools\.monolith\.num_gpus: is above 0, .*{NO_TRITON[lacking]}.* or set it to 0", fault)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (folder / "model.safetensors").write_bytes(b"")
    refused = f"device 'cuda': .*{NO_TRITON[lacking]}.* or set device to cpu"
    with pytest.raises(ConfigError, match=refused):
        await TorchBackend(str(folder), "tiny", settings(device="cuda")).start()
