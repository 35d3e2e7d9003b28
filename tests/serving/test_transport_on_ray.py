"""Each way a handoff can go between two replicas gives the same answer, and is counted as taken in."""

import importlib.util
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.services import Service, app_args, deployed
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(1200)]

PROMPT = [3 + (index * 7) % 400 for index in range(700)]


@pytest.mark.parametrize("transport", ["inline", "nixl"])
def test_handoffs_arrive_whole(ray_port: int, tiny_folder: Path, disaggregated: Service, transport: str) -> None:
    if transport == "nixl" and importlib.util.find_spec("nixl") is None:
        pytest.skip("NIXL is not installed: pip install --no-deps nixl nixl-cu12")
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 3, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    (expected,) = disaggregated.completion(**body)["choices"]
    args = app_args(tiny_folder, "disaggregated", handoff={"transport": transport})
    with deployed(ray_port, f"by-{transport}", args) as service:
        with ThreadPoolExecutor(8) as clients:  # several handoffs are on their way at once
            for reply in clients.map(lambda _: service.completion(**body), range(24)):
                (got,) = reply["choices"]
                assert got["token_ids"] == expected["token_ids"] and got["logprobs"] == expected["logprobs"]
        wait_for(lambda: service.metrics()["handoffs_by_result"] == {"ok": 24}, "none refused or failed")
        assert service.count("prefill_failures_total") == 0, "some were read at the second attempt only"
