"""Routes for operators, while the service runs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

from pydantic import Field

from serve_app.backends.base import PauseMode
from serve_app.cluster.desired_state import Outcome, WeightsRef
from serve_app.guard.breaker import Mode
from serve_app.openai.wire import OneOf, Wire

Statuses = list[dict[str, Any]]


class SpeculationOrder(Wire):
    """POST /admin/speculation: who decides about speculation, on one replica or on all."""

    mode: Annotated[str, OneOf(tuple(Mode))]
    """`off`: no speculation; `auto`: the breaker decides; `on`: always."""
    replica: str | None = None
    """The replica. Default: all of them, and those to come."""


class RehearsalOrder(Wire):
    """POST /admin/rehearsal: have a replica answer requests of its own with a known fault."""

    replica: str | None = None
    """The replica. Default: any that can."""


class PauseOrder(Wire):
    """POST /admin/pause: begin no request on any replica."""

    mode: Annotated[str, OneOf(tuple(PauseMode))] = "wait"
    """Running requests finish (`wait`), end at once (`abort`), or stop between two steps (`keep`)."""
    timeout_s: Annotated[float, Field(gt=0)] = 600.0
    """The longest wait for the replicas; of new weights, for loading and again for switching."""


class WeightsOrder(PauseOrder):
    """POST /admin/weights: what every replica is to serve; `mode` says what becomes of the requests that run."""

    path: Annotated[str, Field(min_length=1)]
    """A checkpoint that every replica can read: a folder or a hub id."""
    weight_version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/+=-]{1,128}$")]
    """A name of your choice, other than the current one."""
    drafter_path: Annotated[str, Field(min_length=1)] | None = None
    """The drafter's checkpoint. Default: the configured drafter."""

    @property
    def ref(self) -> WeightsRef:
        """The weights that are named; the coordinator numbers them."""
        return WeightsRef(0, self.weight_version, self.path, self.drafter_path)


class WeightsService(Protocol):
    """The weights of all replicas, as those who change them see them; `WeightCoordinator` has the details."""

    async def statuses(self) -> Statuses:
        """Return which weights each replica serves."""

    async def update(self, ref: WeightsRef, mode: PauseMode = ..., timeout_s: float = ...) -> Outcome:
        """Bring new ones to every replica, or to none. Raises UpdateRefused."""

    async def pause(self, mode: PauseMode, timeout_s: float = ...) -> Outcome:
        """Have every replica begin nothing new."""

    async def resume(self) -> Outcome:
        """Have every replica go on."""

    async def stage(self, ref: WeightsRef | None) -> None:
        """Keep what `finish` is to bring to every replica."""

    async def finish(self, version: str) -> Outcome:
        """Bring it, by this version if it is not empty. Raises UpdateRefused."""

    async def reset_caches(self) -> Outcome:
        """Empty every replica's prefix cache."""


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin endpoints.

    order: passes an order on; replicas follow within seconds. Raises UnknownReplica.
    rehearse: has a replica rehearse. Raises UnknownReplica. None = the service does not rehearse.
    """

    statuses: Callable[[], Awaitable[Statuses]]  # where every replica stands
    order: Callable[[SpeculationOrder], Awaitable[Statuses]]
    weights: WeightsService | None = None  # of the service; None = they cannot be changed
    rehearse: Callable[[RehearsalOrder], Awaitable[Statuses]] | None = None
    # the replies of a replica since a time, with their verdicts
    verdicts_of: Callable[[str, float], Awaitable[Statuses]] | None = None
