"""Outputs shown in README, quick start and architecture page are those of the demo's service and the engine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.cli.console import CONFIGS
from deploy.run.cluster import running_app
from serve_app.config.files import load_config
from speculative.kernels.library import cpu_kernels
from speculative.model.catalogue import FetchFailed, fetch_model
from tools.chaos.sockets import free_ports
from tools.chart import ROOT

_DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "quickstart.md")
_SHOWN = re.compile(
    r"^```(python)?\n((?:from openai|curl -s \S+/v1/chat)[^`]*)^```\n(?:\n[^`]*`[^`]*`[^`]*)?\n```\n([^`]*)^```", re.M
)
_ENGINE = re.compile(r"^```python\n(from pathlib[^`]*)^```\n\n```\n([^`]*)^```", re.M)
SNIPPETS = [(path.name, *found) for path in _DOCUMENTS for found in _SHOWN.findall(path.read_text(encoding="utf-8"))]


def test_both_documents_show_what_is_answered() -> None:
    assert [(name, language) for name, language, _, _ in SNIPPETS] == [
        ("README.md", "python"),
        ("quickstart.md", ""),
        ("quickstart.md", "python"),
    ]
    for name, _, code, _ in SNIPPETS:
        assert "temperature" in code and "max_tokens" in code, name


@pytest.mark.slow
@pytest.mark.ray
def test_the_snippets_give_the_output_that_is_shown() -> None:
    """Of the service that `make serve` starts, at another port."""
    try:
        fetch_model("smollm2-135m")
    except FetchFailed as error:
        pytest.skip(str(error))
    if cpu_kernels() is None:
        pytest.skip("the answers that are shown are those of the CPU kernels")
    file = load_config(CONFIGS / "demo.yaml")
    http = file.http_options.model_copy(update={"port": free_ports(1)[0]})
    with running_app(file.model_copy(update={"http_options": http}), lambda _: None) as app:
        for name, language, code, shown in SNIPPETS:
            assert _output_of(code, language, app.base_url) == shown, name


def _output_of(code: str, language: str, url: str) -> str:
    ours = code.replace("http://127.0.0.1:8000", url)
    assert ours != code
    command = [sys.executable, "-c", ours] if language == "python" else ["bash", "-c", ours]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300, cwd=Path(sys.prefix)).stdout
    if language == "python":
        return said
    reply = json.loads(said)
    assert reply["verdict"] == "verified"
    return f"{reply['choices'][0]['message']['content']}\n"


@pytest.mark.slow
def test_the_engine_without_a_server_gives_the_output_that_is_shown() -> None:
    ((code, shown),) = _ENGINE.findall((ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"))
    try:
        fetch_model("smollm2-135m")
    except FetchFailed as error:
        pytest.skip(str(error))
    if cpu_kernels() is None:
        pytest.skip("the answer that is shown is that of the CPU kernels")
    made = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300, cwd=ROOT
    )
    assert made.stdout == shown
