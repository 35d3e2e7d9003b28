"""Whether our own engine has room beside vLLM on a GPU. It needs no GPU to find out."""

import contextlib
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file

from serve_app.backends.torch_backend import TorchBackend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.backends.vllm_parts.replay_room import Needs, needs_of, vllms_share
from serve_app.config.files import parse_args
from speculative.config import EngineConfig
from speculative.errors import ConfigError
from speculative.model.config import ModelConfig
from tests.support.tiny_models import write_tiny_model

GIB = 1 << 30


def test_vllm_leaves_our_engine_room_for_weights_cache_and_steps() -> None:
    needs, device = Needs(ours=20 * GIB, vllms=25 * GIB), 80 * GIB
    share = vllms_share(needs, device, None)
    assert share == 0.65 and (0.9 - share) * device >= needs.ours
    assert vllms_share(Needs(ours=GIB >> 4, vllms=GIB), device, None) == 0.89, "never more than what is left"
    assert vllms_share(replace(needs, vllms=60 * GIB), device, None) is None
    assert vllms_share(needs, device, 0.5) == 0.5 and vllms_share(needs, device, 0.7) is None


def test_what_the_engines_need_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "m")
    config = EngineConfig(dtype="bfloat16", max_model_len=128)
    one, two = (needs_of(folder, config, {"tensor_parallel_size": ranks}) for ranks in (1, 2))
    model = ModelConfig.from_folder(folder)
    weights = 2 * sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    assert one.ours == two.ours == weights + 2 * 128 * model.kv_shape.num_values
    assert one.vllms == pytest.approx(2 * two.vllms, abs=2) and one.vllms > one.ours
    assert needs_of(folder, replace(config, dtype="float32"), {}).ours == 2 * one.ours
    larger = needs_of(folder, replace(config, kv_cache_tokens=256, block_size=32), {})
    assert (larger.ours, larger.vllms) == (
        one.ours,
        pytest.approx(one.vllms + 2 * 128 * model.kv_shape.num_values, abs=1),
    )


def test_the_size_of_vllms_cache_is_not_that_of_our_engine_beside_it() -> None:
    for num_gpus, tokens in ((0, 8192), (1, None)):
        sections = {"engine": {"kind": "vllm", "kv_cache_tokens": 8192}, "pools": {"prefill": {"num_gpus": num_gpus}}}
        config = parse_args({"model": {"source": "m"}} | sections)
        assert config.vllm_settings("prefill").engine.kv_cache_tokens == 8192
        assert config.replay_config("prefill").kv_cache_tokens == tokens


@pytest.mark.parametrize(
    ("device_bytes", "lacking", "why"),
    [
        (GIB, "", ""),
        (GIB >> 12, "", "is not left by the model in vLLM"),
        (GIB, "a compiler", "kernels here (a compiler)"),
    ],
)
def test_a_replica_makes_room_for_replays_or_does_without(
    device_bytes: int,
    lacking: str,
    why: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("speculative.gpu.triton_here.why_no_triton", lambda: lacking)
    replays = not why
    folder = write_tiny_model(tmp_path / "m")
    config = parse_args({"model": {"source": "m"}, "engine": {"kind": "vllm"}})
    referee = TorchBackend(str(folder), "m", config.replay_config("prefill"))
    for only_known in (True, False):
        made = VllmBackend(str(folder), "m", config.vllm_settings("prefill"), referee, only_known=only_known)
        made._folder, made._device_bytes = folder, device_bytes
        with (
            contextlib.nullcontext() if replays or only_known else pytest.raises(ConfigError, match="replays is torch")
        ):
            made._make_room_for_replays()
        assert (made.replayer is not None) == (replays or not only_known)
        assert made.settings.engine_args.get("gpu_memory_utilization", 1) < 0.9 or not replays
    assert why in caplog.text
