"""`python -m tools.chaos --kill-each`, as far as it needs no cluster: results and counts."""

import pytest

from deploy.exchange.client import Client
from tests.support.fake_openai import BREAK, FakeOpenAI, Reply, completion, failure
from tools.chaos import deaths
from tools.chaos.deaths import Death
from tools.chaos.sockets import free_ports

pytestmark = pytest.mark.slow

WHOLE = 'data: {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n'
CUT = 'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n'
ERROR = CUT + 'data: {"error": {"message": "lost", "type": "server_error", "param": null, "code": "lost"}}\n\n'

DEATH = Death(
    route="Serve's proxy", process="a decode replica", streams={"complete": 5, "cut": 3}, through_head=2,
    in_prefill={"complete": 5, "HTTP 500": 2, "HTTP 429": 1},
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
    assert DEATH.uncounted == 3 + 2 + 2 - 4
