"""What captured steps may take of a GPU's memory."""

from types import SimpleNamespace
from typing import Any

import torch

from speculative.gpu.buckets import Buckets
from speculative.gpu.memory import graph_bytes
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
    assert 1.5 * MATRIX < estimate() - attention < 2.5 * MATRIX, "activations included"
    q = 64 * 4 * LLAMA_8B.vocab_size * 4
    assert q < estimate(dense) - estimate() < 4 * q
    assert q // 4 < estimate(part) - estimate() < q


def test_prompts_need_the_activations_of_the_largest_captured_pass_and_room_for_what_it_gives() -> None:
    more = estimate(max_batched_tokens=2048) - estimate()
    activations = (3 * LLAMA_8B.intermediate_size + 8 * LLAMA_8B.hidden_size) * 4 * (2048 - NUM_ROWS)
    given = (2048 - 64) * LLAMA_8B.hidden_size * 2
    assert activations + given < more < activations + given + (16 << 20), "block tables"
    assert estimate(max_batched_tokens=100_000) == estimate(max_batched_tokens=2048)
