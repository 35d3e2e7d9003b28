"""The weights that are wanted, and those that replicas report."""

from dataclasses import dataclass
from typing import Any

from serve_app.backends.base import PauseMode, Shard
from speculative.request import DEFAULT_VERSION


@dataclass(frozen=True, slots=True)
class WeightsRef:
    """A reference to weights: to a folder that every replica can read, or to shards."""

    number: int  # grows with each update; 0 = those of the configuration
    version: str
    path: str | None = None
    drafter_path: str | None = None
    shards: tuple[Shard, ...] = ()
    drafter_shards: tuple[Shard, ...] = ()


CONFIGURED = WeightsRef(0, DEFAULT_VERSION)


@dataclass(frozen=True, slots=True)
class DesiredState:
    """From the coordinator to a replica: the state it should reach."""

    serve: WeightsRef
    load: WeightsRef | None = None  # beside those it serves
    mode: PauseMode = PauseMode.WAIT  # what becomes of running requests when `serve` changes
    paused: PauseMode | None = None
    cache_resets: int = 0  # how often the prefix caches were to be emptied


@dataclass(frozen=True, slots=True)
class WeightsStatus:
    """From a replica to the coordinator: its current state."""

    serving: WeightsRef
    fingerprint: str  # of what it serves
    loaded: int | None = None  # number of what lies beside it
    loaded_fingerprint: str = ""
    failed: int | None = None  # number of what could not be loaded
    reason: str = ""  # why not
    paused: PauseMode | None = None  # how it stands still
    cache_resets: int = 0  # as in `DesiredState`


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an update or a pause."""

    complete: bool  # False: decided, and some replica still has requests to finish
    replicas: list[dict[str, Any]]
