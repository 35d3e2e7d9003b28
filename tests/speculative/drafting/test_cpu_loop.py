"""All drafts of a round in one call of the CPU kernels: the same drafts and distributions as one by one, to the bit."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from speculative.config import DrafterConfig
from speculative.drafting.base import DraftOutput
from speculative.drafting.neural_drafter import MadeDrafts, ModelDrafter
from speculative.engine import EngineCore
from speculative.kernels.library import cpu_kernels
from speculative.request import Request, SamplingParams
from speculative.sampling.draft_probs import Drawn
from speculative.state.batch import Batch, Entry
from tests.support.engines import Answer, answer_all, texts, tiny_engine
from tests.support.tiny_heads import write_tiny_head

NUM_DRAFTS = 4

pytestmark = pytest.mark.skipif(cpu_kernels() is None, reason="there are no CPU kernels here")


@pytest.fixture(scope="module")
def head(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head") / "head"
    ids = torch.arange(3, 51, 2)
    return write_tiny_head(folder, target, draft_ids=ids, dtype=torch.bfloat16, own_embedding=True)


def make_engine(target: Path, head: Path, **changes: object) -> EngineCore:
    drafter = DrafterConfig.of(kind="eagle3", model=str(head), num_draft_tokens=NUM_DRAFTS, **changes)
    return tiny_engine(target, drafter=drafter, dtype="bfloat16", quantization="bfloat16")


class Recorder:
    """Keeps what a drafter proposed, and how often its loop made the drafts."""

    def __init__(self, engine: EngineCore, *, fused: bool) -> None:
        assert isinstance(engine.drafter, ModelDrafter)
        self.proposed: list[tuple[list[int], list[int], torch.Tensor]] = []
        self.num_made = 0
        self._propose, self._loop = engine.drafter.propose, engine.drafter.draft_loop
        engine.drafter.propose = self.propose  # type: ignore[method-assign]
        engine.drafter.draft_loop = self.make if fused else None

    def make(self, entries: Sequence[Entry], hidden: torch.Tensor) -> MadeDrafts | None:
        assert self._loop is not None
        made = self._loop(entries, hidden)
        self.num_made += made is not None
        return made

    def propose(self, batch: Batch) -> DraftOutput:
        out = self._propose(batch)
        if len(out.token_ids):
            assert isinstance(out.draft_probs, Drawn)
            self.proposed.append((out.counts.tolist(), out.token_ids.tolist(), out.draft_probs.probs.clone()))
        return out


def answers(engine: EngineCore, params: Sequence[SamplingParams]) -> dict[str, Answer]:
    prompts = [tuple(3 + (7 * index * j) % 41 for j in range(1 + 5 * index)) for index in range(len(params))]
    pairs = enumerate(zip(prompts, params, strict=True))
    return answer_all(engine, [Request(str(index), prompt, own, seed=index) for index, (prompt, own) in pairs])


KINDS = {
    "warm": SamplingParams(ignore_eos=True),
    "greedy": SamplingParams(ignore_eos=True, temperature=0),
    "cold": SamplingParams(ignore_eos=True, temperature=0.3),
    "nucleus": SamplingParams(ignore_eos=True, temperature=1.4, top_p=0.6),
    "few": SamplingParams(ignore_eos=True, top_k=5),
    "likely": SamplingParams(ignore_eos=True, temperature=2.0, min_p=0.2),
}


@pytest.mark.parametrize("kinds", [*([kind] for kind in KINDS), list(KINDS)], ids="+".join)
def test_one_call_drafts_what_many_draft(target: Path, head: Path, kinds: list[str]) -> None:
    # Different lengths: near their ends, requests of one round get 4, 3, 2, 1 and no drafts.
    params = [dataclasses.replace(KINDS[kind], max_tokens=20 + i) for i, kind in enumerate(kinds)]
    recorded, said = [], []
    for fused in (True, False):
        engine = make_engine(target, head)
        recorder = Recorder(engine, fused=fused)
        said.append(texts(answers(engine, params)))
        assert (recorder.num_made > 0) == fused
        recorded.append(recorder.proposed)
    assert said[0] == said[1]
    assert len(recorded[0]) == len(recorded[1]) > 5
    assert any(1 in counts for counts, _, _ in recorded[0])
    for ours, theirs in zip(*recorded, strict=True):
        assert ours[:2] == theirs[:2]
        assert torch.equal(ours[2], theirs[2])


def test_coupled_drafts_are_chosen_one_by_one(target: Path, head: Path) -> None:
    engine = make_engine(target, head)
    recorder = Recorder(engine, fused=True)
    answers(engine, [SamplingParams(ignore_eos=True, reproducible=True, max_tokens=12)])
    assert recorder.proposed and recorder.num_made == 0
    greedy = make_engine(target, head, sampled=False).drafter
    assert isinstance(greedy, ModelDrafter) and greedy.draft_loop is None
