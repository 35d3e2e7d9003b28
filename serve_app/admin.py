"""What an operator may do while the service runs."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import field_validator
from pydantic_core import PydanticCustomError

from serve_app.access import Access
from serve_app.breaker import Mode
from serve_app.protocol import Wire

Statuses = list[dict[str, Any]]


class SpeculationOrder(Wire):
    """POST /admin/speculation: who decides about speculation, on one replica or on all."""

    mode: str
    replica: str | None = None

    @field_validator("mode")
    @classmethod
    def _known_mode(cls, mode: str) -> str:
        if mode not in tuple(Mode):
            raise PydanticCustomError("mode", "must be auto, on or off.")
        return mode


@dataclass(frozen=True, slots=True)
class Admin:
    """The admin endpoints, and who may use them.

    access: decides who may.
    statuses: where every replica stands.
    order: passes an order on; replicas follow within seconds. Raises UnknownReplica.
    """

    access: Access
    statuses: Callable[[], Awaitable[Statuses]]
    order: Callable[[SpeculationOrder], Awaitable[Statuses]]
