"""A configuration written out: with all its defaults, or as values of the chart."""

from typing import Any

import yaml

from serve_app.backends.vllm_parts.settings import SIZES
from serve_app.config.app_config import AppConfig, PoolSection, RouterSection
from serve_app.config.serve_file import HttpOptions, ServeFile
from speculative.errors import ConfigError
from speculative.model.catalogue import CATALOGUE

_CHART_ARGUMENTS = {"tensor_parallel_size": "tensorParallelSize", "gpu_memory_utilization": "gpuMemoryUtilization"}
"""Arguments of vLLM's that the chart sets, and the values that decide them."""
_EXECUTOR = "distributed_executor_backend"


def effective_config(file: ServeFile) -> str:
    """The file as YAML with every default filled in and `deployments` folded into the pools; itself a valid file."""
    config = file.application.effective_args
    args = config.model_dump(exclude_none=True)
    model = args["model"]
    args["model"] = {"source": model.pop("source"), "name": config.model.served_name} | model
    if config.engine.kind == "vllm":
        for name in SIZES - config.engine.model_fields_set:  # vLLM chooses them
            args["engine"].pop(name, None)
    else:
        del args["vllm"]
    args["pools"] = {name: config.pool(name).model_dump(exclude_none=True) for name in config.pool_names}
    for pool in args["pools"].values():
        if "autoscaling" in pool:
            del pool["replicas"]
    if config.router is not None:
        args["pools"]["router"] = config.router.model_dump()
    whole = file.model_dump(exclude={"applications"})
    whole["applications"] = [file.application.model_dump(exclude={"args", "deployments"}) | {"args": args}]
    return yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)


def chart_values(file: ServeFile) -> str:
    """The file as values of the chart, without what only the chart has: images, memory, volumes, secrets.

    Raises:
        ConfigError: a pool has what is set in another way there, or the chart does not have it.
    """
    config = file.application.effective_args
    _check_chart_has(config)
    args = config.model_dump(exclude_unset=True, exclude={"pools"})
    values: dict[str, Any] = {"config": args}
    if config.engine.kind == "vllm":
        del args["engine"]["kind"]  # the chart sets it
        given = dict(config.vllm.engine_args)
        values["vllm"] = {"enabled": True} | {
            ours: given.pop(theirs) for theirs, ours in _CHART_ARGUMENTS.items() if theirs in given
        }
        given.pop(_EXECUTOR, None)  # the default
        args["vllm"] = args.get("vllm", {}) | {"engine_args": given}
    values["pools"] = {name: _chart_pool(name, config.pool(name)) for name in config.pool_names}
    sources = (config.model.source, config.drafter.model)
    if fetched := [name for name in dict.fromkeys(sources) if name in CATALOGUE]:
        values["modelCache"] = {"fetch": fetched}
    if file.http_options.port != HttpOptions().port:
        values["service"] = {"port": file.http_options.port}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _check_chart_has(config: AppConfig) -> None:
    for field, source in (("model.source", config.model.source), ("drafter.model", config.drafter.model)):
        if source is not None and source.startswith((".", "~")):
            raise ConfigError(
                f"{field} is {source}, a folder of this machine, which the pods of the chart do not have: give a hub "
                "id in a copy of the file, or the folder's path on a volume."
            )
    on_cpus = [name for name in config.pool_names if not config.pool(name).num_gpus]
    if config.engine.kind == "vllm" and on_cpus:
        raise ConfigError(
            f"pools.{on_cpus[0]}.num_gpus is 0, and vLLM on CPUs has no form in the chart, whose image has vLLM for "
            "GPUs: set num_gpus to 1 or more in a copy of the file, or engine.kind to torch."
        )
    if config.ranks.by_ray:
        raise ConfigError(
            f"vllm.engine_args.{_EXECUTOR} cannot become a value of the chart, which sets it where a replica has "
            "several pods: remove it in a copy of the file, and set numOfHosts of each pool, and as gpus those of one "
            "pod, in a values file."
        )
    router = config.pools.router
    if router is not None and not (config.recovery.resume and router.model_dump() == RouterSection().model_dump()):
        raise ConfigError(
            "pools.router cannot become a value of the chart, which has one router, without CPUs of its own, where "
            "recovery.resume is true: remove it in a copy of the file, and set recovery.resume to true if streams are "
            "to outlive their replica."
        )


def _chart_pool(name: str, pool: PoolSection) -> dict[str, Any]:
    for field, instead in (("autoscaling", "autoscaling"), ("label_selector", "nodeSelector")):
        if getattr(pool, field):
            raise ConfigError(
                f"pools.{name}.{field} cannot become a value of the chart, which has its own way: remove it in a copy "
                f"of the file, and set pools.{name}.{instead} in a values file."
            )
    return {"replicas": pool.replicas, "cpus": _whole(pool.num_cpus), "gpus": _whole(pool.num_gpus)}


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number  # of fractions the chart says that it takes none
