"""Every recipe for a large model, in the installed vLLM's own words: whether it takes them, and what it makes of them.

From config.json of the models' full sizes, without weights, vLLM builds its whole configuration, but no engine. The CPU
build refuses nothing of it; so kernels, the quantizations of a GPU and memory are checked by nobody here. The sizes of
heads are as their kind has them; what no check depends on is as transformers assumes it.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from deploy.cli.console import CONFIGS
from serve_app.backends.vllm_backend import ENVIRONMENT
from serve_app.backends.vllm_parts.checkpoint import most_tokens
from serve_app.backends.vllm_parts.settings import VllmSettings, check_build, check_known, engine_arguments
from serve_app.config.app_config import AppConfig
from serve_app.config.files import load_config
from speculative.errors import ConfigError
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = NEEDS_VLLM
RECIPES = sorted((CONFIGS / "recipes").glob("*.yaml"))
_LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
_QWEN = {
    **_LLAMA,
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
}
# The sizes of these two models are what transformers assumes of their classes.
_GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
}  # fmt: skip
_DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_nextn_predict_layers": 1,
    "max_position_embeddings": 163840,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
    },
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    "torch_dtype": "bfloat16",
}  # fmt: skip


def _head(target: dict[str, Any]) -> dict[str, Any]:
    """A head in the form of the `speculators` library, as RedHatAI publishes them."""
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": 32000,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"architectures": target["architectures"], "name_or_path": "of its own"},
        },
        "transformer_layer_config": _LLAMA | target | {"model_type": "llama", "num_hidden_layers": 1},
    }


MADE = {  # the layers whose cache grows with every token, the quantization, and the drafter's architecture
    "llama-3.3-70b": (80, None, "Eagle3LlamaForCausalLM"),
    "qwen3-32b": (64, None, "Eagle3LlamaForCausalLM"),
    "gpt-oss-120b": (18, "gpt_oss_mxfp4", "LlamaForCausalLMEagle3"),
    "deepseek-v3": (62, "fp8", "DeepSeekMTPModel"),
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.3-70B-Instruct": _LLAMA,
    "RedHatAI/Llama-3.3-70B-Instruct-speculator.eagle3": _head(_LLAMA),
    "Qwen/Qwen3-32B": _QWEN,
    "RedHatAI/Qwen3-32B-speculator.eagle3": _head(_QWEN),
    "openai/gpt-oss-120b": _GPT_OSS,
    "nvidia/gpt-oss-120b-Eagle3-throughput": {
        **_LLAMA,
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": 2880,
        "intermediate_size": 17280,
        "num_hidden_layers": 1,
        "head_dim": 64,
        "vocab_size": 201088,
        "draft_vocab_size": 201088,
    },
    "deepseek-ai/DeepSeek-V3": _DEEPSEEK,
}


def folder_of(name: str, where: Path) -> str:
    """A checkpoint's folder, without its weights."""
    folder = where / name.replace("/", "--")
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(PUBLISHED[name]))
    return str(folder)


def made_of(settings: VllmSettings, config: AppConfig, where: Path) -> Any:
    """What vLLM makes of what our engine gives it on a GPU."""
    from vllm import AsyncEngineArgs

    check_build(settings, cpu=False)
    model, drafter = folder_of(config.model.source, where), config.drafter.model
    longest = most_tokens(Path(model), settings.engine.max_model_len)
    head = None if drafter is None else folder_of(drafter, where)
    arguments = engine_arguments(settings, model, head, most_tokens=longest)
    check_known(arguments, [field.name for field in dataclasses.fields(AsyncEngineArgs)])
    return AsyncEngineArgs(**arguments, load_format="dummy", skip_tokenizer_init=True).create_engine_config()


@pytest.fixture(autouse=True)
def as_served(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_vllm_takes_a_recipe_and_makes_of_it_what_its_comment_says(recipe: Path, tmp_path: Path) -> None:
    from serve_app.backends.vllm_parts.parsers import check_names

    config = load_config(recipe).application.effective_args
    check_names(config.vllm.tool_parser, config.vllm.reasoning_parser)
    num_layers, quantization, drafter = MADE[recipe.stem]
    for pool in config.pool_names:
        made = made_of(config.vllm_settings(pool), config, tmp_path)
        model, ranks, drafts = made.model_config, made.parallel_config, made.speculative_config
        assert ranks.world_size == ranks.tensor_parallel_size == config.pool(pool).num_gpus
        assert model.max_model_len == config.engine.max_model_len + 1
        assert model.quantization == quantization
        assert (drafts.method, drafts.num_speculative_tokens) == (config.drafter.kind, config.drafter.num_draft_tokens)
        assert drafts.draft_model_config.architectures == [drafter]
        assert drafts.draft_parallel_config.tensor_parallel_size == ranks.tensor_parallel_size
        assert (made.kv_transfer_config is None) == (config.topology == "monolith")
        tensors = 1 if model.use_mla else 2 * model.get_total_num_kv_heads()
        kib = num_layers * tensors * model.get_head_size() * 2 / 1024
        assert f" = {kib:.0f} KiB a token" in recipe.read_text()


def test_a_wrong_flag_or_number_of_devices_fails(tmp_path: Path) -> None:
    config = load_config(CONFIGS / "recipes" / "llama-3.3-70b.yaml").application.effective_args
    settings = config.vllm_settings("decode")
    for wrong, message in (
        ({"tensor_parallel_size": 3}, "must be divisible by tensor parallel size"),
        ({"gpu_memory_utilisation": 0.9}, "gpu_memory_utilization"),
        ({"kv_cache_dtype": "fp9"}, "cache_dtype"),
    ):
        with pytest.raises((ValueError, ConfigError), match=message):
            made_of(dataclasses.replace(settings, engine_args=wrong), config, tmp_path)
