"""Reproducible requests: the text is a function of seed and prompt, whatever is drafted; `test_properties.py` has what
else may happen to them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speculative.drafting.base import Drafter, DraftOutput, NoDrafter
from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from speculative.sampling.draft_probs import Dense, PointMass
from speculative.state.batch import Batch
from tests.support.engines import answer_all, texts, tiny_engine

PROMPTS = [tuple(3 + (7 * i * j) % 41 for j in range(4 + 9 * i)) for i in range(1, 9)]
PARAMS = {
    "plain 0.7": {"temperature": 0.7},
    "plain 1.3": {"temperature": 1.3},
    "filters": {"temperature": 1.3, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.6, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
    "everything": {
        "temperature": 1.3,
        "top_p": 0.95,
        "frequency_penalty": 0.5,
        "logit_bias": ((5, 2.0), (9, -3.0)),
        "min_tokens": 8,
    },
}


class LoopDrafter(Drafter):
    """Another drafter: chooses the token seen two places back, as long a run as it may."""

    def propose(self, batch: Batch) -> DraftOutput:
        return DraftOutput.pack([[e.sequence.tokens[-2]] * e.max_drafts for e in batch.entries], PointMass())


class RandomDrafter(Drafter):
    """Samples its drafts, from a distribution that has nothing to do with the target's."""

    def __init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)

    def propose(self, batch: Batch) -> DraftOutput:
        counts = [e.max_drafts for e in batch.entries]
        q = torch.rand(sum(counts), 64, generator=self.random).softmax(-1)
        drawn = iter(q.multinomial(1, generator=self.random)[:, 0].tolist() if len(q) else [])
        return DraftOutput.pack([[next(drawn) for _ in range(count)] for count in counts], Dense(q))


DRAFTERS: dict[str, Callable[[], Drafter | None]] = {
    "ngram": lambda: None,
    "loop": LoopDrafter,
    "random": RandomDrafter,
    "none": NoDrafter,
}


def make_engine(tiny_folder: Path, drafter: Drafter | None = None, **config: Any) -> EngineCore:
    engine = tiny_engine(tiny_folder, kv_cache_tokens=4096, max_batched_tokens=512, prefix_caching=False, **config)
    if drafter is not None:
        engine.parts.eager.drafter = drafter
    return engine


def requests(**params: object) -> list[Request]:
    settings = SamplingParams(max_tokens=40, reproducible=True, ignore_eos=True, **params)  # type: ignore[arg-type]
    return [Request(f"r{i}", prompt, settings, seed=2**63 + 17 * i) for i, prompt in enumerate(PROMPTS)]


def together(engine: EngineCore, wanted: list[Request]) -> dict[str, list[int]]:
    answers = answer_all(engine, wanted)
    assert {answer.error for answer in answers.values()} == {None}
    return texts(answers)


@pytest.mark.parametrize("params", PARAMS)
def test_same_text_with_every_drafter_and_with_none(tiny_folder: Path, params: str) -> None:
    wanted = requests(**PARAMS[params])
    runs = {name: together(make_engine(tiny_folder, make()), wanted) for name, make in DRAFTERS.items()}
    assert runs["ngram"] == runs["loop"] == runs["random"] == runs["none"]
    assert len({tuple(text) for text in runs["none"].values()}) == len(wanted)


def test_reproducible_requests_beside_others_equal_a_coupled_engine(tiny_folder: Path) -> None:
    wanted = requests(temperature=1.0)
    beside = together(make_engine(tiny_folder, verifier="token_wise"), wanted)
    assert together(make_engine(tiny_folder, verifier="coupled"), wanted) == beside


def test_greedy_requests_are_greedy_in_coupled_mode_too(tiny_folder: Path) -> None:
    greedy = [Request(f"g{i}", p, SamplingParams(max_tokens=30, temperature=0)) for i, p in enumerate(PROMPTS)]
    assert together(make_engine(tiny_folder, verifier="coupled"), greedy) == together(make_engine(tiny_folder), greedy)
