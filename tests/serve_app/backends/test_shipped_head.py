"""The EAGLE-3 head that comes with the package, on the model it was trained for."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

from serve_app.backends.base import SHIPPED_HEADS
from speculative.assembly import Assembly
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.head_drafters import Eagle3DraftModel
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.model.catalogue import fetch_model
from speculative.model.config import ModelConfig
from speculative.model.loading import load_decoder, resolve_model
from speculative.request import Request, SamplingParams
from tests.support.engines import assert_idle, hand_over, run
from tests.support.near_ties import assert_same_up_to_near_tie
from tools.train_head.batches import PlainAttention

HEAD = "smollm2-135m-eagle3"
LIMIT_BYTES = 25_000_000
FEWEST_ACCEPTED = 0.5  # drafts accepted a round at K = 3; README.md beside the head has what was measured
QUESTIONS = (
    "Why do leaves turn red in autumn?",
    "Give me three tips for a job interview.",
    "Explain what a compiler does to a ten-year-old.",
    "How do I cook rice?",
)
CONFIG = EngineConfig(dtype="float32", device="cpu", max_num_seqs=8, max_batched_tokens=512, kv_cache_tokens=8192)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


class Served:
    """The real model, and engines over the same weights with the head or without."""

    def __init__(self, folder: Path) -> None:
        self.config = ModelConfig.from_folder(folder)
        self.decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        text = json.loads((Path(__file__).parents[2] / "data" / "prompts.json").read_text(encoding="utf-8"))
        self.words: list[int] = self.tokenizer.encode("\n\n".join(one["text"] for one in text) * 3)

    def engine(self, *, drafts: bool = True) -> EngineCore:
        if not drafts:
            return EngineCore(Assembly(Weights(self.decoder), replace(CONFIG, drafter=DrafterConfig(kind="none"))))
        head = Eagle3DraftModel.load(
            resolve_model(HEAD, SHIPPED_HEADS), self.decoder, dtype=torch.float32, device="cpu"
        )
        drafter = DrafterConfig(kind="eagle3", model=HEAD, num_draft_tokens=3)
        return EngineCore(Assembly(Weights(self.decoder, draft_model=head), replace(CONFIG, drafter=drafter)))

    def chat(self, text: str) -> tuple[int, ...]:
        rendered = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
        )
        return tuple(self.tokenizer.encode(rendered, add_special_tokens=False))

    def logits_after(self, prompt: tuple[int, ...], output: Sequence[int]) -> Tensor:
        """[V] float32 after the prompt and these output tokens, of the decoder itself."""
        token_ids = torch.tensor([*prompt, *output])
        with torch.inference_mode():
            hidden, _ = self.decoder.run(token_ids, torch.arange(len(token_ids)), PlainAttention([len(token_ids)]), ())
            return self.decoder.logits(hidden[-1:])[0]


@pytest.fixture(scope="module")
def served() -> Served:
    return Served(fetch_model("smollm2-135m"))


def test_it_is_small_and_says_where_it_comes_from() -> None:
    folder = resolve_model(HEAD, SHIPPED_HEADS)
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT_BYTES
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["provenance"]["model"] == "smollm2-135m"
    card = (folder / "README.md").read_text(encoding="utf-8")
    for rate in report["final"]["held_out"]["acceptance"]:
        assert f"{rate:.3f}" in card  # the card's figures are the report's


def test_the_text_is_that_of_plain_decoding_and_drafts_are_accepted(served: Served) -> None:
    engines = served.engine(drafts=True), served.engine(drafts=False)
    params = SamplingParams(max_tokens=40, temperature=0.0)
    for engine in engines:
        for question in QUESTIONS:
            engine.add(Request(question, served.chat(question), params))
    found, plain = (run(engine) for engine in engines)
    for question in QUESTIONS:
        prompt = served.chat(question)
        assert_same_up_to_near_tie(
            found[question].token_ids,
            plain[question].token_ids,
            lambda output, prompt=prompt: served.logits_after(prompt, output),  # type: ignore[misc]
        )
    stats = engines[0].take_stats()
    assert stats.num_accepted / stats.num_drafts > FEWEST_ACCEPTED


@pytest.mark.parametrize("num_prompt", [50, 600])  # in one chunk, and in two
def test_accepted_length_after_a_handoff_is_the_colocated_one(served: Served, num_prompt: int) -> None:
    """The same accept uniforms meet the same drafts, so the rounds are the same ones, not only as long in the mean."""
    prefill, decode, colocated = (served.engine() for _ in range(3))
    params = SamplingParams(max_tokens=24, temperature=1.0, ignore_eos=True)
    request = Request("one", tuple(served.words[:num_prompt]), params, seed=5)
    colocated.add(request)
    expected = run(colocated)["one"]
    answer = run(decode, hand_over(prefill, decode, [request]))["one"]
    assert (answer.token_ids, answer.round_sizes) == (expected.token_ids, expected.round_sizes)
    assert answer.num_accepted == expected.num_accepted > 0
    assert_idle(prefill)
    assert_idle(decode)
