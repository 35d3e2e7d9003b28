"""What is asked of a service that has started cannot end it."""

import logging
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._private import services

from deploy.run import cluster
from serve_app.deployments import runtime
from speculative.errors import ConfigError


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """The entries of Ray's key-value store, which is a dictionary here."""
    kept: dict[str, bytes] = {}
    for call, does in {
        "put": lambda key, value: kept.update({key: value.encode()}), "get": lambda key: kept[key.decode()],
        "list": lambda prefix: [key.encode() for key in kept if key.startswith(prefix)], "del": kept.pop,
    }.items():  # fmt: skip
        monkeypatch.setattr(runtime, f"_internal_kv_{call}", does)
    return kept


@pytest.mark.parametrize("why", ["", "no compiler"])
def test_a_start_says_why_replicas_compute_without_their_kernels(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> Any:
        cluster.compiling.info("compiling, about %d s", 40)
        return why or SimpleNamespace()

    monkeypatch.setattr(cluster, "find_kernels", find)
    said: list[str] = []
    cluster._prepare_kernels(said.append)
    find()  # and nothing is passed on afterwards
    assert said[0] == "compiling, about 40 s"
    assert said[1:] == ([f"warning: replicas compute without their kernels, which is slow: {why}"] if why else [])


_SCHEDULED = (
    "Deployment 'DecodeServer' in application 'truespec' has {} replicas that "
    "have taken more than 30s to be scheduled. "
    "This may be due to waiting for the cluster to auto-scale or for a runtime environment to be installed. "
    "Resources required for each replica: {{'CPU': 1.0}}, total resources available: {{}}. "
    "Use `ray status` for more details."
)
_INITIALIZED = (
    "Deployment 'MonolithServer' in application 'truespec' has 1 replicas that have taken more than 30s to "
    "initialize.\nThis may be caused by a slow __init__ or reconfigure method."
)
_FAILED = "A replica failed to start with exception. Retrying 2 more time(s). Error:\nray::X() (pid=1)\n  File x\n"
_GAVE_UP = "The deployment failed to start 3 times in a row. See logs. Error:\nray::X() (pid=1)\n"
_OURS = "speculative.errors.{0}: a\n\nThe above\nspeculative.errors.{0}: w holds NaN;\nget it. (On node vm, 61e0f.)"


@pytest.mark.usefixtures("kept")
def test_replicas_that_are_slow_to_start_are_no_failure_in_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages are Ray 2.60's (serve/_private/deployment_state.py)."""
    failed = f"{_FAILED}OSError: no route"
    reported = waited_for([*[_SCHEDULED.format(2)] * 2, _SCHEDULED.format(1), _INITIALIZED, failed], monkeypatch)
    unplaced = "replica{} without a process after 30 s: the machine is busy, or no node has free what each asks for"
    assert reported == [
        f"waiting: 2 decode {unplaced.format('s')} ({{'CPU': 1.0}})",
        f"waiting: 1 decode {unplaced.format('')} ({{'CPU': 1.0}})",
        "waiting: 1 monolith replica still loading after 30 s, as a large model or a busy machine makes it",
        "waiting: a replica failed to start and is tried again, 2 more times at most: OSError: no route",
    ]
    with pytest.raises(ConfigError, match=r"^A replica cannot start: w holds NaN;\nget it. \(On node vm, 61e0f\.\)$"):
        waited_for([_FAILED + _OURS.format("ConfigError")], monkeypatch)
    with pytest.raises(ConfigError, match=r"^The application did not start: a replica .*: its process was killed or"):
        waited_for([f"{_GAVE_UP}ray.exceptions.ActorDiedError: The actor died unexpectedly"], monkeypatch)


def test_what_engines_say_of_their_start_is_passed_on(kept: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    kept["truespec/starts/another/r"] = b"captured"
    said, starts = ["captured 1", "captured 2"], logging.getLogger("truespec.start")
    with runtime.keeping_start("truespec", "r"), runtime.keeping_start("truespec", "s"):
        reported = waited_for(["1", "2", "3"], monkeypatch, lambda: said and starts.warning(said.pop(0)))
        assert [line for line in reported if "captured" in line] == [f"{r}: captured {n}" for n in (1, 2) for r in "rs"]
    starts.warning("captured later")
    assert len(kept) == 1, "nothing is left of starts that are over"


def waited_for(
    messages: list[str], monkeypatch: pytest.MonkeyPatch, meanwhile: Callable[[], object] = lambda: None
) -> list[str]:
    """Reports where Serve says this, one after the other, of an application that runs then."""
    said = iter([*messages, ""])

    def status() -> Any:
        meanwhile()
        message = next(said)
        running = "DEPLOY_FAILED" if message.startswith("The") else "DEPLOYING" if message else "RUNNING"
        deployments = {"x": SimpleNamespace(message=message)}
        return SimpleNamespace(applications={"truespec": SimpleNamespace(status=running, deployments=deployments)})

    monkeypatch.setattr(cluster, "serve", SimpleNamespace(status=status))
    monkeypatch.setattr(cluster, "_LOOK_EVERY_S", 0)
    monkeypatch.setattr(os, "getloadavg", lambda: (0, 0, 0))
    reported: list[str] = []
    cluster._wait_until_running("truespec", reported.append)
    return reported


@pytest.mark.parametrize(("failures", "tries"), [(1, 2), (3, 3)])
def test_ray_is_started_again_where_its_node_is_late(
    failures: int, tries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    def init(*_: object, **__: object) -> SimpleNamespace:
        """Fail like Ray, which gives up by its own clock once a look for its node has failed."""
        looks.append(0)
        services.get_node("gcs", "node")
        return SimpleNamespace(address_info={"session_dir": "session"})

    def look(*_: str) -> None:
        """A node that is up at the third look; of the starts that fail, never."""
        looks[-1] += 1
        if len(looks) <= failures or looks[-1] < 3:
            raise RuntimeError("timed out")

    monkeypatch.setattr(services, "get_node", look)
    monkeypatch.setattr(cluster, "_NODE_S", 0.05)
    monkeypatch.setattr(cluster, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(os, "getloadavg", lambda: (4 * (os.cpu_count() or 1), 0, 0))
    began, said = time.monotonic(), list[str]()
    failing = (
        pytest.raises(ConfigError, match=r"did not start .*machine is busy: .*timed out") if failures == 3 else None
    )
    with failing or nullcontext():
        cluster._start_ray(2, said.append)
    assert services.get_node is look and len(looks) == tries
    assert time.monotonic() - began >= 4 * 0.05 * failures, "each waits as long as the load makes it"
    assert [line.rpartition(", ")[2] for line in said] == ["2 more times at most", "1 more time at most"][: tries - 1]


@pytest.mark.parametrize("connected_before", [True, False])
def test_a_connection_from_before_a_command_outlives_it(
    connected_before: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[bool] = []
    monkeypatch.setattr(ray, "is_initialized", lambda: connected_before)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    with pytest.raises(ConfigError, match="is not the address"), cluster.connected("nowhere"):
        pass
    assert bool(ended) is not connected_before


def test_handlers_that_python_did_not_set_end_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`signal.signal` returns None for one that was there when Python started, and takes no None."""
    kept = []

    def keep(number: int, handler: Any) -> None:
        assert handler is not None
        kept.append((number, handler))

    monkeypatch.setattr(signal, "signal", keep)
    with cluster.uninterrupted():
        assert [handler for _, handler in kept] == [signal.SIG_IGN] * 2
    assert sorted(kept[2:]) == sorted((number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM))
