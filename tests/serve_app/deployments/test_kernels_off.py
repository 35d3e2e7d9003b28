"""A service that computes without its kernels says so: once in the log, on the status page, and in a metric. On a GPU
it does not compute without them."""

import asyncio
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from deploy.run.machine import Machine
from deploy.run.preflight import check_machine
from serve_app.backends.torch_backend import TorchBackend
from serve_app.config.files import parse_args
from serve_app.http.page.status import StatusBook
from serve_app.telemetry.metrics import PrometheusSink
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
    caches = (find_kernels, cpu_kernels)
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


DEVICE = torch.device("cuda:1")
NO_TRITON = {
    "compiler": "Triton finds no C compiler .* install gcc",
    "headers": r"Triton compiles its launchers with .*/Python\.h, which is not there; install .*python3\.\d+-dev",
    "Triton": "the package triton is not installed; .*pip install",
    "tensor cores": r"they need compute capability 8\.0, and Tesla T4 has 7\.5; .*CUDA_VISIBLE_DEVICES hides",
}


@pytest.mark.parametrize("lacking", NO_TRITON)
async def test_a_gpu_without_triton_is_refused(
    lacking: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is loaded, whose files are broken: by the check of a configuration and by a replica alike."""
    if lacking == "Triton":
        monkeypatch.setattr("speculative.gpu.triton_here.importlib.util.find_spec", lambda _: None)
    elif lacking == "headers":
        monkeypatch.setattr("sysconfig.get_path", lambda *_: str(tmp_path))
    elif lacking == "compiler":
        request.getfixturevalue("no_compiler")
    capabilities = [(9, 0), (7, 5) if lacking == "tensor cores" else (8, 0)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda one: ("H200", "Tesla T4")[one == DEVICE or one])
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda one: capabilities[one == DEVICE or one])
    folder = write_tiny_model(tmp_path / "m", tokenizer=True)
    config = parse_args(
        {"model": {"source": str(folder)}, "topology": "monolith", "pools": {"monolith": {"num_gpus": 1}}}
    )
    (fault,) = check_machine(config, Machine(8, 2**34, (2**34,))).faults
    assert re.search(rf"args\.pools\.monolith\.num_gpus: is above 0, .*{NO_TRITON[lacking]}.* or set it to 0", fault)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    (folder / "model.safetensors").write_bytes(b"")
    refused = f"device 'cuda:1': .*{NO_TRITON[lacking]}.* or set device to cpu"
    with pytest.raises(ConfigError, match=refused):
        await TorchBackend(str(folder), "tiny", settings(device="cuda:1")).start()
