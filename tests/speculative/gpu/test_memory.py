"""The part of a GPU's memory that steps may take, and the rest, which is the cache's."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deploy.run.own_model import sizes_on_a_gpu
from speculative.config import DrafterConfig, EngineConfig
from speculative.errors import ConfigError
from speculative.gpu.buckets import Buckets
from speculative.gpu.memory import cache_tokens, free_bytes, graph_bytes, step_bytes
from speculative.gpu.paged_attention import AttentionSizes
from speculative.gpu.prompt_graph import prompt_sizes
from speculative.model.config import ModelConfig
from speculative.model.rotary import Rope
from speculative.state.kv_cache import KVShape

QWEN_32B = ModelConfig("Qwen3ForCausalLM", 151_936, 5120, 25600, 64, 64, 8, 128, 1e-6, Rope.plain(1e6, 128), 40_960)
LLAMA_8B = ModelConfig("LlamaForCausalLM", 128_256, 4096, 14336, 32, 32, 8, 128, 1e-5, Rope.plain(5e5, 128), 131_072)
BUCKETS = Buckets.of(64, 4)
NUM_ROWS = 64 * 5


GIB = 2**30
CARD, WEIGHTS, OF_CUDA = 80 * GIB, 15 * GIB, GIB // 2


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculative.gpu.memory._STEADY_S", 0)


def made_up_card(monkeypatch: pytest.MonkeyPatch, free: int | Callable[[], int], total: int, reserved: int) -> None:
    """Replace CUDA's figures of a card, of which this process has reserved some."""
    kept = [GIB]  # by the allocator, until `empty_cache`
    monkeypatch.setattr(torch.cuda, "empty_cache", kept.clear)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: reserved)
    monkeypatch.setattr(
        torch.cuda, "mem_get_info", lambda _: ((free if isinstance(free, int) else free()) - sum(kept), total)
    )


def estimate(
    draft_model: Any = None, max_model_len: int = 8192, max_batched_tokens: int = 64, buckets: Buckets = BUCKETS
) -> int:
    decoder: Any = SimpleNamespace(config=LLAMA_8B, dtype=torch.bfloat16)
    sizes = AttentionSizes(16, 5, max_model_len // 16)
    return graph_bytes(decoder, buckets, sizes, draft_model, prompt_sizes(max_batched_tokens))


def test_captured_steps_need_the_larger_of_logits_and_activations_and_all_that_outlives_them() -> None:
    dense, part = (SimpleNamespace(ids=ids, num_features=0) for ids in (None, torch.arange(32_000)))
    few, tables = Buckets.of(4, 4), 16 << 20
    logits = NUM_ROWS * LLAMA_8B.vocab_size * (2 + 4 + 4 + 4 + 1)
    assert logits < estimate() < 1.1 * logits
    assert estimate(max_model_len=131_072) - estimate(max_model_len=8192) < 64 << 20, "block tables of longer contexts"
    q = 64 * 4 * LLAMA_8B.vocab_size * 4
    assert q < estimate(dense) - estimate() < q + tables
    assert q // 5 < estimate(part) - estimate() < q // 4 + tables
    passages = Buckets.of(64, 12, 4)  # longer than what the model drafts
    assert q < estimate(dense, buckets=passages) - estimate(buckets=passages) < q + tables
    given = (2048 - 64) * LLAMA_8B.hidden_size * 2
    assert given < estimate(max_batched_tokens=2048) - estimate() < given + tables, "in the place of the logits"
    activations = (3 * LLAMA_8B.intermediate_size + 8 * LLAMA_8B.hidden_size) * 2 * 2048
    assert activations + given < estimate(max_batched_tokens=2048, buckets=few) < activations + given + 2 * tables
    assert estimate(max_batched_tokens=100_000) == estimate(max_batched_tokens=2048)


@pytest.mark.parametrize(
    ("card_gib", "model", "weights_gib", "has_head"),
    [
        (24, LLAMA_8B, 14.96, False),
        (24, LLAMA_8B, 8.5, False),  # in FP8
        (24, LLAMA_8B, 15.8, True),
        (16, LLAMA_8B, 8.5, False),
        (48, LLAMA_8B, 14.96, False),
        (80, QWEN_32B, 61.0, False),
        (141, QWEN_32B, 62.0, True),
    ],
)
def test_a_card_holds_as_many_tokens_beside_a_model_as_with_vllm(
    card_gib: int, model: ModelConfig, weights_gib: float, has_head: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the sizes of `truespec serve --gpus 1`. vLLM's are estimated: nine tenths of a card, less 1.3 GiB."""
    card, weights, head = int(0.98 * card_gib * GIB), int(weights_gib * GIB), None
    token_bytes = model.kv_shape.num_values * 2
    if has_head:
        shape = KVShape(1, model.num_kv_heads, model.head_dim)
        head = SimpleNamespace(ids=torch.arange(32_000), num_features=3 * model.hidden_size, kv_shape=shape)
        token_bytes += shape.num_values * 2
    made_up_card(monkeypatch, card - OF_CUDA - weights, card, weights)
    drafts = DrafterConfig(kind="ngram", num_draft_tokens=4)
    config = EngineConfig(dtype="bfloat16", drafter=drafts, max_model_len=32_768, **sizes_on_a_gpu(card))
    decoder: Any = SimpleNamespace(config=model, dtype=torch.bfloat16, device=torch.device("cuda"))
    of_vllm = (0.9 * card - weights - 1.3 * GIB) / token_bytes
    tokens = cache_tokens(config, decoder, head)
    assert of_vllm < tokens < 1.5 * of_vllm


def test_memory_that_another_process_still_gives_back_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda s: setattr(clock, "now", clock.now + s)
    monkeypatch.undo()
    monkeypatch.setattr("speculative.gpu.memory.time", clock)
    caplog.set_level("INFO", logger="truespec.engine")
    cases: list[tuple[Callable[[float], float], float, float, float]] = [
        (lambda s: 64.5, 1, 64.5, 0),  # nobody else has any
        (lambda s: min(64.5, 34.5 + max(0, 6 * (s - 2))), 1, 64.5, 7),
        (lambda s: 34.5 + 10 * (s > 6), 1, 34.5, 3),  # too late: until then it was somebody who stays
        (lambda s: 44.5 - s, 1, 41.5, 3),  # somebody else starts
        (lambda s: 34.5 + s / 10, 1, 40.5, 60),
        (lambda s: 34.5, 0.5, 24.25, 0),  # its part of the card is free
    ]
    for number, (free_gib, share, found_gib, waited_s) in enumerate(cases):
        clock.now = 0.0
        caplog.clear()
        made_up_card(monkeypatch, lambda free_gib=free_gib: int(free_gib(clock.now) * GIB), CARD, WEIGHTS)
        free, _ = free_bytes(torch.device("cuda"), share)
        assert (free / GIB, clock.now) == (found_gib, waited_s), number
        assert caplog.text.count("waiting until none has given any back") == (waited_s > 0), number


def bytes_of_an_engine(share: float, others: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """All that one takes of a card of which others have taken so much by the time it measures what is free."""
    decoder: Any = SimpleNamespace(config=LLAMA_8B, dtype=torch.bfloat16, device=torch.device("cuda"))
    made_up_card(monkeypatch, CARD - others - OF_CUDA - WEIGHTS, CARD, WEIGHTS)
    config = EngineConfig(
        dtype="bfloat16", gpu_share=share, max_model_len=8192, max_num_seqs=64, max_batched_tokens=320
    )
    tokens, steps = cache_tokens(config, decoder, None), step_bytes(config, decoder, None)
    return OF_CUDA + WEIGHTS + steps + tokens * LLAMA_8B.kv_shape.num_values * 2


@pytest.mark.parametrize("parts", [(0.5, 0.5), (0.4, 0.6), (0.6, 0.4)], ids=str)
def test_engines_on_parts_of_a_card_leave_each_other_theirs(
    parts: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One measures before the other has begun, has its cache, or is done; and they use what they have."""
    begun = OF_CUDA + WEIGHTS
    first, second = (bytes_of_an_engine(part, begun, monkeypatch) for part in parts)
    assert bytes_of_an_engine(parts[0], 0, monkeypatch) == first
    assert bytes_of_an_engine(parts[1], first, monkeypatch) == second
    for part, taken in zip(parts, (first, second), strict=True):
        assert 0.85 * part < taken / CARD < part
    assert bytes_of_an_engine(1, begun, monkeypatch) + bytes_of_an_engine(1, begun, monkeypatch) > CARD
    with pytest.raises(ConfigError, match=r"the GPU has .* nothing is left for the KV cache"):
        bytes_of_an_engine(1, bytes_of_an_engine(1, 0, monkeypatch), monkeypatch)
    with pytest.raises(ConfigError, match=r"the engine's 0\.2 of the GPU has 0.* GiB free beside the weights"):
        bytes_of_an_engine(0.2, begun, monkeypatch)
