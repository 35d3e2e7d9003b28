"""The composition root: from the YAML's `args` to a Ray Serve application."""

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application

from serve_app.config import AppConfig, PoolName, parse_args
from serve_app.deployments import DecodeServer, MonolithServer, PrefillServer, RefereeServer

_PROXY_RETRY_AFTER_S = 2
# Answers that wait for their verdict wait inside the referee, and must not keep reports out.
_REFEREE_OPTIONS: dict[str, Any] = {
    "num_replicas": 1,
    "max_ongoing_requests": 10_000,
    "ray_actor_options": {"num_cpus": 0},
}


def build_app(args: Mapping[str, Any]) -> Application:
    """The application that `import_path: serve_app.app:build_app` names.

    Raises:
        ConfigError: a field of `args` is wrong; the message names it and the mend.
    """
    config = parse_args(args)
    referee = serve.deployment(**_REFEREE_OPTIONS)(RefereeServer).bind(config)
    if config.topology == "monolith":
        return serve.deployment(**_options(config, "monolith"))(MonolithServer).bind(config, referee)
    prefill = serve.deployment(**_options(config, "prefill"))(PrefillServer).bind(config)
    return serve.deployment(**_options(config, "decode"))(DecodeServer).bind(config, prefill, referee)


def _options(config: AppConfig, name: PoolName) -> dict[str, Any]:
    pool = config.pool(name)
    scaling = (
        {"num_replicas": pool.replicas}
        if pool.autoscaling is None
        else {"autoscaling_config": pool.autoscaling.model_dump()}
    )
    return {
        **scaling,
        # Serve lets more in than the replica takes on, so that it is the replica that answers 429 with a reason and an
        # honest Retry-After; what even that cannot hold, Serve's own proxy turns away.
        "max_ongoing_requests": 2 * config.limits.max_ongoing_requests,
        "max_queued_requests": config.limits.max_queued_requests,
        "backpressure_config": {"status_code": 429, "retry_after_s": _PROXY_RETRY_AFTER_S},
        "graceful_shutdown_timeout_s": config.limits.request_timeout_s,
        "ray_actor_options": {
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            "label_selector": pool.label_selector,
            "runtime_env": {"env_vars": _thread_environment(pool.num_threads)},
        },
    }


def _thread_environment(num_threads: int) -> dict[str, str]:
    """A replica computes with its share of the cores, and its idle threads sleep.

    Two replicas whose threads wait actively on the same cores make each other fifty times slower.
    """
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "MKL_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
        "KMP_BLOCKTIME": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }
