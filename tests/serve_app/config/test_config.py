"""The YAML: shipped files load, and each kind of fault is reported with its field."""

import contextlib
import copy
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.config.files import load_config, parse_args
from speculative.config import DrafterConfig, EngineConfig
from speculative.errors import ConfigError

CONFIGS = Path(__file__).parents[3] / "deploy" / "configs"
GOOD: dict[str, Any] = {
    "proxy_location": "HeadOnly",
    "http_options": {"host": "127.0.0.1", "port": 8000},
    "applications": [
        {
            "name": "truespec",
            "route_prefix": "/llm",
            "import_path": "serve_app.app:build_app",
            "args": {"version": 1, "model": {"source": "smollm2-135m"}},
        }
    ],
}


def written(tmp_path: Path, path: str, value: Any) -> Path:
    """The good file with one field changed; `args` stands for the application's args, to which `args` alone adds."""
    data = copy.deepcopy(GOOD)
    *sections, last = path.split(".")
    place = data
    if path == "args":
        place, last, value = data["applications"][0], "args", data["applications"][0]["args"] | value
    elif sections[:1] == ["args"]:
        place, sections = data["applications"][0]["args"], sections[1:]
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    file = tmp_path / "app.yaml"
    file.write_text(yaml.safe_dump(data))
    return file


@pytest.mark.parametrize("name", ["demo.yaml", "monolith.yaml", "resilient.yaml", "vllm.yaml"])
def test_shipped_files_load_and_are_ray_serve_configs(name: str) -> None:
    schema = pytest.importorskip("ray.serve.schema")
    ours = load_config(CONFIGS / name)
    rays = schema.ServeDeploySchema.model_validate(yaml.safe_load((CONFIGS / name).read_text()))
    assert rays.http_options.port == ours.http_options.port == 8000
    assert rays.proxy_location.value == ours.proxy_location
    assert rays.applications[0].import_path == ours.application.import_path
    assert parse_args(rays.applications[0].args) == ours.application.args


SUFFIX = {
    **{"kind": "suffix", "suffix_depth": 12, "suffix_min_match": 3, "suffix_min_probability": 0.5},
    **{"suffix_max_tokens": 0, "length": "dynamic"},
}


@pytest.mark.parametrize(
    "drafter", [{"kind": "ngram", "num_draft_tokens": 7, "ngram_max": 5, "ngram_min": 3}, SUFFIX], ids=str
)
def test_every_engine_setting_reaches_the_engine(drafter: dict[str, Any]) -> None:
    engine: dict[str, Any] = {
        "dtype": "float32", "device": "cpu", "max_model_len": 100, "max_num_seqs": 3, "max_batched_tokens": 64,
        "kv_cache_tokens": 256, "block_size": 32, "prefix_caching": False, "logprobs_mode": "processed_logprobs",
        "verifier": "coupled", "self_check_sample_rate": 0.25,
    }  # fmt: skip
    config = parse_args(
        {
            "model": {"source": "models/tiny/"}, "engine": engine, "replay": {"sample_rate": 0.0}, "drafter": drafter,
            "pools": {"prefill": {"num_cpus": 3.5}, "decode": {"num_cpus": 0.5}},
        }
    )  # fmt: skip
    expected = EngineConfig(**engine, num_threads=3, drafter=DrafterConfig.of(**drafter))
    assert config.engine_config("prefill") == expected
    assert config.engine_config("decode").num_threads == 1, "not 0"
    assert config.model.served_name == "tiny"


def test_our_defaults_are_the_engines() -> None:
    config = parse_args({"model": {"source": "hub/name", "name": "served"}})
    assert config.engine_config("decode") == EngineConfig()
    assert config.model.served_name == "served"
    assert config.pool_names == ("prefill", "decode")
    with pytest.raises(ConfigError, match="no pool monolith"):
        config.pool("monolith")


BY_LOAD = {"max_replicas": 4, "target_kv_usage": 0.5}
FAULTS: list[tuple[str, object, str, str]] = [  # (field set, value, field named in the error, part of the message)
    ("proxy_location", "Everywhere", "proxy_location", "HeadOnly"),
    ("http_options.port", 70000, "http_options.port", "65535"),
    ("http_options.prot", 8000, "http_options.prot", "did you mean port?"),
    ("grpc_options", {}, "grpc_options", "is not a field"),
    ("applications", [], "applications", "at least 1"),
    ("applications", GOOD["applications"] * 2, "applications", "at most 1"),
    ("args.model", {}, "args.model.source", "is missing"),
    ("args.model.source", "", "args.model.source", "must not be empty, got ''."),
    ("args.model.source", "s3://bucket/qwen", "args.model.source", "is a URL"),
    ("args.model.source", "/", "args.model.name", "source '/' does not end in a name; set one"),
    ("args.modle", {}, "args.modle", "did you mean model?"),
    ("args.engine.kind", "sglang", "args.engine.kind", "'torch' or 'vllm'"),
    ("args.vllm", {}, "args.vllm", "engine.kind is torch; remove it"),
    ("args.engine.dtype", "float16", "args.engine.dtype", "bfloat16"),
    ("args.engine.max_num_seqs", 0, "args.engine.max_num_seqs", "must be at least 1, got 0."),
    ("args.engine.max_num_seqs", "16", "args.engine.max_num_seqs", "whole number, without quotes, got '16'."),
    ("args.engine.max_model_len", 32768, "args.engine.kv_cache_tokens", "lower max_model_len"),
    ("args.engine.max_batched_tokens", 79, "args.engine.max_batched_tokens", "= 80"),
    ("args.engine.kv_cache_tokens", 1000, "args.engine.kv_cache_tokens", "multiple of block_size (16)"),
    ("args.engine.prefix_caching", "yes", "args.engine.prefix_caching", "must be true or false"),
    ("args.engine.logprobs_mode", "raw_logits", "args.engine.logprobs_mode", "'raw_logprobs' or 'processed_logprobs'"),
    ("args.drafter.kind", "eagle3", "args.drafter.model", "needs a folder"),
    ("args.drafter", {"kind": "mtp", "model": "m"}, "args.drafter.kind", "mtp needs engine.kind: vllm"),
    ("args.drafter.model", "heads/mine", "args.drafter.model", "remove it or change kind"),
    ("args.drafter.num_draft_tokens", 65, "args.drafter.num_draft_tokens", "64"),
    ("args.drafter.ngram_min", 9, "args.drafter.ngram_min", "at most ngram_max (4)"),
    ("args.drafter.suffix_min_match", 33, "args.drafter.suffix_min_match", "at most suffix_depth (32)"),
    ("args.pools.monolith", {"replicas": 1}, "args.pools.monolith", "remove it or change topology"),
    ("args.pools.decode.num_cpus", float("nan"), "args.pools.decode.num_cpus", "finite"),
    ("args.pools.decode.num_cpus", 1e-9, "args.pools.decode.num_cpus", "must be 0 or at least 0.0001"),
    ("args.engine.logprobs_mode", "processed_logprobs", "args.replay.sample_rate", "set replay.sample_rate to 0"),
    ("args.replay.max_tme", 1.0, "args.replay.max_tme", "must be above 1, got 1.0."),
    ("args.breaker.mode", False, "args.breaker.mode", "'auto', 'on' or 'off'"),
    *(
        ("args.access", {name: False}, f"args.access.{name}", "is false, but there are no keys")
        for name in ("open_metrics", "open_health")
    ),
    ("args.admin.token", "s3cret", "args.admin.token", "did you mean token_file?"),
    ("args.observability.traces_endpoint", "collector:4318", "args.observability.traces_endpoint", "with its path"),
    ("args.observability.traces_endpoint", "http://collector:4318", "args.observability.traces_endpoint", "/v1/traces"),
    ("args.recovery.prefill_timeout_s", 0.0, "args.recovery.prefill_timeout_s", "above 0"),
    ("args.recovery.max_resumes", 1000, "args.recovery.max_resumes", "at most 100"),
    ("args.pools.router", {"num_gpus": 1.0}, "args.pools.router.num_gpus", "is not a field"),
    ("args.pools.decode", {"replicas": 2, "autoscaling": BY_LOAD}, "args.pools.decode.replicas", "remove one of them"),
]
FAULTS += [
    ("args.pools.decode", {"autoscaling": scale}, f"args.pools.decode.autoscaling.{field}", part)
    for scale, field, part in (
        ({"max_replicas": 4, "target_ongoing_requests": 3.0}, "target_ongoing_requests", "no effect with policy load"),
        (BY_LOAD | {"policy": "requests"}, "target_kv_usage", "has no effect with policy requests; remove it or"),
        ({"min_replicas": 2, "max_replicas": 1}, "min_replicas", "must be at most max_replicas (1)"),
    )
]
WRONG_PREFIXES = {
    "/llm/": "must not end with /",
    "//": "must not end with /",
    "/{x}": "without { and }",
    "llm": "match",
}
FAULTS += [
    ("applications", [GOOD["applications"][0] | {"route_prefix": prefix}], "applications[0].route_prefix", part)
    for prefix, part in WRONG_PREFIXES.items()
]
FAULTS += [  # the prefill pool has a GPU
    (
        "args",
        {"engine": own, "pools": {"prefill": {"num_gpus": 1}, "decode": {"num_gpus": gpus}}},
        f"args.{field}",
        part,
    )
    for own, gpus, field, part in (
        ({"device": "cpu"}, 0, "pools.prefill.num_gpus", "set it to 0"),
        ({"device": "cuda:0"}, 0, "pools.decode.num_gpus", "set it to 1"),
        ({"device": "cuda:1"}, 2, "engine.device", "set it to auto"),
        ({"device": "cuda"}, 1.5, "pools.decode.num_gpus", "is 1.5, and above 1 Ray gives whole GPUs: set it to 2"),
        ({"cuda_graphs": True}, 0, "engine.cuda_graphs", "is true, and pools.decode.num_gpus is 0: a CPU has no"),
        ({"max_model_len": 20_000}, 0, "engine.kv_cache_tokens", "got 16384"),
    )
]


@pytest.mark.parametrize(("path", "value", "field", "part"), FAULTS, ids=[f"{f[0]}={f[1]!r}"[:60] for f in FAULTS])
def test_a_bad_value_is_reported_with_file_and_field(
    tmp_path: Path, path: str, value: object, field: str, part: str
) -> None:
    file = written(tmp_path, path, value)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    (line,) = str(caught.value).splitlines()
    field = re.sub(r"^args", "applications[0].args", field)
    assert line.startswith(f"{file}: {field}: ")
    assert part in line


@pytest.mark.parametrize(
    ("engine", "num_gpus"),
    [({"device": "cuda:0"}, 0.5), ({"device": "cuda:1"}, 2), ({"cuda_graphs": None}, 0), ({"cuda_graphs": False}, 0),
     ({"max_model_len": 20_000}, 1)],
)  # fmt: skip
def test_settings_that_go_with_a_pools_gpus_are_taken(engine: dict[str, Any], num_gpus: float) -> None:
    pools = {"monolith": {"num_gpus": num_gpus}}
    parse_args({"model": {"source": "m"}, "engine": engine, "topology": "monolith", "pools": pools})


COUPLED = {"verifier": "coupled"}


@pytest.mark.parametrize(
    ("tree", "changes", "message"),
    [
        ([3, 0], {"engine": COUPLED}, r"drafter\.tree\[1\]: .*must be at least 1, got 0."),
        ([1] * 5, {"engine": COUPLED}, r"drafter\.tree: must have at most num_draft_tokens \(4\) levels"),
        ([8, 8], {"engine": COUPLED}, r"drafter\.tree: must have at most 64 drafts a round.*; it has 200"),
        ([3], {"engine": COUPLED, "drafter": {"kind": "ngram"}}, r"drafter\.tree: belongs to the kinds draft_model"),
        ([3], {}, r"engine\.verifier: must be coupled where drafter\.tree is set"),
        ([3], {"engine": {"kind": "vllm"}}, r"drafter\.tree: cannot be set for engine\.kind vllm.* Remove it"),
        ([3], {"engine": {"cuda_graphs": True, **COUPLED}}, r"engine\.cuda_graphs: .* Remove it"),
        ([3], {"engine": COUPLED, "pools": {"prefill": {"num_gpus": 1}}},
         r"drafter\.tree: is set, but pools\.prefill\.num_gpus is 1: .* CPU only\. Remove it"),
        ([3, 2], {"engine": {"max_num_seqs": 64, "max_batched_tokens": 1024, **COUPLED}},
         r"engine\.max_batched_tokens: must be at least .* the 21 drafts of a tree\) = 1408"),
    ],
)  # fmt: skip
def test_trees_that_cannot_be_drafted_are_refused(tree: list[int], changes: dict[str, Any], message: str) -> None:
    """One error each, so that no advice contradicts another."""
    drafter = {"drafter": {"kind": "eagle3", "model": "smollm2-135m-eagle3"}, **changes}["drafter"]
    with pytest.raises(ConfigError) as caught:
        parse_args({"model": {"source": "m"}, **changes, "drafter": {**drafter, "tree": tree}})
    lines = [line for line in str(caught.value).splitlines() if "pools.decode" not in line]
    assert len(lines) == 1 and re.match(rf"args\.{message}", lines[0]), lines


def test_a_tree_reaches_the_engine() -> None:
    drafter = {"kind": "eagle3", "model": "smollm2-135m-eagle3", "tree": [3, 2]}
    config = parse_args({"model": {"source": "m"}, "engine": COUPLED, "drafter": drafter}).engine_config("decode")
    assert (config.drafter.tree, config.drafter.max_rows, config.drafter.max_drafts) == ((3, 2), 21, 4)


BY_RAY = {"tensor_parallel_size": 4, "distributed_executor_backend": "ray"}


@pytest.mark.parametrize(
    ("engine_args", "changes", "message"),
    [
        (BY_RAY, {}, None),
        (BY_RAY | {"pipeline_parallel_size": 2}, {"num_gpus": 8}, None),
        ({"tensor_parallel_size": 1}, {"num_gpus": 0.5}, None),
        ({"tensor_parallel_size": 2}, {"num_gpus": 0}, None),  # vLLM's CPU build
        ({"tensor_parallel_size": 2}, {"num_gpus": 1},
         r"^args\.pools\.monolith\.num_gpus: is 1, but vllm\.engine_args\.tensor_parallel_size is 2"),
        ({"tensor_parallel_size": 1}, {"num_gpus": 2}, r"monolith\.num_gpus: is 2, but .* is 1: set one to the other"),
        (BY_RAY | {"pipeline_parallel_size": 2}, {},
         r"pools\.monolith\.num_gpus: is 4, but .*tensor_parallel_size is 4 times pipeline_parallel_size 2"),
        ({"tensor_parallel_size": 2}, {"num_gpus": 0.5}, r"is 0\.5, but .* is 2, which take a GPU each: set it to 2\."),
        (BY_RAY, {"num_gpus": 0}, r"distributed_executor_backend: is ray, .* set num_gpus of each pool to 4"),
        (BY_RAY, {"topology": "disaggregated"}, r"handoff\.transport: is plasma, .* ray, .* set it to nixl"),
        (BY_RAY, {"topology": "disaggregated", "transport": "nixl"}, None),
        (BY_RAY, {"replays": "torch"}, r"vllm\.replays: is torch, but the replica has no GPU .* set it to vllm"),
        (BY_RAY | {"pipeline_parallel_size": 2}, {"num_gpus": 8, "topology": "disaggregated", "transport": "nixl"},
         r"topology: is disaggregated, but .*pipeline_parallel_size.*: set it to monolith"),
        (BY_RAY | {"pipeline_parallel_size": 2}, {"num_gpus": 8, "drafter": "ngram"},
         r"drafter\.kind: is ngram, but .*pipeline_parallel_size is 2: .* set drafter\.kind to none"),
        ({"pipeline_parallel_size": 0}, {}, r"pipeline_parallel_size: must be a whole number from 1, got 0"),
        ({"distributed_executor_backend": "uni"}, {},
         r"distributed_executor_backend: must be one of mp, ray, got 'uni'"),
    ],
    ids=str,
)  # fmt: skip
def test_ranks_on_several_nodes_or_of_several_stages_need_settings_that_agree(
    engine_args: dict[str, object], changes: dict[str, Any], message: str | None
) -> None:
    topology = changes.get("topology", "monolith")
    pool = {"num_gpus": changes.get("num_gpus", 4)}
    asked = {
        "model": {"source": "m"},
        "engine": {"kind": "vllm"},
        "vllm": {"engine_args": engine_args} | ({"replays": changes["replays"]} if "replays" in changes else {}),
        "drafter": {"kind": changes.get("drafter", "none")},
        "topology": topology,
        "pools": {"monolith": pool} if topology == "monolith" else {"prefill": pool, "decode": pool},
        "handoff": {"transport": changes.get("transport", "plasma")},
    }
    with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
        parse_args(asked)


def test_vllm_has_our_engine_for_an_independent_referee() -> None:
    asked = {"model": {"source": "m"}, "engine": {"kind": "vllm"}, "replay": {"independent_rate": 0.1}}
    with pytest.raises(ConfigError, match=r"^args\.replay\.independent_rate: .* set vllm\.replays to torch"):
        parse_args(asked)
    for allowed in ({}, {"independent_rate": None}, {"independent_rate": 0}):
        config = parse_args(asked | {"replay": allowed})
        assert config.replay.independent_rate_of(config.engine) == 0
    config = parse_args({"model": {"source": "m"}})
    assert config.replay.independent_rate_of(config.engine) == 0.02


def test_every_fault_gets_a_line() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args({"model": {"source": "m"}, "engine": {"dtype": "int8"}, "replay": {"sample_rate": -1}})
    assert [line.split(":")[0] for line in str(caught.value).splitlines()] == [
        "args.engine.dtype",
        "args.replay.sample_rate",
    ]


WRONG_VALUES = ["2026-99-99", "!!bool abc", "9" * 5000, f"0x{'f' * 5000}"]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "the file: "),
        ("- 1\n", "the file: "),
        ("applications: [\n", "is not YAML: "),
        ("a: 1\na: 2\n", "'a' is given twice"),
        ("\ta: 1\n", "is not YAML: "),
        *(
            (f"a: {value}\n", f"is not YAML: line 1, column 4: {value.split()[-1][:40]!r} is not a valid ")
            for value in WRONG_VALUES
        ),
        ("a: !!set [a]\n", "is not YAML: "),
        (f"a: {'[' * 3000}", "is not YAML: "),
    ],
    ids=lambda value: value[:40],
)
def test_a_file_that_is_no_config_is_reported(tmp_path: Path, text: str, part: str) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(f"{file}: ")) as caught:
        load_config(file)
    assert part in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "nowhere.yaml")


def test_yaml_anchors_and_merges_work(tmp_path: Path) -> None:
    file = tmp_path / "app.yaml"
    file.write_text(
        "applications:\n- args:\n    model: {source: m}\n    pools:\n      prefill: &pool {num_cpus: 2}\n"
        "      decode: {<<: *pool, replicas: 3}\n"
    )
    decode = load_config(file).application.args.pool("decode")
    assert (decode.num_cpus, decode.replicas) == (2, 3)
