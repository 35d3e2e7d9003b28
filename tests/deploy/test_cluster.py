"""What is asked of a service that has started cannot end it."""

import signal
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from deploy.run import cluster
from speculative.errors import ConfigError


@pytest.mark.parametrize("why", ["", "no compiler"])
def test_a_start_says_why_replicas_compute_without_their_kernels(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "find_kernels", lambda: why or SimpleNamespace())
    said: list[str] = []
    cluster._prepare_kernels(said.append)
    assert said[0].startswith("preparing the CPU kernels")
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
_FAILED = "A replica failed to start\nTraceback\nConfigError: drafter.model: No model 'x'"


def test_replicas_that_are_slow_to_start_are_no_failure_in_what_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The messages are Ray 2.60's (serve/_private/deployment_state.py)."""
    messages = iter([*[_SCHEDULED.format(2)] * 2, _SCHEDULED.format(1), _INITIALIZED, _FAILED, ""])

    def status() -> Any:
        message = next(messages)
        deployments = {"x": SimpleNamespace(message=message)}
        running = "DEPLOYING" if message else "RUNNING"
        return SimpleNamespace(applications={"truespec": SimpleNamespace(status=running, deployments=deployments)})

    monkeypatch.setattr(cluster, "serve", SimpleNamespace(status=status))
    monkeypatch.setattr(cluster, "_LOOK_EVERY_S", 0)
    reported: list[str] = []
    cluster._wait_until_running("truespec", reported.append)
    unplaced = "replica{} without a process after 30 s: the machine is busy, or no node has free what each asks for"
    assert reported == [
        f"waiting: 2 decode {unplaced.format('s')} ({{'CPU': 1.0}})",
        f"waiting: 1 decode {unplaced.format('')} ({{'CPU': 1.0}})",
        "waiting: 1 monolith replica still loading after 30 s, as a large model or a busy machine makes it",
        "waiting: A replica failed to start ConfigError: drafter.model: No model 'x'",
    ]


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
