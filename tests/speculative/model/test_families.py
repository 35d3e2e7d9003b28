"""Models whose layers are not all as Llama's, served in every way: each request gets the tokens and logprobs that
`transformers` gives it, whatever drafts, caches, hands over or captures.
"""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from speculative.config import DrafterConfig
from speculative.model.loading import load_decoder
from speculative.request import Request, SamplingParams
from tests.support.engines import NGRAM, NO_DRAFTS, Answer, answer_all, hand_over, run, tiny_engine
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import greedy, write_tiny_model
from tools.train_head.batches import PlainAttention

SHAPES: dict[str, dict[str, object]] = {
    "gemma2": {"num_hidden_layers": 4},
    "gemma3": {"num_hidden_layers": 4},
    "granite": {},
    "granite4": {"position_embedding_type": None, "layer_types": ["full_attention"] * 3},
    "ministral": {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    "mistral": {"sliding_window": 9},
    "olmo2": {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1},
    "olmo3": {"num_hidden_layers": 4},
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    "qwen2": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]},
}
PROMPTS = [tuple(3 + (7 * i * j) % 41 for j in range(n)) for i, n in enumerate((3, 8, 24, 45), start=1)]
NUM_TOKENS = 16
Expected = list[tuple[list[int], list[float]]]
"""Greedy answers to PROMPTS, and their tokens' logprobs."""


@pytest.fixture(scope="module", params=SHAPES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    own = {"num_hidden_layers": 3} | SHAPES[request.param]
    folder = write_tiny_model(tmp_path_factory.mktemp("m") / "model", request.param, vocab_size=64, **own)
    write_tiny_head(folder.parent / "head", folder)
    return folder


@pytest.fixture(scope="module")
def expected(model: Path) -> Expected:
    own = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    return [greedy(own, prompt, NUM_TOKENS) for prompt in PROMPTS]


def requests(*, prefix: str = "r") -> list[Request]:
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=1)
    return [Request(f"{prefix}{index}", prompt, params) for index, prompt in enumerate(PROMPTS)]


def assert_right(answers: dict[str, Answer], expected: Expected, *, prefix: str = "r") -> None:
    for index, (tokens, logprobs) in enumerate(expected):
        answer = answers[f"{prefix}{index}"]
        assert answer.token_ids == tokens
        assert (torch.tensor(answer.values) - torch.tensor(logprobs)).abs().max() < 1e-4


def drafters(model: Path) -> dict[str, DrafterConfig]:
    return {
        "ngram": NGRAM,
        "suffix": DrafterConfig(kind="suffix", num_draft_tokens=3),
        "draft_model": DrafterConfig(kind="draft_model", model=str(model), num_draft_tokens=3),
        "eagle3": DrafterConfig(kind="eagle3", model=str(model.parent / "head"), num_draft_tokens=3),
        "tree": DrafterConfig(kind="eagle3", model=str(model.parent / "head"), num_draft_tokens=2, tree=(2, 2)),
    }


def test_a_head_reads_what_enters_its_layers(model: Path) -> None:
    own, ids = AutoModelForCausalLM.from_pretrained(model, attn_implementation="eager"), torch.tensor(PROMPTS[3])
    decoder, layers = load_decoder(model, dtype=torch.float32, device="cpu"), (0, 1, 2)
    with torch.inference_mode():
        wanted = own(ids[None], output_hidden_states=True).hidden_states[:3]
        _, features = decoder.run(ids, torch.arange(len(ids)), PlainAttention([len(ids)]), layers)
    assert (features - torch.cat([one[0] for one in wanted], dim=-1)).abs().max() < 1e-4


@pytest.mark.parametrize("captured", [False, True], ids=["eager", "captured"])
def test_every_drafter(model: Path, expected: Expected, captured: bool) -> None:
    for name, drafter in drafters(model).items():
        own = {"verifier": "coupled"} if drafter.tree else {"cuda_graphs": captured}  # which draws from no trees
        answers = answer_all(tiny_engine(model, drafter=drafter, **own), requests())
        assert_right(answers, expected)
        if name == "draft_model":
            assert all(answer.num_accepted == answer.num_drafted > 0 for answer in answers.values()), "it is the target"


def test_a_prefix_that_was_computed_before_and_a_handoff(model: Path, expected: Expected) -> None:
    prefill, decode = (tiny_engine(model, drafter=NO_DRAFTS, max_batched_tokens=16) for _ in range(2))
    assert_right(answer_all(prefill, requests()), expected)
    answers = hand_over(prefill, decode, requests(prefix="again"), prefill_only_after=4)
    assert answers["again3"].num_cached_tokens >= 40, "beyond the window"
    assert_right(run(decode, answers), expected, prefix="again")
