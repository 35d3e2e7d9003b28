"""AIPerf: a short run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_profile(
    base_url: str,
    model: str,
    checkpoint: str,
    run: Callable[..., None],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """`aiperf profile` with four streams over chat completions, and the usage in every chunk"""
    run(
        "aiperf profile --ui none",
        f"--model {model} --url {base_url} --tokenizer {checkpoint} --artifact-dir {tmp_path}",
        "--endpoint-type chat --streaming --use-server-token-count --per-chunk-usage",
        "--isl 48 --osl 32 --extra-inputs ignore_eos:true --concurrency 4 --request-count 16",
        HF_HUB_OFFLINE=None,  # with it, AIPerf takes a folder for a hub's name
    )
    found = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert found["request_count"]["avg"] == 16
    assert found["error_summary"] == []
    assert found["total_usage_completion_tokens"]["avg"] == 16 * 32
    assert found["total_usage_accepted_prediction_tokens"]["avg"] > 0
    record_property(
        "figures",
        {
            "requests": found["request_count"]["avg"],
            "output tokens/s": found["output_token_throughput"]["avg"],
            "TTFT, median (ms)": found["time_to_first_token"]["p50"],
            "per output token, median (ms)": found["inter_token_latency"]["p50"],
        },
    )
