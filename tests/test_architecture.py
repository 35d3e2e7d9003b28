"""The import rules of the house, read off the source: arrows point down, and heavy libraries have one owner."""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.support.loops import for_each

ROOT = Path(__file__).parents[1]
PACKAGES = ("speculative", "serve_app", "dashboards", "deploy", "tools")
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def rooms_of(package: str) -> list[list[str]]:
    """The rooms of a package as the page lists them, lowest first, each with its folders and single modules."""
    table = PAGE.partition(f"**`{package}/`**\n")[2].partition("\n\n**")[0].partition("\n\n## ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return [[name.rstrip("/") for name in re.findall("`([a-z_/]+)`", row)] for row in rows]


# A module imports its own room and those below it. `tools` is for who develops truespec, in a checkout: no wheel and no
# image has it, and no other package imports it.
ROOMS = {package: rooms_of(package) for package in ("speculative", "serve_app", "deploy", "tools")}
ROOMS["serve_app.referee"] = [["judge"], ["wire"], ["records"], ["book"]]
MOST_ROOMS = {"speculative": 12, "serve_app": 12, "deploy": 7, "tools": 7, "serve_app.referee": 4}
# What the server may know of the engine: plain values, without torch.
LEAVES = {
    f"speculative.{name}"
    for name in (
        "request",
        "config",
        "options",
        "stats",
        "errors",
        "model.end_tokens",
        "model.file_names",
        "model.forms",
        "state.prefix",
        "lookup.ngram",
        "drafters",
        "weight_formats",
        "lookup.suffix",
        "sampling.logprob_checks",
        "selfcheck.eprocess",
        "selfcheck.replayed_draws",
    )
}

# Which modules of the server may know all of it.
WITH_TORCH = {
    "serve_app.backends.rehearsed_fault",
    "serve_app.backends.torch_backend",
    "serve_app.backends.vllm_backend",
    "serve_app.backends.vllm_parts",
    "serve_app.cluster.nixl",
    "serve_app.referee.book.transformers_model",
}

# Whose modules (a package stands for all in it) may import a library or one of our packages; `tools` may import all.
OWNERS = {
    "aiohttp": {"deploy.watch"},
    "click": {"deploy"},
    "cryptography": {"serve_app.referee.records.signatures"},
    "ctypes": {"speculative.kernels", "serve_app.openai.off_loop"},
    "fastapi": {"serve_app.http", "serve_app.http.page.page_routes", "deploy.watch.app"},
    "gguf": {"speculative.model"},
    "grafana_api": {"dashboards.push"},
    "jsonschema": {"serve_app.referee.wire.structure"},
    "jsonschema_specifications": {"serve_app.referee.wire.structure"},
    "llama_cpp": set(),
    "llguidance": {"serve_app.text.grammar"},
    "openai": set(),
    "opentelemetry": {"serve_app.telemetry.tracing", "serve_app.streams.spans"},
    "prometheus_client": {"serve_app.telemetry", "deploy.watch.probes.numbers"},
    "pydantic": {
        "serve_app.http.access.keys",
        "serve_app.config",
        "serve_app.http",
        "serve_app.referee.records.receipts",
        "serve_app.openai",
    },
    "pytest": set(),
    "ray": {
        "serve_app.app",
        "serve_app.deployments",
        "serve_app.cluster",
        "serve_app.telemetry.metrics",
        "serve_app.cluster.nixl",
        "deploy",
    },
    "regex": {"serve_app.referee.wire.structure"},
    "rich": {"deploy"},
    "safetensors": {
        "speculative",
        "serve_app.backends.vllm_parts.checkpoint",
        "serve_app.backends.vllm_parts.replay_room",
        "deploy",
    },
    "starlette": {"serve_app.http"},
    "tokenizers": {"serve_app.text", "speculative.model.gguf"},
    "torch": {
        "speculative",
        "serve_app.backends.rehearsed_fault",
        "serve_app.backends.torch_backend",
        "serve_app.backends.vllm_parts.cpu_layouts",  # in vLLM's worker processes
        "serve_app.referee.book.transformers_model",
        "serve_app.backends.vllm_parts.block_sums",
        "serve_app.backends.vllm_parts.connector",
        "serve_app.cluster.nixl",
        "deploy",
    },
    "transformers": {
        "serve_app.backends.vllm_parts.checkpoint",
        "serve_app.text.tokenizer",
        "speculative.model.loading",
        "serve_app.referee.book.transformers_model",
    },
    "vllm": {"serve_app.backends.vllm_backend", "serve_app.backends.vllm_parts"},
    "xxhash": {"speculative"},
    "dashboards": {"dashboards", "deploy"},
    "deploy": {"deploy"},
    "serve_app": {"serve_app", "deploy", "dashboards"},
    "speculative": {"speculative", "serve_app", "dashboards", "deploy"},
    "tools": {"tools"},
}
# What a module does not load, for those who have not installed it or have no time for it.
UNLOADED = {
    "serve_app.referee.judge.judgement": {"ray", "torch", "fastapi", "prometheus_client"},
    "deploy.watch.proxy": {"ray", "torch"},
    "deploy.watch.referee": {"ray"},
    "serve_app.backends.torch_backend": {"speculative.gpu"},  # of which an engine on a CPU runs nothing
}


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


TREES = {
    name_of(path): ast.parse(path.read_text(encoding="utf-8"), str(path))
    for package in PACKAGES
    for path in sorted((ROOT / package).rglob("*.py"))
}


@cache
def imports(module: str) -> set[str]:
    """What a module imports, also inside functions; our own by module, not by name within it."""
    found = set()
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: a relative import"
            full = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= (full & TREES.keys()) or {str(node.module)}
    return found


def within(module: str, places: set[str]) -> bool:
    return any(module == place or module.startswith(f"{place}.") for place in places)


def test_libraries_and_packages_have_their_owners() -> None:
    strangers = [
        f"{module} may not import {name}; OWNERS names who may"
        for module in TREES
        for name in sorted(imports(module))
        if not within(module, {"tools"} | OWNERS.get(name.split(".")[0], {module}))
    ]
    assert not strangers, "\n".join(strangers)


@for_each(ROOMS)
def test_a_room_imports_only_rooms_below_it(package: str) -> None:
    def part(module: str) -> str:
        return module.removeprefix(f"{package}.").split(".")[0]

    order = {name: place for place, names in enumerate(ROOMS[package]) for name in names}
    own = {module: {name for name in imports(module) if name in TREES} for module in TREES if within(module, {package})}
    assert {part(module) for module in own} - {package.split(".")[0]} == order.keys(), "the page lists every room"
    assert len(ROOMS[package]) <= MOST_ROOMS[package]
    upward = [
        f"{module} imports {name}"
        for module, names in own.items()
        for name in names
        if within(name, {package}) and order.get(part(name), 0) > order.get(part(module), 0)
    ]
    assert not upward, "\n".join(upward)


def test_other_rooms_use_of_the_referee_what_it_says() -> None:
    parts = [name for [name] in ROOMS["serve_app.referee"]]
    opened = {
        f"serve_app.referee.{part}.{name}"
        for part in parts
        for name in re.findall("`([a-z_]+)`", ast.get_docstring(TREES[f"serve_app.referee.{part}"]) or "")
    }
    used = {
        name: module
        for module in TREES
        if not within(module, {"serve_app.referee", "tools"})
        for name in imports(module)
        if within(name, {"serve_app.referee"})
    }
    assert used.keys() == opened, {name: used.get(name) for name in used.keys() ^ opened}


def test_what_the_server_knows_of_the_engine_needs_no_torch() -> None:
    heavy = [module for module in LEAVES if "torch" in {name.split(".")[0] for name in imports(module)}]
    assert not heavy, "\n".join(heavy)


def test_a_public_class_name_stands_for_one_thing() -> None:
    names = Counter(
        node.name
        for tree in TREES.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert not {name for name, count in names.items() if count > 1}


def test_the_server_sees_only_the_leaves_of_the_engine() -> None:
    strangers = [
        f"{module} imports {name}"
        for module in TREES
        if within(module, {"serve_app", "dashboards"}) and not within(module, WITH_TORCH)
        for name in imports(module)
        if within(name, {"speculative"}) and name not in LEAVES
    ]
    assert not strangers, "\n".join(strangers)


def test_dashboards_know_the_catalogues_of_the_server_alone() -> None:
    names = {name for module in TREES if within(module, {"dashboards"}) for name in imports(module)}
    catalogues = {"serve_app.telemetry.metric_names", "serve_app.referee.judge.strata"}
    assert {name for name in names if within(name, {"serve_app"})} <= catalogues


@pytest.mark.parametrize("module", UNLOADED)
def test_an_import_loads_only_what_is_needed(module: str) -> None:
    script = f"import sys, {module}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert module in loaded.split()
    assert not UNLOADED[module] & set(loaded.split())


def test_there_are_no_cycles() -> None:
    try:
        TopologicalSorter({module: imports(module) & TREES.keys() - {module} for module in TREES}).prepare()
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")
