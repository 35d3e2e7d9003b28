"""Kill one process of each kind while clients stream: what they see, what is counted, and which alerts it raises."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Barrier, BrokenBarrierError, Event

import httpx
import yaml

from dashboards import build
from deploy.exchange.client import Attempt, Client
from serve_app.config.serve_file import HA_PROXY, ServeFile
from speculative.errors import TruespecError
from tools.chaos.nodes import LocalCluster, NodeShape, local_cluster, one_node_a_replica
from tools.chaos.prometheus import running_prometheus
from tools.chaos.replicas import command_line
from tools.chaos.sockets import ESTABLISHED, LISTENING, free_ports, pids_of_port
from tools.chaos.streams import complete

Progress = Callable[[str], None]
Series = Mapping[str, float]

_PLAIN, _HAPROXY, _ROUTED = "Serve's proxy", "HAProxy", "Serve's proxy and a router"
ROUTES = (_PLAIN, _HAPROXY, _ROUTED)
_DECODES, _PREFILLS, _ROUTER = "a decode replica", "a prefill replica", "the router"
_PROXY, _SERVE, _CONTROLLER = "a node's proxy", "Serve's controller", "truespec's controller"
_RAYLET, _HEAD, _HEAD_REDIS = "a node's raylet", "the head", "the head, its state in Redis"
KINDS = (_DECODES, _PREFILLS, _ROUTER, _PROXY, _SERVE, _CONTROLLER, _RAYLET, _HEAD, _HEAD_REDIS)
"""Kinds of processes, those first whose deaths leave the others where they are."""
_TITLES = {
    _DECODES: r"ray::ServeReplica:[^:]+:(Decode|Monolith)Server",
    _PREFILLS: r"ray::ServeReplica:[^:]+:PrefillServer",
    _ROUTER: r"ray::ServeReplica:[^:]+:StreamRouter",
    _CONTROLLER: r"ray::ServeReplica:[^:]+:Controller",
    _SERVE: r"ray::ServeController",
    _RAYLET: r"\S*/raylet ",
}
_COUNTS = re.compile(
    r"truespec_(requests_interrupted|replica_restarts|resumes|prefill_failures|handoff_refusals)_total"
    r'|truespec_requests_total\{.*outcome="(error|abort)"|ray_(serve_num_http_requests_total\{.*status_code="(404|5))'
)
_LOSSES = ("requests_interrupted_total", "requests_total{", "serve_num_http_requests_total{")
_NOT_ACCEPTED = ("refused", "no reply")
_NOT_LOST = ("complete", "refused", "HTTP 429")
_LONG_PROMPT = "one two three " * 400  # for seconds in the prefill pool
_START_S = 600.0
_STREAM_S = 180.0  # no stream takes longer where all is well
_ASK_S = 15.0
_ASK_EVERY_S = 0.5
_REPORTED_S = 3.0  # replicas report each second what they have
_HEAD_START_S = 60.0  # within that it has a raylet, also on a busy machine
_SETTLED_S = 15.0  # so long all is there, and new requests are answered
_LONGEST_S = 240.0
_LOOK_EVERY_S = 1.0


class ServiceNotStarted(TruespecError):
    """The service did not come up; the message has its last words."""


@dataclass(frozen=True, slots=True)
class Death:
    """One process that was killed under load, and the consequences."""

    route: str  # the way of requests to the replicas
    process: str  # the one that was killed
    streams: dict[str, int]  # results of the streams that ran then, with their numbers
    through_head: int  # of these, those that came by the head's own proxy, which a chart's service leaves out
    in_prefill: dict[str, int]  # results of as many whole requests with long prompts, sent just before
    failed: dict[str, int]  # results of new requests that were not answered, with their numbers
    failed_for_s: float  # from the first to the last of them
    whole_s: float | None  # seconds until all was there again; None = not within the time of observation
    counted: dict[str, float]  # increase of each metric, over Ray's exporters of all nodes
    alerts: dict[str, str]  # which it raised, with their state

    @property
    def uncounted(self) -> int:
        """Requests that something accepted and that were lost, as far as there are more of them than were counted."""
        results = Counter({result: count for result, count in self.failed.items() if result not in _NOT_ACCEPTED})
        results += Counter(self.streams) + Counter(self.in_prefill)
        lost = sum(count for result, count in results.items() if result not in _NOT_LOST)
        return max(0, lost - round(sum(count for name, count in self.counted.items() if name.startswith(_LOSSES))))

    def as_dict(self) -> dict[str, object]:
        """For JSON."""
        return asdict(self)


def kill_each(
    file: ServeFile, streams: int, max_tokens: int, progress: Progress, kinds: Collection[str] = KINDS
) -> list[Death]:
    """Serve the configuration by each route on a cluster of its own, and kill one process of each of these kinds.

    Args:
        file: has a router, and two replicas of each pool at least.
        streams: that run when a process is killed.
        max_tokens: of each.
        progress: called with status messages.

    Raises:
        ServiceNotStarted: the service did not come up.
    """
    found = []
    for route in ROUTES:
        has_redis = _HEAD_REDIS in kinds and route != _HAPROXY and shutil.which("redis-server")
        for redis in (False, True) if has_redis else (False,):
            with _served(file, route, redis=redis, progress=progress) as service:
                for process in [_HEAD_REDIS] if redis else service.there(kinds):
                    progress(f"{route}: killing {process}")
                    found.append(service.kill(process, streams, max_tokens))
                    progress(f"  {json.dumps(found[-1].as_dict())}")
    return found


@contextlib.contextmanager
def _served(file: ServeFile, route: str, *, redis: bool, progress: Progress) -> Iterator["_Service"]:
    """A cluster of its own, with the service and a Prometheus."""
    placed, head, shapes = one_node_a_replica(_by(file, route), router_on_head=False)
    if route == _HAPROXY:  # HAProxy and what it asks keep files and ports of a machine, which such nodes would share
        placed, head, shapes = _by(file, route), NodeShape(sum(shape.num_cpus for shape in shapes), {}), []
    settings = {HA_PROXY: str(int(route == _HAPROXY))}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if redis:
            settings["RAY_REDIS_ADDRESS"] = stack.enter_context(_running_redis(folder))
        progress(f"{route}: starting Ray's head and {len(shapes)} nodes{' with Redis' if redis else ''}")
        cluster = stack.enter_context(local_cluster(head, shapes, settings))
        config = folder / "serve.yaml"
        config.write_text(yaml.safe_dump(placed.model_dump(mode="json", exclude_unset=True)), encoding="utf-8")
        http = placed.http_options
        url = f"http://127.0.0.1:{http.port}{placed.application.route_prefix.rstrip('/')}"
        stack.enter_context(_serving(config, cluster, settings, url, folder / "said"))
        rules = folder / "prometheus"
        build.write(rules)
        service_at = {"targets": [f"127.0.0.1:{http.port}"], "labels": {"job": "truespec"}}
        scrape = [  # as the chart's PodMonitor
            {
                "job_name": "truespec",
                "honor_labels": True,
                "file_sd_configs": [{"files": [str(rules / "nodes.json")], "refresh_interval": "2s"}],
                "metric_relabel_configs": [
                    {"regex": "otel_scope_.*|SessionName|Version|Component", "action": "labeldrop"}
                ],
            },
            {
                "job_name": "application",
                "metrics_path": f"{placed.application.route_prefix.rstrip('/')}/metrics",
                "static_configs": [service_at],
            },
        ]
        service = _Service(route, url, http.port, placed.application.args.model.served_name, cluster, rules)
        service.name_exporters()
        service.prometheus = stack.enter_context(running_prometheus(rules, scrape, [rules / "rules" / "truespec.yaml"]))
        yield service


def _by(file: ServeFile, route: str) -> ServeFile:
    """The configuration with or without its router, and with a proxy on each node, as the chart has it."""
    args = file.application.args
    if route != _ROUTED:
        recovery = args.recovery.model_copy(update={"resume": False})
        args = args.model_copy(update={"pools": args.pools.model_copy(update={"router": None}), "recovery": recovery})
    return file.with_args(args).model_copy(update={"proxy_location": "EveryNode"})


@contextlib.contextmanager
def _running_redis(folder: Path) -> Iterator[str]:
    (port,) = free_ports(1)
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield f"127.0.0.1:{port}"
        finally:
            process.terminate()


@contextlib.contextmanager
def _serving(config: Path, cluster: LocalCluster, settings: Mapping[str, str], url: str, said: Path) -> Iterator[None]:
    """`truespec serve` in a process of its own: this one must not end with the head."""
    command = [sys.executable, "-m", "deploy.cli.main", "serve", str(config), "--address", cluster.address]
    with said.open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | settings)
    try:
        deadline = time.monotonic() + _START_S
        while "Serving " not in said.read_text(encoding="utf-8", errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise ServiceNotStarted(f"{url}: {said.read_text(encoding='utf-8', errors='replace')[-800:]}")
            time.sleep(_LOOK_EVERY_S)
        yield
    finally:
        process.kill()  # the cluster ends anyway
        process.wait()


class _Service:
    """A service on a cluster whose processes may die, and its observers. It is never connected to Ray for long."""

    def __init__(self, route: str, url: str, port: int, model: str, cluster: LocalCluster, folder: Path) -> None:
        self._route, self._url, self._port, self._model = route, url, port, model
        self._cluster, self._folder = cluster, folder
        self.prometheus = ""
        self._head_started = 0.0
        self._failures: list[tuple[float, str]] = []

    def name_exporters(self) -> None:
        """Tell Prometheus where Ray's agents are, replaced nodes' included."""
        (self._folder / "nodes.json").write_text(json.dumps([{"targets": self._exporters()}]), encoding="utf-8")

    def census(self) -> Counter[str]:
        """The number of processes of each kind."""
        return Counter(kind for _, kind in self._known())

    def there(self, kinds: Collection[str]) -> list[str]:
        """Those of these kinds that can be killed by themselves: on a single node no raylet is one, and no head."""
        there = self.census() if self._cluster.nodes else self.census() - Counter([_RAYLET])
        return [kind for kind in KINDS if kind in kinds and (there[kind] or (kind == _HEAD and self._cluster.nodes))]

    def kill(self, process: str, streams: int, max_tokens: int) -> Death:
        """Kill a process while streams run and others wait for their prompts, and observe until all is there again."""
        whole, before, alerts = self.census(), self._counters(), self._alerts()
        over = Event()
        with ThreadPoolExecutor(2 * streams + 1) as threads:
            running = self._begin(threads, streams, max_tokens)
            of_head = set(self._cluster.head.pids) if self._cluster.nodes else set()  # without nodes there is one proxy
            through_head = sum(pid in of_head for pid in pids_of_port(self._port, ESTABLISHED))
            waiting = [threads.submit(self._ask_long, number) for number in range(streams)]
            time.sleep(_REPORTED_S)
            restart = self._strike(process)
            began = time.monotonic()
            asking = threads.submit(self._keep_asking, over, began)
            raised: dict[str, str] = {}
            whole_s = self._observe(whole, began, restart, asking, alerts, raised)
            over.set()
            ended, waited = [one.result() for one in running], [one.result() for one in waiting]
            failures = asking.result()
        times = [at for at, _ in failures]
        return Death(
            route=self._route,
            process=process,
            streams=dict(Counter(map(_result, ended))),
            through_head=through_head,
            in_prefill=dict(Counter(map(_result, waited))),
            failed=dict(Counter(result for _, result in failures)),
            failed_for_s=round(times[-1] - times[0], 1) if times else 0.0,
            whole_s=whole_s,
            counted=_increases(before, self._counters()),
            alerts=raised,
        )

    def _begin(self, threads: ThreadPoolExecutor, streams: int, max_tokens: int) -> list[Future[Attempt]]:
        """Begin streams, and wait until each of them has had a token."""
        begun = Barrier(streams + 1)

        def stream(number: int) -> Attempt:
            waited = Event()

            def on_event(_: object) -> None:
                if not waited.is_set():
                    waited.set()
                    with contextlib.suppress(BrokenBarrierError):
                        begun.wait(_STREAM_S)

            body = {"model": self._model, "prompt": f"{number} one two three", "max_tokens": max_tokens}
            with Client(self._url, timeout_s=_STREAM_S) as client:
                return client.stream(body | {"ignore_eos": True, "temperature": 0.7, "seed": number}, on_event=on_event)

        running = [threads.submit(stream, number) for number in range(streams)]
        try:
            begun.wait(_STREAM_S)
        except BrokenBarrierError:
            said = [one.result().reported() for one in running]
            raise ServiceNotStarted(f"{self._url}: not all of {streams} streams began: {said}") from None
        return running

    def _ask_long(self, number: int) -> Attempt:
        """Ask for a whole answer, to a prompt that was never computed."""
        body = {"model": self._model, "prompt": f"{time.time()} {number} {_LONG_PROMPT}", "max_tokens": 8}
        with Client(self._url, timeout_s=_STREAM_S) as client:
            return client.post(body)

    def _strike(self, process: str) -> Callable[[], None]:
        """Kill it; returns what a kubelet does about it, to be called again and again."""
        if process in (_HEAD, _HEAD_REDIS):
            self._start_head()
            return self._keep_head
        known, nodes = self._known(), [set(node.pids) for node in self._cluster.nodes]
        decodes = {pid for pid, kind in known if kind == _DECODES}
        on_nodes = set[int]().union(*nodes)
        beside_decodes = set[int]().union(*(node for node in nodes if node & decodes))  # others' deaths are smaller
        chosen = min(
            (pid for pid, kind in known if kind == process),
            key=lambda pid: (pid not in beside_decodes, pid not in on_nodes),
        )
        os.kill(chosen, signal.SIGKILL)
        return self._replace_ended

    def _replace_ended(self) -> None:
        """Start nodes again whose `ray start` has ended, as a kubelet does."""
        for number, node in enumerate(self._cluster.nodes):
            if node.ended:
                self._cluster.begin_replacing(number)
                self.name_exporters()

    def _keep_head(self) -> None:
        """Start the head again where its raylet does not come up, as a liveness probe has it."""
        has_raylet = any(kind == _RAYLET for pid, kind in self._known() if pid in self._cluster.head.pids)
        if not has_raylet and time.monotonic() - self._head_started > _HEAD_START_S:
            self._start_head()
        self._replace_ended()

    def _start_head(self) -> None:
        self._cluster.head.kill()
        self._cluster.head.start()
        self._head_started = time.monotonic()

    def _observe(
        self,
        whole: Counter[str],
        began: float,
        restart: Callable[[], None],
        asking: "Future[list[tuple[float, str]]]",
        alerts: Series,
        raised: dict[str, str],
    ) -> float | None:
        """Wait until all processes are there again and stay; returns the seconds until then."""
        since: float | None = None
        while time.monotonic() - began < _LONGEST_S and not asking.done():
            restart()
            self._note_alerts(alerts, raised)
            is_whole, now = not whole - self.census(), time.monotonic()
            is_failing = bool(self._failures) and now - began - self._failures[-1][0] < _SETTLED_S
            since = (since or now) if is_whole and not is_failing else None
            if since is not None and time.monotonic() - since > _SETTLED_S:
                return round(since - began, 1)
            time.sleep(_LOOK_EVERY_S)
        return None

    def _keep_asking(self, over: Event, began: float) -> list[tuple[float, str]]:
        """Ask short questions, one at a time; returns when and how they failed."""
        self._failures = []
        body = {"model": self._model, "prompt": "one two", "max_tokens": 2}
        while not over.wait(_ASK_EVERY_S):
            with Client(self._url, timeout_s=_ASK_S) as client:
                result = _result(client.post(body))
            if result != "complete":
                self._failures.append((time.monotonic() - began, result))
        return self._failures

    def _known(self) -> list[tuple[int, str]]:
        """Processes of the cluster whose kind has a name here."""
        listening = set(pids_of_port(self._port, LISTENING))
        pids, found = [*self._cluster.head.pids, *(pid for node in self._cluster.nodes for pid in node.pids)], []
        for pid in pids:
            title = command_line(pid).replace(b"\0", b" ").decode(errors="replace")
            kinds = [kind for kind, pattern in _TITLES.items() if re.match(pattern, title)]
            kinds += [_PROXY] if pid in listening else []
            found += [(pid, kind) for kind in kinds[:1]]
        return found

    def _exporters(self) -> list[str]:
        ports = [self._cluster.head.metrics_port, *(node.metrics_port for node in self._cluster.nodes)]
        return [f"127.0.0.1:{port}" for port in ports]

    def _counters(self) -> Series:
        """Series of the counters that a loss may raise: the application's, and those of Ray's agents that answer."""
        found: dict[str, float] = {}
        for exporter in (self._url, *(f"http://{agent}" for agent in self._exporters())):
            with contextlib.suppress(httpx.HTTPError):
                for line in httpx.get(f"{exporter}/metrics", timeout=_ASK_S).text.splitlines():
                    if _COUNTS.match(line):
                        name, value = line.rsplit(" ", 1)
                        found[f"{exporter} {name}"] = float(value)
        return found

    def _alerts(self) -> dict[str, float]:
        """Value of each alert that is pending or firing, by labels and state."""
        found = httpx.get(f"{self.prometheus}/api/v1/alerts", timeout=_ASK_S).json()["data"]["alerts"]
        return {json.dumps(one["labels"] | {"": one["state"]}, sort_keys=True): float(one["value"]) for one in found}

    def _note_alerts(self, before: Series, raised: dict[str, str]) -> None:
        """Note alerts that are new, or whose value has risen, as one of a row before may still be firing."""
        for key, value in self._alerts().items():
            labels = json.loads(key)
            if key not in before or value >= before[key] + 1:
                name, state = labels["alertname"], labels[""]
                raised[name] = "firing" if "firing" in (state, raised.get(name)) else state


def _result(attempt: Attempt) -> str:
    """The result of a request, in a word or two."""
    if complete(attempt):
        return "complete"
    if attempt.status is None:
        return "refused" if "refused" in attempt.error else "no reply"
    if attempt.status != httpx.codes.OK:
        return f"HTTP {attempt.status}"
    return "error event" if attempt.reply.error is not None else "cut"


def _increases(before: Series, after: Series) -> dict[str, float]:
    """Sum the increases of each metric; a series that is gone has none, and one that fell began again at 0."""
    found: dict[str, float] = {}
    for name, value in after.items():
        earlier = before.get(name, 0.0)
        if (rise := value - earlier if value >= earlier else value) > 0:
            found[_short(name)] = found.get(_short(name), 0.0) + rise
    return found


def _short(series: str) -> str:
    """The name of a series, with the label that says what was counted."""
    name = re.search(r"(?:truespec|ray)_(\w+)", series)
    label = re.search(r'\b(outcome|status_code|result|reason|stage)="[^"]*"', series)
    return f"{name[1] if name else series}{'{' + label[0] + '}' if label else ''}"
