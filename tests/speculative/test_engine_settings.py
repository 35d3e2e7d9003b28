"""Settings of an engine: a wrong value is refused by name, whether it comes from a file or from Python."""

import re
from dataclasses import replace
from typing import Any

import pytest

from speculative.config import DrafterConfig, EngineConfig
from speculative.errors import ConfigError
from speculative.options import options_of

WRONG: list[tuple[str, Any, str]] = [
    ("max_num_seqs", 0, "max_num_seqs must be at least 1, got 0."),
    ("max_model_len", 1, "max_model_len must be at least 2, got 1."),
    ("num_threads", 0, "num_threads must be at least 1, got 0."),
    ("self_check_sample_rate", 1.5, "self_check_sample_rate must be between 0 and 1, got 1.5."),
    ("self_check_sample_rate", float("nan"), "self_check_sample_rate must be between 0 and 1, got nan."),
    ("priority_ageing_s", 0.0, "priority_ageing_s must be above 0 and finite, got 0.0."),
    ("priority_ageing_s", float("inf"), "priority_ageing_s must be above 0 and finite, got inf."),
    ("device", "gpu", "device must match ^(auto|cpu|cuda(:\\d+)?)$, got 'gpu'."),
    ("kv_cache_tokens", 1000, "kv_cache_tokens must be a multiple of block_size (16)."),
    ("max_batched_tokens", 79, "max_batched_tokens must be at least max_num_seqs x (1 + num_draft_tokens) = 80, so"),
]


@pytest.mark.parametrize(("name", "value", "message"), WRONG)
def test_a_wrong_value_is_refused_by_name(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        replace(EngineConfig(), **{name: value})
    assert str(refused.value).startswith(message)


def test_a_step_that_is_too_small_for_passages_is_refused_by_what_made_it_so() -> None:
    drafter = DrafterConfig.of(kind="eagle3", model="m", length="dynamic", suffix_first=40)
    with pytest.raises(ConfigError, match=re.escape("max_num_seqs x (1 + suffix_first) = 656, so")):
        EngineConfig(drafter=drafter)


def test_what_may_be_left_open_has_no_range() -> None:
    assert EngineConfig(max_model_len=None, cuda_graphs=None) == EngineConfig()


def test_every_setting_says_what_it_means() -> None:
    options = options_of(EngineConfig)
    assert {"max_num_seqs", "num_threads"} <= options.keys() and "drafter" not in options
    assert all(option.meaning.endswith(".") for option in options.values())
