"""The parts of the vLLM engine that need no vLLM: settings, handoffs, what its outputs come to, checkpoints."""

import asyncio
import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_app.backends.vllm_backend import VllmBackend
from serve_app.backends.vllm_parts import checkpoint, settings
from serve_app.backends.vllm_parts.block_sums import block_sums
from serve_app.backends.vllm_parts.deltas import DeltaReader, scored
from serve_app.backends.vllm_parts.settings import VllmSettings
from serve_app.backends.vllm_parts.vllm_handoff import Readings, VllmManifest, pack, source_of, unpack
from serve_app.config.files import parse_args
from speculative.config import DrafterConfig, EngineConfig
from speculative.errors import ConfigError, EngineFault, HandoffRefused
from speculative.model.end_tokens import end_tokens
from speculative.model.file_names import QUANTIZED_FILE
from speculative.request import FinishReason, Request, SamplingParams, TokenKind
from tests.support.fake_backend import FakeBackend
from tests.support.tiny_models import write_tiny_model

FIRST, ACCEPTED, RECOVERED, BONUS = TokenKind.FIRST, TokenKind.ACCEPTED, TokenKind.RECOVERED, TokenKind.BONUS
OURS = VllmManifest("f00", "ngram", "0.32.0", "auto bfloat16 32", 2)
PROMPT = (5, 9, 17, 33)
GIB = 1 << 30
GPU_SHARE = "gpu_memory_utilization"


def args(**sections: Any) -> dict[str, Any]:
    return {"model": {"source": "m"}, "engine": {"kind": "vllm"}} | sections


@pytest.mark.parametrize(
    ("sections", "field", "message"),
    [
        ({"vllm": {"engine_args": {"model": "other"}}}, "args.vllm.engine_args.model", "set model.source instead"),
        ({"vllm": {"engine_args": {"seed": 4}}}, "args.vllm.engine_args.seed", "remove it"),
        ({"vllm": {"engine_arg": {}}}, "args.vllm.engine_arg", "did you mean engine_args"),
        *(({"vllm": {"engine_args": {GPU_SHARE: wrong}}}, f"args.vllm.engine_args.{GPU_SHARE}", "a number above 0 and")
          for wrong in ("0.5", True, 0, 1.7)),
        ({"engine": {"kind": "vllm", "verifier": "coupled"}}, "args.engine.verifier", "token by token"),
        ({"engine": {"kind": "vllm", "quantization": "w4a8"}}, "args.engine.quantization", "quantized checkpoint"),
        ({"engine": {"kind": "vllm", "cuda_graphs": True}}, "args.engine.cuda_graphs", "enforce_eager"),
        ({"drafter": {"kind": "suffix", "length": "dynamic"}}, "args.drafter.length", "as far as the match promises"),
        ({"drafter": {"kind": "eagle3", "model": "m", "length": "dynamic", "suffix_first": 9}},
         "args.drafter.suffix_first", "one drafter at a time"),
        ({"vllm": {"lora_modules": {"m": "/a"}}}, "args.vllm.lora_modules.m", "the name of the model itself"),
        ({"vllm": {"lora_modules": {"a": "/a"}}, "engine": {}}, "args.vllm.lora_modules",
         "which engine.kind torch does not serve: set it"),
        ({"vllm": {"lora_modules": {"a": ""}}}, "args.vllm.lora_modules.a", "must not be empty"),
        ({"vllm": {"lora_modules": {"two words": "/a"}}}, "args.vllm.lora_modules", "'two words': give a name without"),
        ({"vllm": {"lora_modules": {"": "/a"}}}, "args.vllm.lora_modules", "give a name without spaces"),
        ({"vllm": {"engine_args": {"enable_lora": True}}}, "args.vllm.engine_args.enable_lora",
         "set vllm.lora_modules instead"),
        ({"vllm": {"engine_args": {"max_loras": 2}}}, "args.vllm.engine_args.max_loras",
         "names no adapter; remove it"),
        ({"vllm": {"lora_modules": {"a": "/a"}, "engine_args": {"max_lora_rank": 20}}},
         "args.vllm.engine_args.max_lora_rank", "one of 1, 8, 16, 32, 64, 128, 256, 320, 512, got 20"),
    ],
    ids=str,
)  # fmt: skip
def test_what_vllm_cannot_follow_is_refused_by_name(sections: dict[str, Any], field: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_args(args(**sections))
    assert str(caught.value).startswith(f"{field}: ") and message in str(caught.value)


@pytest.mark.parametrize(
    ("vllm", "config", "device_bytes", "by_ours"),
    [
        ({}, {}, 0, True),
        ({}, {}, GIB >> 12, False),
        ({"engine_args": {"gpu_memory_utilization": 0.85}}, {}, GIB, True),
        ({"engine_args": {"gpu_memory_utilization": 0.95}}, {}, GIB, False),
        ({}, {"architectures": ["MixtralForCausalLM"]}, 0, False),
        ({}, {"quantization_config": {"quant_method": "awq"}}, 0, False),
        ({"engine_args": {"quantization": "fp8"}}, {}, 0, False),
        ({"replays": "vllm"}, {}, 0, False),
        ({"replays": "torch"}, {}, GIB, True),
    ],
    ids=str,
)
def test_our_engine_replays_where_it_has_room_and_knows_the_model(
    vllm: dict[str, Any], config: dict[str, Any], device_bytes: int, by_ours: bool, tmp_path: Path
) -> None:
    folder = write_tiny_model(tmp_path / "m")
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    parsed = parse_args(args(vllm=vllm))
    shown = parsed.replays_show_distribution(str(folder), device_bytes)
    params = SamplingParams()
    assert shown(Request("r", PROMPT, params)) == by_ours
    assert not shown(Request("r", PROMPT, params, adapter="sql"))
    assert not parsed.may_replay_vllm("decode")


def test_an_lm_head_that_vllm_would_pass_over_is_refused(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, "smollm")
    weights = load_file(folder / "model.safetensors")
    checkpoint.check_lm_head(folder)
    for change, fits in ((0, True), (1, False)):
        head = weights["model.embed_tokens.weight"].clone()
        head[-1] += change
        save_file({"lm_head.weight": head}, folder / "head.safetensors")
        if fits:
            checkpoint.check_lm_head(folder)
    with pytest.raises(ConfigError, match=r"head\.safetensors: lm_head\.weight .*vLLM would ignore"):
        checkpoint.check_lm_head(folder)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint.check_lm_head(folder)


def test_fields_that_vllm_alone_would_follow_are_made_neutral_or_refused(tmp_path: Path) -> None:
    def overrides(config: dict[str, Any], **engine_args: Any) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(config))
        checkpoint.check_rotary(tmp_path)
        return checkpoint.neutral_overrides(tmp_path, engine_args).get("hf_overrides")

    window = {"sliding_window": 16, "logit_scale": 3.0}
    assert overrides({"model_type": "llama"} | window) == {"sliding_window": None, "logit_scale": 1.0}
    assert overrides({"model_type": "llama", "sliding_window": None}) is None
    assert overrides({"model_type": "llama", "sliding_window": 16}, hf_overrides={"rope_theta": 1.0}) == {
        "sliding_window": None,
        "rope_theta": 1.0,
    }
    assert overrides({"model_type": "llama", "sliding_window": 16}, hf_overrides={"sliding_window": 8}) == {
        "sliding_window": 8
    }
    for own in ("mistral", "qwen2", "gemma3_text", "gpt_oss"):
        assert overrides({"model_type": own, "sliding_window": 16}) is None
    assert overrides({"model_type": "cohere", "logit_scale": 0.1, "sliding_window": 16}) == {"sliding_window": None}
    assert overrides({"model_type": "made_up"} | window) is None
    factor = {"partial_rotary_factor": 0.5}
    for config in (factor, {"rope_parameters": factor}, {"rope_scaling": factor}):
        with pytest.raises(
            ConfigError, match=r"config\.json: `partial_rotary_factor` is 0\.5, which vLLM would follow"
        ):
            overrides({"model_type": "llama"} | config)
        assert overrides({"model_type": "stablelm"} | config) is None


@pytest.mark.parametrize(
    ("vllm", "num_gpus", "replays"), [({}, 1, True), ({}, 0.5, False), ({"replays": "torch"}, 0.5, True)]
)
def test_our_engine_loads_on_a_shared_gpu_only_if_told_to(vllm: dict[str, Any], num_gpus: float, replays: bool) -> None:
    """What another replica's engines take there is not known."""
    parsed = parse_args(args(vllm=vllm, pools={"prefill": {"num_gpus": num_gpus}}))
    assert parsed.may_replay_vllm("prefill") == replays


def test_the_cpu_build_runs_ranks_of_one_stage_and_one_node() -> None:
    config = parse_args(args()).engine_config("decode")
    for engine_args, message in (
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2, .* split the model with tensor_parallel_size"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend is ray, but Ray cannot place ranks"),
    ):
        with pytest.raises(ConfigError, match=message):
            settings.check_build(VllmSettings(config, engine_args=engine_args), cpu=True, ray=False)
        settings.check_build(VllmSettings(config, engine_args=engine_args), cpu=False)
        hidden = VllmSettings(config, engine_args={"tensor_parallel_size": 2})
        settings.check_build(hidden, cpu=True, hidden=True)
        with pytest.raises(ConfigError, match="Ray gave this replica none: set num_gpus of its pool to 2"):
            settings.check_build(hidden, cpu=False, hidden=True)


@pytest.mark.parametrize(("kind", "follows"), [("mtp", True), ("draft_model", False)])
async def test_an_mtp_module_in_the_models_checkpoint_comes_with_its_new_weights(kind: str, follows: bool) -> None:
    drafter = DrafterConfig(kind=kind, model="/old", num_draft_tokens=1)
    backend = VllmBackend("/old", "m", VllmSettings(EngineConfig(drafter=drafter)))
    backend._folder = backend._drafter_folder = Path("/old")
    assert await backend._drafter_with(Path("/new"), None) == Path("/new" if follows else "/old")


def test_our_settings_become_vllms_and_cannot_be_overwritten() -> None:
    config = parse_args(
        args(
            engine={"kind": "vllm", "dtype": "float32", "max_num_seqs": 3, "kv_cache_tokens": 320, "block_size": 32},
            drafter={"kind": "ngram", "num_draft_tokens": 5, "ngram_max": 6, "ngram_min": 3},
            vllm={"engine_args": {"tensor_parallel_size": 2, "enforce_eager": True}},
        )
    )
    reported = settings.engine_arguments(config.vllm_settings("decode"), "/m", None, most_tokens=101)
    ours = {"model": "/m", "dtype": "float32", "max_num_seqs": 3, "max_model_len": 101}
    assert ours.items() <= reported.items()
    assert reported["num_gpu_blocks_override"] > 10 and reported["block_size"] == 32
    assert reported["tensor_parallel_size"] == 2 and reported["enforce_eager"] is True
    assert reported["async_scheduling"] is False and reported["kv_transfer_config"]["kv_connector"] == "CopyConnector"
    assert reported["speculative_config"] == {
        "method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 6, "prompt_lookup_min": 3,
    }  # fmt: skip
    known = {"distributed_executor_backend", "enforce_eager", "tensor_parallel_size", *settings.OWN_ARGUMENTS}
    assert reported.keys() <= known, "an argument that we set can be set by the file, too"
    assert reported["kv_transfer_config"]["kv_role"] == "kv_consumer"
    assert parse_args(args()).vllm_settings("prefill").self_check_sample_rate == 0.25, "it is watched"
    alone = parse_args(args(topology="monolith", vllm={"self_check_sample_rate": 0})).vllm_settings("monolith")
    assert alone.self_check_sample_rate == 0
    chosen = settings.engine_arguments(alone, "/m", None, most_tokens=None)
    left = {"kv_transfer_config", "num_gpu_blocks_override", "block_size", "max_num_batched_tokens"}
    assert not left & chosen.keys(), "vLLM chooses what nobody sets"


def test_nixl_is_vllms_own_and_what_we_send_is_small() -> None:
    config = parse_args(args(handoff={"transport": "nixl"}))
    reported = {
        pool: settings.engine_arguments(config.vllm_settings(pool), "/m", None, most_tokens=None)
        for pool in ("prefill", "decode")
    }
    for pool, role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        transfer = reported[pool]["kv_transfer_config"]
        assert (transfer["kv_connector"], transfer["kv_role"]) == ("NixlConnector", role)
        assert transfer["kv_connector_module_path"].startswith("serve_app."), "ours, under its name"
        assert transfer["kv_load_failure_policy"] == "fail", "what vLLM recomputes by itself is not counted"
        assert reported[pool]["disable_hybrid_kv_cache_manager"] is True
    assert config.payload_transport == "inline"
    assert parse_args({"model": {"source": "m"}, "handoff": {"transport": "nixl"}}).payload_transport == "nixl"
    alone = parse_args(args(topology="monolith", handoff={"transport": "nixl"})).vllm_settings("monolith")
    assert alone.handoff == "none"


def test_what_handoffs_do_not_hold_is_refused_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parse_args(args(vllm={"engine_args": {"decode_context_parallel_size": 2}}))
    with pytest.raises(ConfigError, match=r"decode_context_parallel_size splits a sequence .* leave it out"):
        settings.check_build(config.vllm_settings("decode"), cpu=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = parse_args(args(handoff={"transport": "nixl"}))
    with pytest.raises(ConfigError, match="pip install --no-deps nixl nixl-cu12, or set it to plasma"):
        settings.check_build(config.vllm_settings("decode"), cpu=False)


def test_each_drafter_has_vllms_name_or_is_refused() -> None:
    for kind, reported in (
        ("draft_model", {"method": "draft_model", "model": "/d", "draft_sample_method": "probabilistic"}),
        ("eagle3", {"method": "eagle3", "model": "/d", "draft_sample_method": "probabilistic"}),
        ("mtp", {"method": "mtp", "model": "/d", "draft_sample_method": "probabilistic"}),
        ("suffix", {"method": "suffix", "suffix_decoding_max_tree_depth": 32, "suffix_decoding_min_token_prob": 0.1}),
    ):
        model = "d" if kind not in ("suffix",) else None
        drafter = DrafterConfig(kind=kind, model=model)  # type: ignore[arg-type]
        arguments = settings.engine_arguments(
            VllmSettings(EngineConfig(drafter=drafter)), "/m", "/d" if model else None, most_tokens=9
        )
        assert arguments["speculative_config"] == reported | {"num_speculative_tokens": 4}
        config = EngineConfig(drafter=drafter)
        if kind == "draft_model":
            settings.check_build(VllmSettings(config), cpu=True)
            with pytest.raises(ConfigError, match="block_size must be a multiple of 32"):
                settings.check_build(VllmSettings(config, frozenset(["block_size"])), cpu=True)
            continue
        fix = "enforce_eager: true" if kind == "eagle3" else "ngram"
        with pytest.raises(ConfigError, match=f"drafter.kind is {kind}.*{fix}"):
            settings.check_build(VllmSettings(config), cpu=True)
        if kind == "eagle3":
            settings.check_build(VllmSettings(config, engine_args={"enforce_eager": True}), cpu=True)


def test_versions_that_nobody_has_looked_at_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    others = "knows 0.32, .*allow_untested"
    for version, message in (("0.32.1", None), ("0.31.0", others), ("0.33.0", others), ("0.3.2", others)):
        monkeypatch.setattr("importlib.metadata.version", lambda name, version=version: version)
        assert settings.installed_version() == version
        assert settings.is_tested(version) == (message is None)
        with contextlib.nullcontext() if message is None else pytest.raises(ConfigError, match=message):
            settings.installed_version(allow_untested=False)


async def test_without_vllm_the_start_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "DISTRIBUTIONS", ("no-such-distribution",))
    with pytest.raises(ConfigError, match=r"pip install -e .\.\[vllm\]"):
        await VllmBackend("m", "m", VllmSettings(EngineConfig())).start()


async def test_replays_of_what_no_adapter_made_may_be_another_engines() -> None:
    replayer = FakeBackend()
    forced = Request("r", PROMPT, SamplingParams(), score_from=2)
    backend = VllmBackend("m", "m", VllmSettings(EngineConfig()), replayer)
    assert await backend.replay(forced) == await replayer.replay(forced)
    with pytest.raises(EngineFault, match="not started"):  # vLLM is asked, and is not there
        await backend.replay(dataclasses.replace(forced, adapter="sql"))
    config = parse_args(args(engine={"kind": "vllm", "dtype": "float32"}, vllm={"replays": "torch"}))
    ours = config.replay_config("prefill")
    assert (ours.quantization, ours.dtype, ours.drafter.kind) == ("float32", "float32", "none")


def test_arguments_that_vllm_does_not_know_are_named() -> None:
    with pytest.raises(ConfigError, match=r"engine_args.tensor_paralel_size .* did you mean tensor_parallel_size"):
        settings.check_known(["tensor_paralel_size"], ["tensor_parallel_size", "model"])


def test_a_handoff_comes_back_whole_and_only_to_its_like() -> None:
    handoff = pack(OURS, PROMPT, [b"abcd", b"ef"], {"remote_block_ids": [[3, 4]]})
    handoff.flags.writeable = False
    sent = unpack(handoff)
    sent.check(OURS, PROMPT)
    assert (sent.num_computed, [bytes(part) for part in sent.parts]) == (3, [b"abcd", b"ef"])
    assert sent.source == {"remote_block_ids": [[3, 4]]}
    assert unpack(pack(OURS, PROMPT, [b"a"])).source == {}
    others: dict[str, Any] = {"fingerprint": "f01", "drafter": "none", "vllm": "0.32.1", "num_ranks": 1, "way": "nixl"}
    for name, value in (others | {"adapter": "sql a1"}).items():
        with pytest.raises(HandoffRefused, match=name) as caught:
            sent.check(dataclasses.replace(OURS, **{name: value}), PROMPT)
        assert caught.value.reason == "manifest"
    for other in (PROMPT[1:], (*PROMPT[:3], 6)):
        with pytest.raises(HandoffRefused) as caught:
            sent.check(OURS, other)
        assert caught.value.reason == "request"


def test_a_damaged_handoff_is_refused_wherever_the_damage_is() -> None:
    handoff = pack(OURS, PROMPT, [bytes(range(200))], {"remote_block_ids": [[3, 4]]})
    for position in range(len(handoff)):
        damaged = handoff.copy()
        damaged[position] ^= np.uint8(0x55)
        with pytest.raises(HandoffRefused) as caught:
            unpack(damaged)
        assert caught.value.reason == "damaged"
    for length in (0, 3, 20, len(handoff) - 1):
        with pytest.raises(HandoffRefused):
            unpack(handoff[:length])


def test_where_a_prompt_is_to_be_read_is_known_when_it_is_computed() -> None:
    reported = {"remote_request_id": "r-1", "remote_block_ids": [[3]], settings.TERMS: {"rounds": []}}
    assert source_of(SimpleNamespace(kv_transfer_params=reported)) == {
        "remote_request_id": "r-1",
        "remote_block_ids": [[3]],
    }
    assert source_of(SimpleNamespace(kv_transfer_params=None)) == {}
    assert source_of(SimpleNamespace(kv_transfer_params={settings.TERMS: {"rounds": []}})) == {}


async def test_a_handoff_is_read_once_and_others_hear_what_came_of_it() -> None:
    readings = Readings()
    first, other = ({"remote_engine_id": name, "remote_request_id": "r"} for name in ("a", "b"))
    reading = readings.begin(first)
    assert reading is not None and readings.begin(other) is not None, "two prefill replicas may use the same name"
    assert readings.begin(first) is None
    waiting = asyncio.create_task(readings.end(first))
    impatient = asyncio.create_task(readings.end(first))
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.sleep(0)
    assert not waiting.done() and not reading.cancelled()
    reading.set_result(True)
    assert await waiting is True and await readings.end(first) is True


def test_blocks_are_summed_so_that_nothing_can_change_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    caches = [torch.randn(6, 2, 4, 3, generator=generator).to(torch.bfloat16) for _ in range(2)]

    def sums(*layers: torch.Tensor, blocks: Sequence[int] = (4, 1)) -> list[int]:
        reported: list[int] = block_sums([(layer, blocks) for layer in layers], 6).tolist()
        return reported

    first, second = sums(*caches)
    assert sums(*caches, blocks=(1, 4)) == [second, first]
    assert sums(*(cache[[1, 4]].repeat(3, 1, 1, 1) for cache in caches), blocks=(1, 0)) == [first, second]
    for changed in (
        [caches[1], caches[0]],  # layers
        [caches[0].flip(1), caches[1]],  # keys and values
        [caches[0].transpose(2, 3), caches[1]],  # places and channels
        [caches[0].index_fill(0, torch.tensor(4), 0.0), caches[1]],
    ):
        assert sums(*changed)[0] != first
    with monkeypatch.context() as patch:
        patch.setattr("serve_app.backends.vllm_parts.block_sums._AT_ONCE", 1)
        assert sums(*caches) == [first, second], "a block at a time"
    halves = [cache.reshape(12, 1, 4, 3) for cache in caches]
    assert sums(*halves) == [first, second], "a kernel's blocks may be parts of the scheduler's"
    assert len(set(sums(torch.arange(6 * 3, dtype=torch.uint8).reshape(6, 3)))) == 2, "no whole words"


def output(token_ids: list[int], rounds: list[tuple[int, int, int]], finish: str | None = None) -> SimpleNamespace:
    """What vLLM gives, as far as it is read."""
    completion = SimpleNamespace(token_ids=token_ids, logprobs=None, finish_reason=finish)
    reported = {settings.TERMS: {"rounds": rounds, "preempted": False}}
    return SimpleNamespace(
        outputs=[completion], kv_transfer_params=reported, prompt_logprobs=None, num_cached_tokens=16, metrics=None
    )


def test_rounds_report_how_each_token_came_to_be() -> None:
    reader = DeltaReader(Request("r", PROMPT))
    steps = [
        (output([7], [(1, 0, 0)]), (FIRST,), 0, 0),
        (output([8, 9, 10], [(1, 0, 0), (4, 4, 2)]), (ACCEPTED, ACCEPTED, RECOVERED), 4, 2),
        (output([11, 12, 13], [(4, 4, 2), (7, 2, 2)]), (ACCEPTED, ACCEPTED, BONUS), 2, 2),
        (output([14], [(7, 2, 2), (8, 0, 0)]), (BONUS,), 0, 0),
        (output([16], [(8, 0, 0), (9, 3, 0)]), (RECOVERED,), 3, 0),
        (output([15], [(9, 3, 0), (10, 3, 2)], "stop"), (ACCEPTED,), 3, 1),
    ]
    for reported, kinds, num_drafted, num_accepted in steps:
        delta, _ = reader.read(reported, "v")
        assert (delta.kinds, delta.num_drafted, delta.num_accepted) == (kinds, num_drafted, num_accepted)
    assert (delta.finish_reason, delta.stop_token_id) == (FinishReason.STOP, 15)


def test_rounds_that_a_slow_reader_finds_together_are_reported_apart() -> None:
    rounds = [(1, 0, 0), (4, 4, 2), (5, 4, 0)]
    delta, found = DeltaReader(Request("r", PROMPT)).read(output([7, 8, 9, 10, 11], rounds), "v")
    assert delta.kinds == (FIRST, ACCEPTED, ACCEPTED, RECOVERED, RECOVERED)
    assert [(one.num_emitted, one.num_drafted) for one in found] == [(1, 0), (3, 4), (1, 4)]


def test_what_was_cached_is_reported_once_and_not_for_what_was_handed_over() -> None:
    reader = DeltaReader(Request("r", PROMPT))
    assert [reader.read(output([1], [(n, 0, 0)]), "v")[0].num_cached_tokens for n in (1, 2)] == [16, 0]
    handed = DeltaReader(Request("r", PROMPT), handed_off=True)
    assert handed.read(output([1], [(1, 0, 0)]), "v")[0].num_cached_tokens == 0


def test_a_replay_reports_the_distribution_where_logprobs_hold_it() -> None:
    rows = [
        {token: SimpleNamespace(logprob=-1.5, rank=2), 99: SimpleNamespace(logprob=-0.5, rank=1)} for token in PROMPT
    ]
    reported = SimpleNamespace(prompt_logprobs=[None, *rows[1:]], num_cached_tokens=0, metrics=None)
    greedy = Request("r", PROMPT, SamplingParams(temperature=0), score_from=2)
    delta, _ = scored(greedy, reported, "v")
    assert delta.logprobs is not None and [entry.token_id for entry in delta.logprobs] == [17, 33]
    assert delta.replayed is not None and [row.gap for row in delta.replayed] == [1.0, 1.0]
    for params in (SamplingParams(), SamplingParams(temperature=0, frequency_penalty=1.0)):
        assert scored(Request("r", PROMPT, params, score_from=2), reported, "v")[0].replayed is None
    assert all(entry.top == () for entry in delta.logprobs), "nobody asked for them"
    delta, _ = scored(Request("r", PROMPT, SamplingParams(prompt_logprobs=2), score_from=2), reported, "v")
    assert delta.logprobs is not None
    assert [entry.top for entry in delta.logprobs] == [((99, -0.5), (17, -1.5)), ((99, -0.5), (33, -1.5))]


def test_an_engine_ends_when_its_replica_is_killed() -> None:
    """Three processes: this one, a replica, and its engine, whose standard output stays open as long as it lives."""
    engine = "from serve_app.backends.vllm_parts.orphan import end_with_parent as e; e(); print('up', flush=True)"
    engine += "; import time; time.sleep(600)"
    replica = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {engine!r}]); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", replica], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"up\n"
        process.kill()
        assert process.stdout.read() == b""  # returns when the engine has ended


def test_the_fingerprint_of_a_checkpoint_is_of_what_vllm_reads(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / QUANTIZED_FILE).parent.mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_text("{}")
    before = checkpoint.folder_fingerprint(folder)
    (folder / QUANTIZED_FILE).write_text("packed")
    assert checkpoint.folder_fingerprint(folder) == before and checkpoint.came_quantized(folder)
    (folder / "model.safetensors").write_text("others")
    assert checkpoint.folder_fingerprint(folder) != before
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no safetensors"):
        checkpoint.folder_fingerprint(folder)


def test_a_checkpoint_reports_its_longest_sequence_and_what_ends_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 100, "eos_token_id": 2}))
    assert [checkpoint.most_tokens(tmp_path, wanted) for wanted in (None, 50, 99, 100)] == [100, 51, 100, 100]
    assert tuple(end_tokens(tmp_path)) == (2,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert tuple(end_tokens(tmp_path)) == (2, 7)


def test_longrope_is_not_replayed_by_our_engine(tmp_path: Path) -> None:
    """vLLM takes the factors for long texts for all of them, once its requests may be long."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **factors}
    for number, own in enumerate(({}, {"rope_parameters": rope, "original_max_position_embeddings": 64})):
        reason = checkpoint.why_not_ours(write_tiny_model(tmp_path / str(number), "phi3", **own), {})
        assert reason is None if not own else "LongRoPE" in str(reason)


def test_weights_of_another_model_are_reported_apart(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "ab"]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"hidden_size": 64, "_name_or_path": str(number)}))
    checkpoint.check_same_model(*folders)
    (folders[1] / "config.json").write_text(json.dumps({"hidden_size": 128}))
    with pytest.raises(ConfigError, match="its hidden_size is 64, that of the served one 128"):
        checkpoint.check_same_model(*folders)
