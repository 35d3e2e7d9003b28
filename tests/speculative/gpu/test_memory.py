"""What captured steps may take of a GPU's memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from speculative.config import EngineConfig
from speculative.errors import ConfigError
from speculative.gpu.buckets import Buckets
from speculative.gpu.memory import graph_bytes, tokens_that_fit
from speculative.gpu.paged_attention import AttentionSizes
from speculative.gpu.prompt_graph import prompt_sizes
from speculative.model.config import ModelConfig
from speculative.model.rotary import Rope

LLAMA_8B = ModelConfig("LlamaForCausalLM", 128_256, 4096, 14336, 32, 32, 8, 128, 1e-5, Rope.plain(5e5, 128), 131_072)
BUCKETS = Buckets.of(64, 4)
NUM_ROWS = 64 * 5
MATRIX = NUM_ROWS * LLAMA_8B.vocab_size * 4  # in float32


def estimate(draft_model: Any = None, max_model_len: int = 8192, max_batched_tokens: int = 64) -> int:
    decoder: Any = SimpleNamespace(config=LLAMA_8B, dtype=torch.bfloat16)
    sizes = AttentionSizes(16, 5, max_model_len // 16)
    return graph_bytes(decoder, BUCKETS, sizes, draft_model, prompt_sizes(max_batched_tokens))


def test_steps_need_the_logits_in_two_types_and_q() -> None:
    dense, part = (SimpleNamespace(ids=ids, num_features=0) for ids in (None, torch.arange(32_000)))
    attention = AttentionSizes(16, 5, 512).workspace_bytes(NUM_ROWS, 32, 128)
    assert estimate(max_model_len=131_072) - estimate(max_model_len=8192) < 64 << 20, "block tables of longer contexts"
    assert 2.5 * MATRIX < estimate() - attention < 3.5 * MATRIX, "activations included"
    q = 64 * 4 * LLAMA_8B.vocab_size * 4
    assert q < estimate(dense) - estimate() < 4 * q
    assert q // 4 < estimate(part) - estimate() < q


def test_prompts_need_the_activations_of_the_largest_captured_pass_and_room_for_what_it_gives() -> None:
    more = estimate(max_batched_tokens=2048) - estimate()
    activations = (3 * LLAMA_8B.intermediate_size + 8 * LLAMA_8B.hidden_size) * 4 * (2048 - NUM_ROWS)
    given = (2048 - 64) * LLAMA_8B.hidden_size * 2
    assert activations + given < more < activations + given + (16 << 20), "block tables"
    assert estimate(max_batched_tokens=100_000) == estimate(max_batched_tokens=2048)


GIB = 2**30
CARD, WEIGHTS, OF_CUDA = 80 * GIB, 15 * GIB, GIB // 2


def bytes_of_an_engine(share: float, others: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """All that one takes of a card of which others have taken so much by the time it measures what is free."""
    decoder: Any = SimpleNamespace(config=LLAMA_8B, dtype=torch.bfloat16, device=torch.device("cuda"))
    for name, found in (("empty_cache", None), ("memory_reserved", WEIGHTS)):
        monkeypatch.setattr(torch.cuda, name, lambda *_, found=found: found)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (CARD - others - OF_CUDA - WEIGHTS, CARD))
    sizes = {"max_model_len": 8192, "max_num_seqs": 64, "max_batched_tokens": 320}
    tokens = tokens_that_fit(EngineConfig(dtype="bfloat16", gpu_share=share, **sizes), decoder, None)
    steps = estimate(max_batched_tokens=320)
    return OF_CUDA + WEIGHTS + steps + tokens * LLAMA_8B.kv_shape.num_values * 2


@pytest.mark.parametrize("parts", [(0.5, 0.5), (0.4, 0.6), (0.6, 0.4)], ids=str)
def test_engines_on_parts_of_a_card_leave_each_other_theirs(
    parts: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether one measures before the other has begun, has its cache, or is done; and they use what they have."""
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
