"""`truespec serve` as its user starts it: a process of its own, where Ray Serve is set for throughput too."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from deploy.ports import free_port
from serve_app.config.serve_file import HttpOptions

pytestmark = pytest.mark.ray


def test_a_service_starts_and_stops_where_serve_shares_its_loop(tiny_folder: Path, tmp_path: Path) -> None:
    """RAY_SERVE_THROUGHPUT_OPTIMIZED implies this; a handle that is used from a thread then has no loop of its own."""
    args = {"model": {"source": str(tiny_folder), "name": "tiny"}, "topology": "monolith"}
    engine = {"dtype": "float32", "max_model_len": 128, "kv_cache_tokens": 2048}
    file = tmp_path / "serve.yaml"
    application = {"name": "tiny", "import_path": "serve_app.app:build_app", "args": {**args, "engine": engine}}
    file.write_text(yaml.safe_dump({"applications": [application]}), encoding="utf-8")
    port = str(free_port(HttpOptions()))
    command = [str(Path(sys.executable).with_name("truespec")), "serve", str(file), "--port", port]
    env = {**os.environ, "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0"}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        shown = []
        for line in process.stdout:
            shown.append(line)
            if line.lstrip().startswith("Serving"):
                process.send_signal(signal.SIGINT)
        code = process.wait()
    said = "".join(shown)
    assert said.count("Serving tiny at") == 1 and "Traceback" not in said, said
    assert code in (0, 130), said
