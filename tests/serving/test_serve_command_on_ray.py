"""`truespec serve` as its user starts it: a process of its own, where Ray Serve is set for throughput too."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.waiting import wait_for
from tools.chaos.sockets import free_ports

pytestmark = [pytest.mark.slow, pytest.mark.ray]

LONGEST_S = 180.0


def test_a_service_starts_and_stops_where_serve_shares_its_loop(tiny_folder: Path, tmp_path: Path) -> None:
    """RAY_SERVE_THROUGHPUT_OPTIMIZED implies this; a handle that is used from a thread then has no loop of its own."""
    args = {"model": {"source": str(tiny_folder), "name": "tiny"}, "topology": "monolith"}
    engine = {"dtype": "float32", "max_model_len": 128, "kv_cache_tokens": 2048}
    file = tmp_path / "serve.yaml"
    application = {"name": "tiny", "import_path": "serve_app.app:build_app", "args": {**args, "engine": engine}}
    file.write_text(yaml.safe_dump({"applications": [application]}), encoding="utf-8")
    port = str(free_ports(1)[0])
    command = [str(Path(sys.executable).with_name("truespec")), "serve", str(file), "--port", port]
    env = {**os.environ, "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
    shown = tmp_path / "shown"
    with shown.open("w") as out:  # a file: what the command started might keep a pipe open
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        serving = re.compile(r"^ *Serving", re.MULTILINE)
        wait_for(lambda: process.poll() is not None or bool(serving.search(shown.read_text())), "the start", LONGEST_S)
        process.send_signal(signal.SIGINT)
        code = process.wait(LONGEST_S)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        pytest.fail(f"{error}; the command wrote:\n{shown.read_text()}")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = shown.read_text()
    assert said.count("Serving tiny at") == 1 and "Traceback" not in said, said
    assert code in (0, 130), said
