"""SmolLM2-135M in float32: speculation, batching and transformers agree token for token, near-ties excepted.

Equality with transformers' greedy generate is shown by induction: at every position of prompt + output, one forward
pass of transformers names the next token.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from speculative.assembly import Assembly
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.model.catalogue import fetch_model
from speculative.model.config import ModelConfig
from speculative.model.loading import load_decoder
from speculative.request import FinishReason, Request, SamplingParams
from tests.support.engines import Answer, answer_all, naive_logits
from tests.support.near_ties import NEAR_TIE, assert_same_up_to_near_tie

PROMPTS = json.loads((Path(__file__).parents[1] / "data" / "prompts.json").read_text(encoding="utf-8"))
NAMES = [prompt["name"] for prompt in PROMPTS]
CONFIG = EngineConfig(
    dtype="float32",
    device="cpu",
    max_num_seqs=24,
    max_batched_tokens=512,
    kv_cache_tokens=24 * 1024,
    prefix_caching=False,  # every run computes everything itself
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


class RealModel:
    """One set of weights, served by engines of any settings, and the same checkpoint in transformers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = ModelConfig.from_folder(folder)
        self.decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.prompts = {
            prompt["name"]: tuple(tokenizer.encode(prompt["text"], add_special_tokens=False)) for prompt in PROMPTS
        }

    @cached_property
    def reference(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32)  # type: ignore[no-any-return]

    def engine(self, *, drafts: bool) -> EngineCore:
        drafter = DrafterConfig(kind="ngram" if drafts else "none")
        return EngineCore(Assembly(self.decoder, self.config, replace(CONFIG, drafter=drafter)))

    @torch.inference_mode()
    def reference_logits(self, token_ids: Sequence[int]) -> Tensor:
        """[L, V] of transformers."""
        logits: Tensor = self.reference(torch.tensor([list(token_ids)])).logits[0].float()
        return logits

    def logits_after(self, name: str) -> Callable[[Sequence[int]], Tensor]:
        return lambda output: self.reference_logits((*self.prompts[name], *output))[-1]


@pytest.fixture(scope="module")
def model() -> RealModel:
    return RealModel(fetch_model("smollm2-135m"))


NUM_TOKENS = 48


@pytest.fixture(scope="module")
def texts(model: RealModel) -> dict[str, dict[str, Answer]]:
    """Batched without and with speculation, and every third prompt with speculation one by one."""
    params = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=0)
    wanted = [Request(name, model.prompts[name], params) for name in NAMES]
    singly: dict[str, Answer] = {}
    engine = model.engine(drafts=True)
    for one in wanted[::3]:
        singly |= answer_all(engine, [one])
    plain, speculative = (answer_all(model.engine(drafts=drafts), wanted, max_steps=20_000) for drafts in (False, True))
    return {"plain": plain, "speculative": speculative, "singly": singly}


def test_greedy_text_with_speculation_is_the_one_without(model: RealModel, texts: dict[str, dict[str, Answer]]) -> None:
    for name in NAMES:
        ours, plain = texts["speculative"][name], texts["plain"][name]
        parting = assert_same_up_to_near_tie(ours.token_ids, plain.token_ids, model.logits_after(name))
        assert ours.values[:parting] == pytest.approx(plain.values[:parting], abs=1e-4)
    assert sum(answer.num_accepted for answer in texts["speculative"].values()) > len(NAMES)
    assert sum(answer.num_drafted for answer in texts["plain"].values()) == 0


def test_batched_text_is_the_one_alone(model: RealModel, texts: dict[str, dict[str, Answer]]) -> None:
    assert len(texts["singly"]) >= 8
    for name, alone in texts["singly"].items():
        batched = texts["speculative"][name]
        parting = assert_same_up_to_near_tie(batched.token_ids, alone.token_ids, model.logits_after(name))
        assert batched.values[:parting] == pytest.approx(alone.values[:parting], abs=1e-4)


def test_every_token_and_logprob_is_that_of_transformers(model: RealModel, texts: dict[str, dict[str, Answer]]) -> None:
    for name in NAMES:
        answer, prompt = texts["speculative"][name], model.prompts[name]
        logits = model.reference_logits((*prompt, *answer.token_ids))[len(prompt) - 1 : -1]
        emitted = torch.tensor(answer.token_ids)[:, None]
        behind = logits.amax(-1) - logits.gather(1, emitted)[:, 0]  # nats behind the best token
        assert behind.max() < NEAR_TIE, f"{name}: {behind.max():.2e} nats at position {int(behind.argmax())}"
        expected = logits.log_softmax(-1).gather(1, emitted)[:, 0]
        assert answer.values == pytest.approx(expected.tolist(), abs=1e-4), name
        stopped = answer.token_ids[-1] in model.config.eos_token_ids
        assert answer.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
        assert stopped or len(answer.token_ids) == NUM_TOKENS
        assert not set(answer.token_ids[:-1]) & set(model.config.eos_token_ids)


@torch.inference_mode()
def test_fp8_weights_move_the_logprobs_no_further_than_fp8_rounds(model: RealModel) -> None:
    """TME is the mean of exp|difference|: 1.38 on these prompts, which a model of this size hardly foresees."""
    rounded = load_decoder(model.folder, dtype=torch.bfloat16, device="cpu", weights="fp8")
    apart = []
    for name in ("chat: a fact", "code: JSON", "German"):
        ids = torch.tensor([model.prompts[name]])
        values = [naive_logits(one, ids)[0, :-1].log_softmax(-1) for one in (rounded, model.decoder)]
        ours, plain = (one.gather(1, ids[0, 1:, None]) for one in values)
        apart.append((ours - plain).abs().exp().flatten())
    assert 1.05 < torch.cat(apart).mean() < 1.6
