"""What an operator may do while the service runs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from serve_app.access.access import Access
from serve_app.backends.base import PauseMode
from serve_app.openai.wire import Wire
from serve_app.referee.breaker import Mode
from serve_app.weights.desired_state import Outcome

Statuses = list[dict[str, Any]]


class SpeculationOrder(Wire):
    """POST /admin/speculation: who decides about speculation, on one replica or on all."""

    mode: str = Field(json_schema_extra={"enum": [mode.value for mode in Mode]})
    replica: str | None = None

    @field_validator("mode")
    @classmethod
    def _known_mode(cls, mode: str) -> str:
        if mode not in tuple(Mode):
            raise PydanticCustomError("mode", "must be auto, on or off.")
        return mode


class PauseOrder(Wire):
    """POST /admin/pause: begin no request on any replica."""

    mode: str = Field("wait", json_schema_extra={"enum": [mode.value for mode in PauseMode]})
    timeout_s: Annotated[float, Field(gt=0)] = 600.0

    @field_validator("mode")
    @classmethod
    def _known_mode(cls, mode: str) -> str:
        if mode not in tuple(PauseMode):
            raise PydanticCustomError("mode", "must be wait, abort or keep.")
        return mode


class WeightsOrder(PauseOrder):
    """POST /admin/weights: what every replica is to serve; `mode` says what becomes of the requests that run."""

    path: Annotated[str, Field(min_length=1)]
    weight_version: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:/+=-]{1,128}$")]
    drafter_path: Annotated[str, Field(min_length=1)] | None = None


@dataclass(frozen=True, slots=True)
class WeightsAdmin:
    """The endpoints for weights.

    statuses: which weights each replica serves.
    update: brings new ones to every replica, or to none. Raises UpdateRefused.
    pause, resume: of all replicas.
    stage: keeps an order until `finish` carries it out, by the version given if it is not empty.
    reset_caches: empties every replica's prefix cache.
    """

    statuses: Callable[[], Awaitable[Statuses]]
    update: Callable[[WeightsOrder], Awaitable[Outcome]]
    pause: Callable[[PauseOrder], Awaitable[Outcome]]
    resume: Callable[[], Awaitable[Outcome]]
    stage: Callable[[WeightsOrder | None], Awaitable[None]]
    finish: Callable[[str], Awaitable[Outcome]]
    reset_caches: Callable[[], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin endpoints, and who may use them.

    access: decides who may.
    statuses: where every replica stands.
    order: passes an order on; replicas follow within seconds. Raises UnknownReplica.
    weights: of the service; None = they cannot be changed.
    """

    access: Access
    statuses: Callable[[], Awaitable[Statuses]]
    order: Callable[[SpeculationOrder], Awaitable[Statuses]]
    weights: WeightsAdmin | None = None
