"""`vllm bench serve`: short runs."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ENDPOINTS = {"openai-chat": "/v1/chat/completions", "openai": "/v1/completions", "openai-responses": "/v1/responses"}
# The command `vllm` asks for the version of a package called vllm, which its CPU build is not.
BENCH = (
    "import argparse; from vllm.benchmarks import serve; parser = argparse.ArgumentParser(); "
    "serve.add_cli_args(parser); serve.main(parser.parse_args())"
)


@pytest.mark.parametrize("backend", list(ENDPOINTS))
def test_serve(base_url: str, checkpoint: str, run: Callable[..., None], tmp_path: Path, backend: str) -> None:
    """`vllm bench serve` with four requests at once, over chat completions, completions and responses"""
    run(
        f"python -c '{BENCH}'",
        f"--base-url {base_url} --backend {backend} --endpoint {ENDPOINTS[backend]} --tokenizer {checkpoint}",
        "--dataset-name random --random-input-len 48 --random-output-len 32 --num-prompts 16 --max-concurrency 4",
        f"--save-result --result-dir {tmp_path} --result-filename report.json",
    )
    found = json.loads((tmp_path / "report.json").read_text())
    assert (found["completed"], found["failed"]) == (16, 0)
    assert found["total_output_tokens"] == 16 * 32
