"""One request through three replicas on Ray: its spans reach a collector, its log lines carry its id and its trace."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray

from tests.support.otlp_collector import Collector, running_collector
from tests.support.services import MODEL, Service, app_args, deployed
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.ray]

APP = "traced"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
REQUEST = "POST /v1/completions"
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with running_collector() as kept:
        yield kept


@pytest.fixture(scope="module")
def traced(ray_port: int, tiny_folder: Path, collector: Collector) -> Iterator[Service]:
    observability = {"log_format": "json", "log_level": "debug", "traces_endpoint": collector.url}
    args = app_args(tiny_folder, "disaggregated", observability=observability, replay={"sample_rate": 0.0})
    with deployed(ray_port, APP, args) as service:
        yield service


def log_lines() -> dict[str, list[dict[str, Any]]]:
    """What each replica of the app has written, by deployment: its JSON lines."""
    folder = Path(ray._private.worker._global_node.get_logs_dir_path()) / "serve"
    found: dict[str, list[dict[str, Any]]] = {}
    for path in folder.glob(f"replica_{APP}_*.log"):
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found.setdefault(path.name.split("_")[2], []).extend(lines)
    return found


def test_spans_and_log_lines_of_a_request_lead_through_all_replicas(traced: Service, collector: Collector) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "request-17"}
    body = {"prompt": "one two three one two three", "max_tokens": NUM_TOKENS, "ignore_eos": True, "verify": True}
    with traced.http() as http:
        reply = http.post("/v1/completions", json={"model": MODEL, "temperature": 0, **body}, headers=headers)
    assert reply.status_code == 200, reply.text
    assert reply.headers.get_list("x-request-id") == ["request-17"]
    assert reply.json()["verdict"] == "verified"
    names = {REQUEST, "prefill.call", "queue", "prefill", "handoff", "decode", "replay.call", "replay"}
    wait_for(lambda: collector.spans.get(TRACE, {}).keys() == names, "the spans")
    spans = collector.spans[TRACE]
    by_id = {span.span_id: name for name, span in spans.items()} | {PARENT: "the client"}
    assert {name: by_id[span.parent_id] for name, span in spans.items()} == {
        REQUEST: "the client", "prefill.call": REQUEST, "queue": "prefill.call", "prefill": "prefill.call",
        "handoff": REQUEST, "decode": REQUEST, "replay.call": REQUEST, "replay": "replay.call",
    }  # fmt: skip
    assert {(span.resource["service.name"], span.resource["truespec.model"]) for span in spans.values()} == {
        ("truespec", MODEL)
    }
    front, pool, referee = (spans[name].replica for name in (REQUEST, "prefill", "replay.call"))
    assert len({front, pool, referee}) == 3
    assert {spans[name].replica for name in ("prefill.call", "handoff", "decode")} == {front}
    assert {spans[name].replica for name in ("queue", "replay")} == {pool}
    details, decode = reply.json()["usage"]["completion_tokens_details"], spans["decode"].attributes
    assert decode["truespec.tokens"] == NUM_TOKENS - 1
    assert decode["truespec.accepted_tokens"] == details["accepted_prediction_tokens"]
    _check_lines(reply.json()["id"])


def _check_lines(reply_id: str) -> None:
    lines = log_lines()
    assert lines.keys() == {"DecodeServer", "PrefillServer", "Controller"}
    for deployment, reported in lines.items():
        own = [line for line in reported if "time" in line]  # since the replica set up its lines
        assert all({"time", "level", "logger", "message"} <= line.keys() for line in own)
        assert len({line["replica"] for line in own}) == 1
        twice = [line for line in own if re.search(r" (200|OK) [\d.]+ms$", line["message"])]
        assert not twice, "Ray Serve's own access log says it again"
        of_reply = [line for line in own if reply_id in line["message"]]
        assert of_reply, f"{deployment} says nothing of the reply"
        assert {(line["request_id"], line["trace_id"]) for line in of_reply} == {("request-17", TRACE)}
    (access,) = [line for line in lines["DecodeServer"] if line["message"] == f"{REQUEST} 200"]
    assert (access["request_id"], access["trace_id"], access["level"]) == ("request-17", TRACE, "info")


def test_what_is_polled_leaves_no_span(traced: Service, collector: Collector) -> None:
    known = set(collector.spans)
    with traced.http() as http:
        for path in ("/metrics", "/healthz", "/status", "/v1/models"):
            reply = http.get(path)
            assert reply.status_code == 200
            assert len(reply.headers.get_list("x-request-id")) == 1
    traced.completion(prompt="hello", max_tokens=2)
    wait_for(lambda: len(collector.spans) > len(known), "the next trace")
    (fresh,) = collector.spans.keys() - known
    wait_for(lambda: REQUEST in collector.spans[fresh], "its request")
