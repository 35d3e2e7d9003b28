"""A Prometheus of one's own, which evaluates the rules every few seconds."""

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from speculative.errors import TruespecError
from tools.chaos.sockets import free_ports

_START_S = 120.0
_INTERVAL = "2s"
INSTALL = "apt-get install --no-install-recommends prometheus"


class PrometheusNotStarted(TruespecError):
    """Prometheus is not installed, or did not start; the message says which."""


@contextlib.contextmanager
def running_prometheus(folder: Path, scrape: Sequence[Any], rules: Sequence[Path]) -> Iterator[str]:
    """Start one that scrapes and evaluates every two seconds, with its data in `folder`; yields its URL.

    Args:
        folder: of its configuration, data and log.
        scrape: as `scrape_configs` of its configuration.
        rules: files of rules.

    Raises:
        PrometheusNotStarted: it is not installed, or it ended.
    """
    executable = shutil.which("prometheus")
    if executable is None:
        raise PrometheusNotStarted(f"prometheus: this program is not installed; {INSTALL}")
    (port,) = free_ports(1)
    files = [_hastened(path, folder) for path in rules]
    timing = {"scrape_interval": _INTERVAL, "scrape_timeout": _INTERVAL, "evaluation_interval": _INTERVAL}
    config = {"global": timing, "scrape_configs": list(scrape), "rule_files": files}
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config), encoding="utf-8")
    command = [
        executable,
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            _wait_until_ready(f"http://127.0.0.1:{port}", process, folder / "log")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def _hastened(path: Path, folder: Path) -> str:
    """Copy a file of rules whose groups are evaluated every two seconds; windows and waits stay as they are."""
    file = yaml.safe_load(path.read_text(encoding="utf-8"))
    for group in file["groups"]:
        group["interval"] = _INTERVAL
    copy = folder / path.name
    copy.write_text(yaml.safe_dump(file), encoding="utf-8")
    return str(copy)


def _wait_until_ready(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/-/ready").status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise PrometheusNotStarted(f"prometheus: it did not start: {log.read_text(encoding='utf-8')[-500:]}")
