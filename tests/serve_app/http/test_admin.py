"""The operator's switch and the weights under `/admin`: who may use them, what is passed on, and what is refused."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import WeightsRef
from serve_app.errors import UnknownReplica
from serve_app.http.access.access import Access, read_token
from serve_app.http.access.request_gate import Gate
from serve_app.http.admin import Admin, RehearsalOrder, SpeculationOrder
from speculative.errors import ConfigError
from tests.support.fake_operator import FakeWeights, replicas
from tests.support.fake_serving import Served, ServeFake

HEADERS = {"authorization": "Bearer s3cret"}


class Operator:
    """The admin endpoints of a server with one replica, and what they were asked for."""

    def __init__(self, serve_fake: ServeFake) -> None:
        self.orders: list[SpeculationOrder | RehearsalOrder] = []
        self.weights = FakeWeights()
        admin = Admin(replicas, self.order, self.weights, self.order)
        self.server: Served = serve_fake(admin=admin, gate=Gate(Access(admin_token="s3cret")))

    async def order(self, order: SpeculationOrder | RehearsalOrder) -> list[dict[str, Any]]:
        if order.replica not in (None, "r1"):
            raise UnknownReplica("There is no such replica.")
        self.orders.append(order)
        return await replicas()

    def get(self, route: str) -> httpx.Response:
        return httpx.get(f"{self.server.url}/admin/{route}", headers=HEADERS)

    def post(self, route: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.server.url}/admin/{route}", json=body or None, headers=HEADERS, timeout=120)


@pytest.fixture(scope="module")
def module_operator(serve_fake: ServeFake) -> Operator:
    return Operator(serve_fake)


@pytest.fixture
def operator(module_operator: Operator) -> Operator:
    module_operator.orders.clear()
    module_operator.weights.asked.clear()
    return module_operator


def test_an_operator_sees_and_sets_who_decides(operator: Operator) -> None:
    assert operator.get("speculation").json() == {"replicas": [{"replica": "r1", "mode": "auto"}]}
    assert operator.post("speculation", mode="off", replica="r1").status_code == 200
    assert operator.post("speculation", mode="auto").json()["replicas"][0]["replica"] == "r1"
    assert operator.post("rehearsal", replica="r1").json()["replicas"][0]["replica"] == "r1"
    assert operator.orders == [
        SpeculationOrder(mode="off", replica="r1"),
        SpeculationOrder(mode="auto"),
        RehearsalOrder(replica="r1"),
    ]


def test_orders_about_weights_are_passed_on(operator: Operator) -> None:
    done = operator.post("weights", path="/m/v1", weight_version="step-1", mode="abort", drafter_path="/m/head")
    assert done.status_code == 200
    assert done.json()["complete"] is True and done.json()["replicas"][0]["replica"] == "r1"
    assert operator.post("pause").status_code == operator.post("pause", mode="keep").status_code == 200
    assert operator.post("resume").status_code == 200
    assert operator.weights.asked == [
        ("update", WeightsRef(0, "step-1", "/m/v1", "/m/head"), PauseMode.ABORT, 600.0),
        ("pause", PauseMode.WAIT, 600.0),
        ("pause", PauseMode.KEEP, 600.0),
        ("resume",),
    ]
    assert operator.get("weights").json()["replicas"][0]["weight_version"] == "default"


@pytest.mark.parametrize(
    ("route", "body", "status", "param"),
    [
        ("speculation", {"mode": "maybe"}, 400, "mode"),
        ("speculation", {"mode": "off", "replcia": "r1"}, 400, "replcia"),
        ("speculation", {"mode": "off", "replica": "r9"}, 404, None),
        ("rehearsal", {"replica": "r9"}, 404, None),
        ("speculation", {"mode": "off", "replica": "r" * 9000}, 413, None),
        ("weights", {"weight_version": "v"}, 400, "path"),
        ("weights", {"path": "x"}, 400, "weight_version"),
        ("weights", {"path": "x", "weight_version": "a b"}, 400, "weight_version"),
        ("weights", {"path": "x", "weight_version": "v", "mode": "later"}, 400, "mode"),
        ("weights", {"path": "x", "weight_version": "v", "timeout_s": 0}, 400, "timeout_s"),
        ("weights", {"path": "x", "weight_version": "v", "models": "y"}, 400, "models"),
    ],
)
def test_an_order_that_makes_no_sense_is_refused(
    operator: Operator, route: str, body: dict[str, Any], status: int, param: str | None
) -> None:
    refused = operator.post(route, **body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (status, param)
    assert operator.orders == operator.weights.asked == []


def test_without_a_token_there_is_no_admin(serve_fake: ServeFake) -> None:
    server = serve_fake()
    assert server.post("/admin/speculation", mode="off").status_code == 404
    assert httpx.get(f"{server.url}/admin/speculation").status_code == 404


def test_the_token_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"admin\.token_file .* cannot be read"):
        read_token(path)
    path.write_text(" \n")
    with pytest.raises(ConfigError, match="is empty"):
        read_token(path)
    path.write_text("s3cret\n")
    assert read_token(path) == "s3cret"
