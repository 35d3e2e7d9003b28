"""Client requests in flight, and the stage that each has reached: what a replica takes with it when it dies."""

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from serve_app.telemetry.metric_names import STAGES
from serve_app.telemetry.metrics import Metrics


class InFlight:
    """The gauge `truespec_requests_in_flight` of one process; without `metrics` nobody reads it."""

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics
        self._stages: dict[str, str] = {}  # by id
        self._set_gauges()

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._stages

    @contextmanager
    def holding(self, ids: Iterable[str]) -> Iterator[None]:
        """Within it these requests are in flight; at first they wait for their prompts."""
        held = dict.fromkeys(ids, "prefill")
        self._stages |= held
        self._set_gauges()
        try:
            yield
        finally:
            self._stages = {one: stage for one, stage in self._stages.items() if one not in held}
            self._set_gauges()

    def reach(self, request_id: str, stage: str) -> None:
        """Note that a request has come to one of `STAGES`, if it is in flight here."""
        if self._stages.get(request_id, stage) != stage:
            self._stages[request_id] = stage
            self._set_gauges()

    def _set_gauges(self) -> None:
        counts = Counter(self._stages.values())
        if self._metrics is not None:
            for stage in STAGES:
                self._metrics.gauge("truespec_requests_in_flight", counts[stage], stage=stage)
