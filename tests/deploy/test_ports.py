"""A service that cannot listen at its configured address is refused before anything starts."""

import re
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Never

import pytest
import yaml
from click.testing import CliRunner, Result

from deploy.cli.console import CONFIGS
from deploy.cli.main import main
from deploy.run.ports import free_port
from serve_app.config.serve_file import HttpOptions
from speculative.errors import ConfigError
from tests.support.tiny_models import write_tiny_model


@contextmanager
def listening(host: str) -> Iterator[int]:
    """Listen as Ray Serve's proxy does, which lets others onto the same port. Nobody answers, and nobody waits long."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    if family == socket.AF_INET6 and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    with closing(socket.socket(family)) as proxy:
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        proxy.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        proxy.bind((host, 0))
        proxy.listen()
        yield proxy.getsockname()[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost", "::"])
@pytest.mark.parametrize("other", ["127.0.0.1", "0.0.0.0", "::"])
def test_a_port_that_is_taken_is_refused_whatever_address_it_is_taken_at(host: str, other: str) -> None:
    with listening(other) as port:
        reported = rf"http_options.port: {port} on {re.escape(host)} is in use; stop .* or take another port"
        with pytest.raises(ConfigError, match=reported):
            free_port(HttpOptions(host=host), port)
    assert free_port(HttpOptions(host=host), port) == port


@pytest.mark.parametrize("host", ["nowhere.invalid", "192.0.2.7", "2001:db8::7", "..", "x" * 70 + ".invalid"])
def test_a_host_that_is_not_here_is_refused(host: str) -> None:
    reported = r"http_options.host: .* is not an address of this machine \(.*0\.0\.0\.0"
    with pytest.raises(ConfigError, match=reported):
        free_port(HttpOptions(host=host))


def truespec(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(one) for one in arguments])


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """monolith.yaml with a tiny model."""
    folder = write_tiny_model(tmp_path / "tiny", tokenizer=True)
    data = yaml.safe_load((CONFIGS / "monolith.yaml").read_text())
    args = data["applications"][0]["args"]
    args["model"] = {"source": str(folder), "name": "tiny"}
    args["engine"] |= {"max_model_len": 128, "kv_cache_tokens": 1024}
    args["pools"]["monolith"]["num_cpus"] = 1
    file = tmp_path / "app.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


def started(*_: object, **__: object) -> Never:
    pytest.fail("Ray was started")


def test_commands_refuse_a_taken_port_before_ray_starts(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.init", started)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for command in (["serve", file], ["demo", "--config", file]):
        with listening("0.0.0.0") as port:
            run = truespec(*command, "--port", port)
        assert run.exit_code == 1 and isinstance(run.exception, SystemExit), run.output
        assert re.search(
            rf"^Error: (--port \()?http_options\.port\)?: {port} on 127\.0\.0\.1 is in use", run.output, re.M
        )


@pytest.mark.parametrize(
    ("address", "reported"),
    [
        ("nowhere", "'nowhere' is not the address of a Ray cluster; give auto, or HOST:PORT of its head."),
        ("nowhere.invalid:6379", "The Ray cluster at nowhere.invalid:6379 cannot be reached ("),
        ("127.0.0.1:{free}", "cannot be reached ([Errno 111] Connection refused); give HOST:PORT of its head"),
        ("ray://127.0.0.1:{free}", "cannot be reached ("),
    ],
)
def test_a_cluster_that_is_not_there_is_reported_in_one_line(
    address: str, reported: str, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.init", started)
    address = address.format(free=free_port(HttpOptions()))
    for command in (["serve", file], ["config", "check", file]):
        run = truespec(*command, "--address", address)
        assert run.exit_code == 1 and isinstance(run.exception, SystemExit), run.output
        assert reported in run.output.replace("\n", " ")


def test_an_interrupt_ends_quietly_with_the_shells_code(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> Never:
        raise KeyboardInterrupt

    monkeypatch.setattr("ray.init", interrupted)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    run = truespec("serve", file, "--port", free_port(HttpOptions()))
    assert run.exit_code == 130 and run.output.splitlines()[-1] == "Interrupted."
