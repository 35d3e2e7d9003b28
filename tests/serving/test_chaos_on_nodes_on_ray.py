"""`python -m tools.chaos --kill-nodes` as a user runs it, with a tiny model."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.services import ENGINE, MODEL
from tests.support.tiny_models import write_tiny_model
from tools.chaos.sockets import free_ports

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]


def test_no_answer_changes_when_a_whole_node_dies_and_comes_back(tmp_path: Path) -> None:
    # Slow enough for streams to run when the node dies.
    model = write_tiny_model(tmp_path / "model", tokenizer=True, max_position_embeddings=2048, num_hidden_layers=48)
    args = {
        "model": {"source": str(model), "name": MODEL},
        "engine": ENGINE,
        "topology": "disaggregated",
        "pools": {"prefill": {"replicas": 1}, "decode": {"replicas": 2}},
        "recovery": {"resume": True, "max_resumes": 20},
    }
    application = {"name": "chaos", "import_path": "serve_app.app:build_app", "args": args}
    config, figures, page = (tmp_path / name for name in ("app.yaml", "figures.json", "page.md"))
    config.write_text(yaml.safe_dump({"applications": [application]}))
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "tools.chaos", "--config", str(config), "--port", str(port)]
    command += ["--kill-nodes", "1", "--kill-every", "2", "--requests", "12", "--max-tokens", "1200"]
    command += ["--json", str(figures), "--page", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(figures.read_text())
    assert found["identical"] == 12 and found["nodes"] == 4
    assert found["nodes_killed"] == 1 <= found["kills_by_deployment"]["DecodeServer"] and found["resumed"] > 0
    assert f"killed under load: {MODEL} on 4 nodes" in page.read_text()
