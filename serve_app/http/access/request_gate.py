"""The gate before the routes: which of them need a key, whether this one opens them, and how many it may run."""

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, field

from serve_app.errors import AccessDenied, Forbidden, RateLimited
from serve_app.http.access.access import ANYBODY, Access, Caller, Scope
from serve_app.streams.in_flight import InFlight
from serve_app.telemetry.metrics import Metrics

_logger = logging.getLogger("truespec.access")

# Files of the status page and the API's description hold nothing of anybody; the page asks for a key itself.
OPEN = ("/", "/page/{name}", "/openapi.json", "/version")

HEALTH = ("/healthz", "/health", "/ping")
"""One route by three names: Kubernetes', vLLM's, and SageMaker's, which vLLM has, too."""

TRAINER = (
    "/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update", "/weight_info",
    "/reset_prefix_cache", "/pause", "/resume", "/is_paused",
)  # fmt: skip
"""The routes by which a trainer that knows vLLM's server updates weights."""

_CLOSED = (
    "This route is closed: set admin.token_file in the server's configuration, or admin.open_trainer_api in a network "
    "that none but the trainer reaches."
)


def scope_of(route: str) -> Scope | None:
    """The scope that a key needs for a route; None = any key will do, if one is needed at all."""
    if route.startswith("/admin") or route in TRAINER:
        return Scope.ADMIN
    return None if route in ("/metrics", *HEALTH) else Scope.USER


@dataclass(slots=True)
class Gate:
    """Lets in who may come in. What is not known to be open needs a key of the scope `user`, `/admin` of `admin`."""

    access: Access  # who may
    metrics: Metrics | None = None  # counts who was refused
    _: KW_ONLY
    open_metrics: bool = True  # `/metrics` needs no key; any key opens it otherwise
    open_health: bool = True  # `/healthz` likewise
    open_trainer_api: bool = False  # the routes for trainers need no key
    cors_origins: Sequence[str] = ()  # web pages of these may call the API from a browser
    in_flight: InFlight = field(default_factory=InFlight)  # holds requests until the last byte of their replies
    running: Counter[str] = field(default_factory=Counter)  # requests under way, by the id of their key
    _open: set[str] = field(init=False)

    def __post_init__(self) -> None:
        maybe = (self.open_metrics, ("/metrics",)), (self.open_health, HEALTH), (self.open_trainer_api, TRAINER)
        self._open = {*OPEN, *(route for is_open, routes in maybe if is_open for route in routes)}

    @property
    def is_open(self) -> bool:
        """Return whether users need no key."""
        return self.access.is_open

    def admit(self, route: str, authorization: str | None) -> Caller:
        """Let a request pass to a route.

        Args:
            route: its path as it was registered: what the router chose, not what the client wrote.
            authorization: the header.

        Raises:
            AccessDenied: nothing was sent that opens anything.
            Forbidden: what was sent does not open this.
        """
        if route in self._open:
            return ANYBODY
        try:
            if route in TRAINER and not self.access.has_admin:
                raise Forbidden(_CLOSED)
            return self.access.require(scope_of(route), authorization)
        except (AccessDenied, Forbidden) as error:
            reason = "forbidden" if isinstance(error, Forbidden) else "unauthenticated"
            self._count_refusal(reason)
            _logger.info("%s: %s", route, reason)
            raise

    @contextmanager
    def place(self, caller: Caller) -> Iterator[None]:
        """Count a request that computes something among those of its key, within the block. Raises RateLimited: the key
        has as many under way as it may."""
        most = caller.max_concurrent
        if most is not None and self.running[caller.id] >= most:
            self._count_refusal("key_concurrency")
            raise RateLimited("key_concurrency", f"This key may have {most} requests under way at once.", 1.0)
        self.running[caller.id] += 1
        try:
            yield
        finally:
            self.running[caller.id] -= 1

    def _count_refusal(self, reason: str) -> None:
        if self.metrics is not None:
            self.metrics.count("truespec_refusals_total", reason=reason)
