"""`python -m tools.chaos --kill-each`, as far as it needs no cluster: results, counts, routes, and its table."""

import os
import socket
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from deploy.exchange.client import Client
from serve_app.config.files import load_config
from serve_app.config.serve_file import ServeFile
from tests.support.fake_openai import BREAK, FakeOpenAI, Reply, completion, failure
from tools.chaos import deaths
from tools.chaos.__main__ import main
from tools.chaos.deaths import ROUTES, Death
from tools.chaos.nodes import POOL_LABEL, one_node_a_replica
from tools.chaos.page import write_deaths
from tools.chaos.sockets import ESTABLISHED, LISTENING, free_ports, pids_of_port

pytestmark = pytest.mark.slow

CONFIG = Path(__file__).parents[2] / "deploy" / "configs" / "resilient.yaml"
WHOLE = 'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
CUT = 'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
ERROR = CUT + 'data: {"error": {"message": "lost", "type": "server_error", "param": null, "code": "lost"}}\n\n'

DEATH = Death(
    route="Serve's proxy", process="a decode replica", streams={"complete": 5, "cut": 3}, through_head=2,
    failed={"HTTP 500": 2, "refused": 4}, failed_for_s=3.5, whole_s=41.0,
    counted={"requests_interrupted_total": 4.0, "replica_restarts_total": 1.0}, alerts={"TruespecX": "firing"},
)  # fmt: skip


@pytest.mark.parametrize(
    ("reply", "result"),
    [
        ((200, {}, WHOLE), "complete"),
        ((200, {}, CUT), "cut"),
        ((200, {}, ERROR), "error event"),
        ((500, {}, "Internal Server Error"), "HTTP 500"),
        (failure(429, "busy"), "HTTP 429"),
        (BREAK, "no reply"),
    ],
)
def test_results_of_streams(reply: Reply, result: str) -> None:
    with FakeOpenAI(lambda prompt, times: reply).running() as server, Client(server.url) as client:
        assert deaths._result(client.stream({"prompt": "a"})) == result


def test_results_of_requests() -> None:
    whole = completion("a")
    with FakeOpenAI(lambda prompt, times: whole).running() as server, Client(server.url) as client:
        assert deaths._result(client.post({"prompt": "a"})) == "complete"
    (port,) = free_ports(1)
    with Client(f"http://127.0.0.1:{port}") as client:
        assert deaths._result(client.post({"prompt": "a"})) == "refused"


def test_increases_are_summed_over_exporters_and_series() -> None:
    """A series that is new counts whole, one that is gone not at all, and one that fell from 0 on."""
    error = 'http://a truespec_requests_total{outcome="error",pool="%s"}'
    refused, resumes = (
        'http://b ray_serve_num_http_requests_total{status_code="500"}',
        "http://a truespec_resumes_total{}",
    )
    before = {error % "1": 2.0, refused: 5.0, resumes: 3.0, 'http://a truespec_prefill_failures_total{reason="x"}': 1.0}
    after = {error % "1": 3.0, error % "3": 4.0, refused: 5.0, resumes: 2.0}
    assert deaths._increases(before, after) == {'requests_total{outcome="error"}': 5.0, "resumes_total": 2.0}


def test_losses_that_nothing_counted() -> None:
    """Restarts are no requests, and nobody could have counted a connection that was refused."""
    assert DEATH.uncounted == 3 + 2 - 4


def test_routes() -> None:
    file = load_config(CONFIG)
    for route in ROUTES:
        args = deaths._by(file, route).application.effective_args
        assert (args.router is not None) == route.endswith("router")
        assert deaths._by(file, route).proxy_location == "EveryNode"


def test_the_router_has_room_on_a_node_of_the_decoding_pool() -> None:
    """In a chart it is there: the death of the head must not take it along."""
    raw = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    raw["applications"][0]["args"]["pools"]["router"]["num_cpus"] = 1
    placed, head, shapes = one_node_a_replica(ServeFile.model_validate(raw), router_on_head=False)
    router = placed.application.effective_args.router
    assert router is not None and router.label_selector == {POOL_LABEL: "decode"} and head.num_cpus == 0
    assert sorted((shape.labels[POOL_LABEL], shape.num_cpus) for shape in shapes) == [
        ("decode", 2), ("decode", 2), ("prefill", 1), ("prefill", 1),
    ]  # fmt: skip


def test_processes_of_a_port() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert pids_of_port(port, LISTENING) == [os.getpid()]
        assert pids_of_port(port, ESTABLISHED) == []
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert pids_of_port(port, ESTABLISHED) == [os.getpid()]


def test_the_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_deaths(page, [DEATH], "python -m tools.chaos --kill-each", "Tiny")
    (row,) = (line for line in page.read_text(encoding="utf-8").splitlines() if "a decode replica" in line)
    for said in ("5 complete, 3 cut", "2 HTTP 500, 4 refused", "4 `requests_interrupted_total`", "TruespecX (firing)"):
        assert said in row


def test_a_configuration_without_a_router_is_refused() -> None:
    result = CliRunner().invoke(main, ["--kill-each", "--config", "monolith"])
    assert result.exit_code and "recovery.resume is false" in result.output


@pytest.mark.parametrize("option", ["--requests", "--kill-nodes"])
def test_options_of_other_kills_are_refused(option: str) -> None:
    result = CliRunner().invoke(main, ["--kill-each", option, "3", "--config", "resilient"])
    assert result.exit_code == 2 and f"{option} says when" in result.output
