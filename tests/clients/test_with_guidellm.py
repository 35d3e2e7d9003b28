"""guidellm: a short run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("way", ["base_url", "watched"], ids=["direct", "watched"])
def test_run(
    request: pytest.FixtureRequest, way: str, checkpoint: str, run: Callable[..., None], tmp_path: Path
) -> None:
    """`guidellm run` with four streams over chat completions, directly and through `truespec watch proxy`"""
    base_url = request.getfixturevalue(way)
    report = tmp_path / "report.json"
    run(
        "guidellm run --disable-progress",
        f"--backend kind=openai_http,target={base_url} --tokenizer kind=huggingface_auto,model={checkpoint}",
        "--profile kind=concurrent,streams=4 --constraint kind=max_requests,count=16",
        "--data kind=synthetic_text,prompt_tokens=48,output_tokens=32",
        f"--output kind=json,path={report}",
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    totals = metrics["request_totals"]
    assert (totals["successful"], totals["errored"]) == (16, 0)
    assert metrics["output_token_count"]["successful"]["total_sum"] == 16 * 32
