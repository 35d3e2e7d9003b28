"""The state of this application's pools, as Ray Serve knows it."""

import asyncio
import logging
from collections.abc import Mapping

from ray.serve.context import _get_global_client
from ray.serve.schema import DeploymentDetails, ServeInstanceDetails

from serve_app.cluster.replica_counts import PoolState, ReplicaCounts, RequestsOn
from serve_app.config.app_config import AppConfig
from serve_app.telemetry.metrics import Metrics, Sink

_logger = logging.getLogger("truespec.serve")
_EVERY_S = 5.0
_PROXY = "proxy"
_POOLS = {"DecodeServer": "decode", "PrefillServer": "prefill", "MonolithServer": "monolith", "StreamRouter": "router"}


async def watch_pools(app_name: str, config: AppConfig, sink: Sink, requests_on: RequestsOn) -> None:
    """Record how many replicas each pool has and should have, until cancelled."""
    pools = {pool: Metrics(sink, model_name=config.model.served_name, pool=pool) for pool in (*_POOLS.values(), _PROXY)}
    counts = ReplicaCounts(pools.__getitem__, requests_on)
    failing = False
    while True:
        try:
            counts.note(await asyncio.to_thread(pool_states, app_name))
            failing = False
        except Exception as error:  # Serve's controller may be starting again
            level = logging.DEBUG if failing else logging.WARNING  # no counts, no alerts about replicas
            _logger.log(level, "Replicas are not counted: Ray Serve did not report its deployments: %r", error)
            failing = True
        await asyncio.sleep(_EVERY_S)


def pool_states(app_name: str) -> Mapping[str, PoolState]:
    """Each pool's state. `serve.status()` has it too, but for how many replicas are wanted; blocks for milliseconds."""
    details = ServeInstanceDetails(**_get_global_client().get_serve_details())
    deployments = details.applications[app_name].deployments
    pools = {pool: _state(deployments[name]) for name, pool in _POOLS.items() if name in deployments}
    statuses = {node: proxy.status.value for node, proxy in details.proxies.items()}
    well = frozenset(node for node, status in statuses.items() if status == "HEALTHY")
    leaving = sum(status in ("DRAINING", "DRAINED") for status in statuses.values())
    return pools | {_PROXY: PoolState(len(statuses) - leaving, well)}


def _state(deployment: DeploymentDetails) -> PoolState:
    def those(*states: str) -> frozenset[str]:
        return frozenset(one.replica_id for one in deployment.replicas if one.state.value in states)

    return PoolState(
        deployment.target_num_replicas,
        running=those("RUNNING", "UPDATING", "RECOVERING", "PENDING_MIGRATION"),
        moving=those("PENDING_MIGRATION"),
        changing=deployment.status.value in ("UPDATING", "DOWNSCALING"),
    )
