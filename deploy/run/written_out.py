"""A configuration written out: with all its defaults, or as values of the chart."""

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import yaml

from serve_app.backends.vllm_parts.settings import SIZES
from serve_app.config.app_config import RouterSection
from serve_app.config.base import Section
from serve_app.config.serve_file import HttpOptions, ServeFile
from speculative.errors import ConfigError
from speculative.model.catalogue import CATALOGUE

_CHART_ARGUMENTS = {"tensor_parallel_size": "tensorParallelSize", "gpu_memory_utilization": "gpuMemoryUtilization"}
"""Arguments of vLLM's that the chart sets, and the values that decide them."""
_COMMENT_WIDTH, _ENDLESS = 90, 10**6
_EXECUTOR = "distributed_executor_backend"


def effective_config(file: ServeFile) -> str:
    """All settings as YAML, each with its meaning; itself a valid file of the same service.

    Defaults are filled in, and `deployments` folded into the pools; what has no value is commented out.
    """
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
    return "\n".join(_section(ServeFile, whole)) + "\n"


def _section(section: type[Section], values: Mapping[str, Any]) -> Iterator[str]:
    """The lines of a section: for each setting its meaning, and its value or, commented out, the default."""
    for name, field in section.model_fields.items():
        yield from (
            f"# {line}" for line in textwrap.wrap(field.description or "", _COMMENT_WIDTH, break_on_hyphens=False)
        )
        inner, value, mark = _section_in(field.annotation), values.get(name), "" if name in values else "# "
        if inner is None:
            default = None if field.is_required() else field.get_default(call_default_factory=True)
            written = (
                _yaml({name: default}).replace(" null", "").splitlines() if mark else _yaml({name: value}).splitlines()
            )
        elif isinstance(value, list):
            of_each = (enumerate(_section(inner, one)) for one in value)
            written = [f"{name}:", *(f"{'  ' if number else '- '}{line}" for one in of_each for number, line in one)]
        else:
            written = [f"{name}:", *(f"  {line}" for line in _section(inner, value or {}))]
        yield from (f"{mark}{line}" for line in written)


def _section_in(annotation: Any) -> type[Section] | None:
    """The section that a field holds, alone, in a list or beside None; None where it holds a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next(filter(None, map(_section_in, get_args(annotation))), None)


def _yaml(data: Any) -> str:
    return str(yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=_ENDLESS))


def chart_values(file: ServeFile) -> str:
    """The file as values of the chart, without what only the chart has: images, memory, volumes, secrets. Raises
    ConfigError: a pool has what is set in another way there, or the chart does not have it."""
    config = file.application.effective_args
    for field, source in config.sources.items():
        if source.startswith((".", "~")):
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
    for name in config.pool_names:
        for field, instead in (("autoscaling", "autoscaling"), ("label_selector", "nodeSelector")):
            if getattr(config.pool(name), field):
                raise ConfigError(
                    f"pools.{name}.{field} cannot become a value of the chart, which has its own way: remove it in a "
                    f"copy of the file, and set pools.{name}.{instead} in a values file."
                )
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
    pools = {name: config.pool(name) for name in config.pool_names}
    values["pools"] = {
        name: {"replicas": pool.replicas, "cpus": _whole(pool.num_cpus), "gpus": _whole(pool.num_gpus)}
        for name, pool in pools.items()
    }
    if fetched := [name for name in dict.fromkeys(config.sources.values()) if name in CATALOGUE]:
        values["modelCache"] = {"fetch": fetched}
    if file.http_options.port != HttpOptions().port:
        values["service"] = {"port": file.http_options.port}
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _whole(number: float) -> float | int:
    return int(number) if number == int(number) else number  # of fractions the chart says that it takes none
