"""The composition root: from the YAML's `args` to a Ray Serve application."""

import os
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.config.files import parse_args
from serve_app.config.serve_file import HA_PROXY
from serve_app.deployments.controller import Controller
from serve_app.deployments.gpus import ONLY_GIVEN_GPUS
from serve_app.deployments.pools import DecodeServer, MonolithServer, PrefillServer
from serve_app.deployments.stream_router import DecodeWorker, StreamRouter

_PROXY_RETRY_AFTER_S = 2
_SPIN_COUNT = "300"  # turns of libgomp's loop before a waiting thread sleeps: a few microseconds
# Answers that wait for their verdict wait inside the referee, and must not keep reports out.
_CONTROLLER_OPTIONS: dict[str, Any] = {
    "num_replicas": 1,
    "max_ongoing_requests": 10_000,
    # On the head, which outlives the nodes of replicas, with what was found out about them.
    "ray_actor_options": {
        "num_cpus": 0,
        "resources": {"node:__internal_head__": 0.001},
        "runtime_env": {"env_vars": ONLY_GIVEN_GPUS},
    },
}


def build_app(args: Mapping[str, Any]) -> Application:
    """The application that `import_path: serve_app.app:build_app` names. Raises ConfigError: a field of `args` is
    wrong; the message names it and the fix."""
    return build(parse_args(args))


def build(config: AppConfig) -> Application:
    """The application of a checked configuration."""
    controller = serve.deployment(**_CONTROLLER_OPTIONS, logging_config=_logging(config))(Controller).bind(config)
    prefill = None
    if config.topology == "disaggregated":
        prefill = serve.deployment(**_options(config, "prefill"))(PrefillServer).bind(config)
    pool, server = config.decoding_pool, MonolithServer if prefill is None else DecodeServer
    if (router := config.router) is not None:  # in front of the decoding pool, which keeps its name
        decoding = serve.deployment(name=server.__name__, **_options(config, pool))
        routing = serve.deployment(
            **_shared_options(config, config.pool(pool).most_replicas),
            num_replicas=router.replicas,
            ray_actor_options={
                "num_cpus": router.num_cpus,
                "label_selector": router.label_selector,
                "runtime_env": {"env_vars": _thread_environment(1) | ONLY_GIVEN_GPUS},
            },
        )
        workers = decoding(DecodeWorker).bind(config, pool, prefill)
        return routing(StreamRouter).bind(config, workers, controller)
    others = (controller,) if prefill is None else (prefill, controller)
    return serve.deployment(**_options(config, pool))(server).bind(config, *others)


def _options(config: AppConfig, name: PoolName) -> dict[str, Any]:
    """Options of a pool's replicas: a share of one node, or where Ray places vLLM's ranks, a GPU for each of them on as
    few nodes as have them, the first beside the replica itself."""
    pool, routing, options = config.pool(name), config.routing, _shared_options(config, 1)
    if pool.autoscaling is None:
        options["num_replicas"] = pool.replicas
    else:
        options["autoscaling_config"] = pool.autoscaling.serve_options(name)
    actor, environment = {"num_cpus": pool.num_cpus}, _thread_environment(pool.num_threads)
    if (ranks := config.ranks).by_ray:
        first = {"CPU": pool.num_cpus} if pool.num_cpus else {}
        labels = pool.label_selector
        options |= {
            # The GPUs are the placement group's, not the replica's own; its vLLM looks at them nevertheless.
            "ray_actor_options": actor | {"runtime_env": {"env_vars": environment}},
            "placement_group_bundles": [first | {"GPU": 1.0}, *({"GPU": 1.0} for _ in range(ranks.number - 1))],
            "placement_group_strategy": "PACK",
            "placement_group_bundle_label_selector": [labels] * ranks.number if labels else None,
        }
    else:
        own = {"num_gpus": pool.num_gpus, "label_selector": pool.label_selector}
        options["ray_actor_options"] = actor | own | {"runtime_env": {"env_vars": environment | ONLY_GIVEN_GPUS}}
    is_prefill = name == "prefill"
    # Behind HAProxy, an ingress follows its rule, and Serve refuses one that it would pass over.
    is_behind_haproxy = not is_prefill and config.router is None and os.environ.get(HA_PROXY) == "1"
    if (routing.prefill if is_prefill else routing.decode) != "serve" and not is_behind_haproxy:
        chosen, needs = "DecodeRouter", {"max_num_seqs": config.engine.max_num_seqs}
        if is_prefill:
            chosen, needs = "PrefillRouter", {"block_size": config.engine.block_size}
        options["request_router_config"] = RequestRouterConfig(
            request_router_class=f"serve_app.cluster.replica_router:{chosen}",
            request_router_kwargs=needs,
            request_routing_stats_period_s=routing.period_s,
        )
    return options


def _shared_options(config: AppConfig, num_engines: int) -> dict[str, Any]:
    """Options of every replica that takes requests, with so many engines behind it."""
    limits = config.limits
    return {
        # Serve lets more in than the replica takes on, so that it is the replica that answers 429 with a reason and an
        # honest Retry-After; what even that cannot hold, Serve's own proxy turns away.
        "max_ongoing_requests": 2 * limits.max_ongoing_requests * num_engines,
        "max_queued_requests": limits.max_queued_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": _PROXY_RETRY_AFTER_S},
        "graceful_shutdown_timeout_s": limits.request_timeout_s,
        "logging_config": _logging(config),
    }


def _logging(config: AppConfig) -> dict[str, Any]:
    """Return how Ray Serve logs in a replica until the replica has set up its lines; each request has a line of our
    own."""
    settings = config.observability
    return {
        "encoding": settings.log_format.upper(),
        "log_level": settings.log_level.upper(),
        "enable_access_log": False,
    }


def _thread_environment(num_threads: int) -> dict[str, str]:
    """A replica computes with its share of the cores, and its idle threads soon sleep.

    Two replicas whose threads wait actively on the same cores make each other fifty times slower; one whose threads
    sleep at once is half as fast at one stream, since the kernels of a step are shorter than waking a thread takes.
    glibc gives each thread a heap of its own, in pieces that large temporaries do not fill; with one heap for all less
    lies fallow.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": _SPIN_COUNT,
        "KMP_BLOCKTIME": "0",
        "MALLOC_ARENA_MAX": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
