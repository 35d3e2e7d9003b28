"""The reference of the configuration, from its models: docs/configuration.md, the schema that the chart takes over, and
a file with all its defaults, or as values of the chart."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from serve_app.backends.vllm_parts.settings import SIZES
from serve_app.config.app_config import AppConfig, PoolSection, RouterSection
from serve_app.config.serve_file import HttpOptions, ServeFile
from speculative.errors import ConfigError
from speculative.model.catalogue import CATALOGUE

_INTRO = """\
# Configuration

Made by `truespec config reference` from the models in `serve_app/config/app_config.py`; do not edit it.

One YAML file, which is also a Ray Serve config. `truespec config check FILE` reports every fault with its field and the
fix, and whether this machine can serve it (`--file-only`: the file alone); `truespec config show FILE` prints the file
with every default filled in. Unknown fields are refused, and types are not guessed: `"4"` is no number. The
chart takes the same settings under `config`, all but `pools`.
"""

_CHART_ARGUMENTS = {"tensor_parallel_size": "tensorParallelSize", "gpu_memory_utilization": "gpuMemoryUtilization"}
"""Arguments of vLLM's that the chart sets, and the values that decide them."""
_ANY = 2**31 - 1
_EXECUTOR = "distributed_executor_backend"


def json_schema(model: type[AppConfig] | type[ServeFile]) -> dict[str, Any]:
    """The model's JSON schema without titles; `$defs` has its sections by class name."""
    schema: dict[str, Any] = _without_titles(model.model_json_schema())
    return schema


def configuration_reference() -> str:
    """The reference as Markdown: a table a section, the file's own fields first."""
    schema = json_schema(ServeFile)
    definitions = schema.pop("$defs")
    parts = [_INTRO, "## The file\n", *_table(schema)]
    for paths, name in _sections(schema, definitions):
        section = definitions[name]
        parts += [f"## {', '.join(f'`{path}`' for path in paths)}\n", section["description"] + "\n"]
        parts += _table(section)
    return "\n".join(parts).rstrip() + "\n"


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
    return _remarks(config) + yaml.safe_dump(whole, sort_keys=False, allow_unicode=True)


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


def _remarks(config: AppConfig) -> str:
    """Return what the file does not say by itself, as comments."""
    source = config.model.source
    if source not in CATALOGUE:
        return ""
    quantization = CATALOGUE[source].quantization
    return f"# The weights of {source} are of four bits ({quantization}), in whatever form they are kept.\n"


def _sections(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[tuple[list[str], str]]:
    """Each section below a schema, depth first: the paths of the fields that hold one of the class, and the class."""
    fields_of: dict[str, list[str]] = {}
    for field, value in schema["properties"].items():
        name, suffix = _class_of(value)
        if name:
            fields_of.setdefault(name, []).append(f"{prefix}{field}{suffix}")
    for name, paths in fields_of.items():
        yield paths, name
        yield from _sections(definitions[name], definitions, f"{paths[0]}.")


def _table(schema: dict[str, Any]) -> Iterator[str]:
    yield "| field | type | default | |\n|---|---|---|---|"
    for field, value in schema["properties"].items():
        needed = field in schema.get("required", ())
        default = "**required**" if needed else _default(value)
        yield f"| `{field}` | {_type(value)} | {default} | {' '.join(value['description'].split())} |"
    yield ""


def _default(value: dict[str, Any]) -> str:
    default = value.get("default")
    return "" if default is None or isinstance(default, dict | list) else f"`{_yaml(default)}`"


def _type(value: dict[str, Any]) -> str:
    name, suffix = _class_of(value)
    if name:
        return "list of sections" if suffix else "section"
    choices = [option for option in value.get("anyOf", [value]) if option.get("type") != "null"]
    return " or ".join(_plain_type(choice) for choice in choices)


def _plain_type(value: dict[str, Any]) -> str:
    if "const" in value:
        return f"`{_yaml(value['const'])}`"
    if "enum" in value:
        return ", ".join(f"`{_yaml(choice)}`" for choice in value["enum"])
    kind = {"object": "map", "array": "list"}.get(value["type"], value["type"])
    if value.get("additionalProperties", {}) == {"type": "string"}:
        kind = "map of strings"
    return f"{kind} {bounds(value)}".strip()


def bounds(value: Mapping[str, Any]) -> str:
    """The bounds of a number, but those that only say how large numbers may be at all."""
    signs = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))
    shown = {sign: f"{value[key]:g}" for key, sign in signs if abs(value.get(key, _ANY)) < _ANY}
    if shown.keys() == {"≥", "≤"}:
        return f"{shown['≥']} to {shown['≤']}"
    return ", ".join(f"{sign} {limit}" for sign, limit in shown.items())


def _class_of(value: dict[str, Any]) -> tuple[str, str]:
    """The section's class that a field holds, and `[]` where it holds a list of them; empty for a plain value."""
    for option in value.get("anyOf", [value]):
        if "$ref" in option:
            return option["$ref"].rsplit("/", 1)[1], ""
        if "$ref" in option.get("items", ()):
            return option["items"]["$ref"].rsplit("/", 1)[1], "[]"
    return "", ""


def _yaml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_titles(node: Any, *, names: bool = False) -> Any:
    """The schema without pydantic's titles; `names` says that the keys are fields or classes, not keywords."""
    if isinstance(node, list):
        return [_without_titles(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _without_titles(value, names=not names and key in ("properties", "$defs"))
        for key, value in node.items()
        if names or key != "title"
    }
