"""Training of heads: what is trained on is what serving does, and training makes a head better."""

import json
import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoConfig

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head, load_eagle3
from speculative.model.head_checkpoint import read_held_out_rates
from speculative.model.loading import load_decoder
from speculative.request import Request, SamplingParams
from tests.support.engines import NO_DRAFTS, run, settings
from tests.support.tiny_models import write_tiny_model
from tools.train_head.batches import PlainAttention, make_batch
from tools.train_head.conversations import Conversations, write_answers
from tools.train_head.head import draft_vocabulary, initial_head, save_head
from tools.train_head.loop import Trainer, TrainingConfig
from tools.train_head.loss import acceptance, losses, step_weights, summary
from tools.train_head.unrolling import drafted_hidden

VOCAB = 64
NUM_STEPS = 3
LAYERS = (0, 2, 3)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose distribution is sharp enough to be guessed."""
    return write_tiny_model(tmp_path_factory.mktemp("target"), vocab_size=VOCAB, num_hidden_layers=4)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Decoder:
    return load_decoder(target_folder, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def conversations(target_folder: Path) -> Conversations:
    """Answers of the target to random prompts, in turn at T = 0, 1, 0.7 and 1."""
    generator = np.random.default_rng(0)
    prompts = [tuple(generator.integers(3, VOCAB, 3 + index % 4).tolist()) for index in range(64)]
    config = settings(drafter=NO_DRAFTS, max_num_seqs=16, max_batched_tokens=128, kv_cache_tokens=2048)
    return Conversations.pack(write_answers(EngineCore.load(target_folder, config), prompts, max_tokens=40))


@pytest.fixture
def head(target: Decoder) -> Eagle3Head:
    """Away from its start, so that every part of it matters."""
    head = initial_head(target, draft_vocabulary(np.arange(VOCAB), 48))
    assert head.aux_layers == LAYERS
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return head


class GrowingCache:
    """The naive attention of one sequence: every row attends to all rows before it and itself."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, *_: object) -> Tensor:
        del layer
        assert len(query) == 1
        self.keys += key
        self.values += value
        repeat = query.shape[1] // key.shape[1]
        keys, values = (torch.stack(rows).repeat_interleave(repeat, 1) for rows in (self.keys, self.values))
        weights = (torch.einsum("hd,lhd->hl", query[0], keys) / query.shape[2] ** 0.5).softmax(-1)
        return torch.einsum("hl,lhd->hd", weights, values)[None]

    def truncate(self, length: int) -> None:
        del self.keys[length:], self.values[length:]


def naive_drafting(
    head: Eagle3Head, tokens: Tensor, inputs: Tensor, first_row: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Draft as serving does, row after row: (step, position of the drafted token, logits), true tokens accepted."""
    cache = GrowingCache()
    for row in range(len(tokens) - 2):
        cache.truncate(row)  # true features overwrite what was drafted
        hidden = head.fuse(inputs[row : row + 1])
        for step in range(NUM_STEPS):
            if row + 2 + step >= len(tokens) or (step and row < first_row):
                break
            hidden = head(tokens[row + 1 + step][None], hidden, torch.tensor([row + step]), cache)
            if row >= first_row:
                yield step, row + 2 + step, head.logits(hidden)[0]


@torch.inference_mode()
def test_training_sees_what_drafting_gives(head: Eagle3Head, target: Decoder, conversations: Conversations) -> None:
    """And the features and distributions are the target's."""
    which = [3, 11, 6]
    batch = make_batch(target, head, conversations, which)
    trained = functional.linear(drafted_hidden(head, batch, NUM_STEPS), head.lm_head.weight)
    first_target, seen = 0, 0
    for index in which:
        start = int(conversations.starts[index])
        length, prompt = int(conversations.lengths[index]), int(conversations.prompt_lengths[index])
        tokens = torch.from_numpy(conversations.token_ids[start : start + length]).long()
        hidden, features = target.run(tokens, torch.arange(length), PlainAttention([length]), LAYERS)
        log_p = target.logits(hidden[prompt:-1]).log_softmax(-1)[:, head.draft_ids]
        torch.testing.assert_close(batch.log_p[first_target : first_target + len(log_p)], log_p, atol=1e-4, rtol=1e-4)
        for step, position, logits in naive_drafting(head, tokens, features, prompt - 1):
            column = first_target + position - 1 - prompt
            assert batch.next_ids[column] == tokens[position]
            assert batch.depths[column] >= step
            assert batch.temperatures[column] == conversations.temperatures[index]
            torch.testing.assert_close(trained[step, column], logits, atol=2e-5, rtol=2e-5)
            seen += 1
        first_target += length - 1 - prompt
    assert first_target == len(batch.depths)
    weights = step_weights(batch.depths, NUM_STEPS, 0.8)
    assert seen == int((weights > 0).sum()), "every draft that counts was compared, and no other counts"


def test_the_objective_goes_from_kl_to_the_probability_of_rejection() -> None:
    """Over the drafted tokens, which have not all of p."""
    p, q = torch.tensor([[0.5, 0.25]]), torch.tensor([[0.4, 0.6]])
    kl = 2 / 3 * math.log(2 / 3 / 0.4) + 1 / 3 * math.log(1 / 3 / 0.6)
    for mix, expected in ((0.0, kl), (0.6, 0.4 * kl + 0.6 * 0.35), (1.0, 0.35)):
        assert losses(p.log(), q.log(), mix).tolist() == pytest.approx([expected])
    assert acceptance(p.log(), q.log()).tolist() == pytest.approx([0.65])


def test_means_are_over_drafts_that_were_made_at_their_temperature() -> None:
    accepted = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.5, 0.6, 0.7, 0.8]])
    hit = torch.tensor([[True, False, True, True], [True, True, False, True]])
    depths, temperatures = torch.tensor([0, 1, 0, 1]), torch.tensor([0.0, 0.0, 1.0, 1.0])
    found = summary(accepted, hit, depths, temperatures)
    assert found.sampled == pytest.approx((0.35, 0.8)) and found.greedy == (0.5, 1.0)


def make_trainer(
    target: Decoder, data: Conversations, folder: Path, start: Eagle3Head | None = None, **changes: object
) -> Trainer:
    defaults = {"steps": 60, "tokens_per_step": 320, "held_out": 12, "low_precision": False, "warmup_steps": 5}
    config = TrainingConfig(**{**defaults, "learning_rate": 3e-3, **changes})  # type: ignore[arg-type]
    draft_ids = draft_vocabulary(data.answer_counts(VOCAB), 56)
    return Trainer(start or initial_head(target, draft_ids), target, data, config, folder)


def test_training_improves_acceptance(
    target: Decoder, target_folder: Path, conversations: Conversations, tmp_path: Path
) -> None:
    """Held out, as the saved head measures it, and as the engine counts it."""
    trainer = make_trainer(target, conversations, tmp_path)
    assert not set(trainer.train_ids) & set(trainer.held_out_ids)
    save_head(trainer.head, tmp_path / "start")
    last = trainer.run()
    before, after = trainer.curve[0].held_out, last.held_out
    assert (last.step, trainer.best) == (60, last)
    for position in range(NUM_STEPS):
        assert after.sampled[position] > before.sampled[position] + 0.05
    report = json.loads((tmp_path / "report.json").read_text())
    assert [point["step"] for point in report["curve"]] == [0, 60]
    assert report["best"] == report["curve"][-1]
    assert read_held_out_rates(tmp_path / "head") == tuple(
        pytest.approx(rates, abs=1e-3) for rates in (after.sampled, after.greedy)
    )
    loaded = load_eagle3(tmp_path / "head", target, dtype=torch.float32)
    assert make_trainer(target, conversations, tmp_path, loaded).evaluate().sampled == pytest.approx(
        after.sampled, abs=0.01
    )

    def accepted(head: str) -> float:
        drafter = DrafterConfig(kind="eagle3", model=str(tmp_path / head), num_draft_tokens=NUM_STEPS)
        engine = EngineCore.load(target_folder, settings(drafter=drafter))
        for seed in range(8):
            engine.add(Request(str(seed), (5 + seed, 9), SamplingParams(max_tokens=40, ignore_eos=True), seed=seed))
        answers = run(engine).values()
        return sum(len(answer.token_ids) for answer in answers) / sum(len(answer.round_sizes) for answer in answers)

    assert accepted("head") > accepted("start") + 0.1


def test_the_best_head_is_kept_when_a_training_makes_it_worse_or_diverges(
    target: Decoder, conversations: Conversations, tmp_path: Path
) -> None:
    make_trainer(target, conversations, tmp_path, steps=20).run()
    good = (tmp_path / "head" / "model.safetensors").read_bytes()
    start = load_eagle3(tmp_path / "head", target, dtype=torch.float32)
    worse = make_trainer(target, conversations, tmp_path / "worse", start, steps=8, learning_rate=0.5)
    assert worse.run().held_out.sampled[0] < worse.best.held_out.sampled[0] - 0.01
    assert worse.best.step == 0 and (tmp_path / "worse" / "head" / "model.safetensors").read_bytes() == good
    start = load_eagle3(tmp_path / "head", target, dtype=torch.float32)
    wild = make_trainer(target, conversations, tmp_path / "wild", start, steps=8, learning_rate=1e30)
    with pytest.raises(ConfigError, match=r"diverged: its loss is nan .* lower learning"):
        wild.run()
    assert (tmp_path / "wild" / "head" / "model.safetensors").read_bytes() == good


def test_low_precision_learns_too(target: Decoder, conversations: Conversations, tmp_path: Path) -> None:
    trainer = make_trainer(target, conversations, tmp_path, steps=20, low_precision=True)
    assert trainer.run().held_out.sampled[0] > trainer.curve[0].held_out.sampled[0] + 0.03


def test_the_schedule_begins_with_kl_and_ends_with_acceptance() -> None:
    config = TrainingConfig(steps=100, minutes=10.0)
    assert [config.mix(share) for share in (0, 0.5, 0.75, 1)] == pytest.approx([0, 0, 0.45, 0.9])
    assert config.progress(50, 0) == 0.5
    assert config.progress(10, 570) == 0.95, "whichever end is nearer"
    rates = [config.rate(step, step / 100) for step in (0, 49, 60, 99)]
    assert rates[0] < rates[1] > rates[2] > rates[3] > 0


def test_the_files_are_what_vllm_reads(head: Eagle3Head, target: Decoder, tmp_path: Path) -> None:
    save_head(head, tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)  # vLLM reads it so
    assert config.architectures == ["LlamaForCausalLMEagle3"]
    assert (config.num_hidden_layers, config.vocab_size, config.draft_vocab_size) == (1, VOCAB, 48)
    assert config.rope_parameters["rope_theta"] == 10000.0
    assert config.eagle_config["eagle_aux_hidden_state_layer_ids"] == list(LAYERS)
    loaded = load_eagle3(tmp_path, target, dtype=torch.float32)
    assert loaded.config == head.config and torch.equal(loaded.draft_ids, head.draft_ids)
    for (name, ours), (_, theirs) in zip(head.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(ours.bfloat16().float(), theirs), name


def test_the_draft_vocabulary_holds_the_commonest_tokens() -> None:
    counts = np.array([0, 5, 9, 1, 7])
    assert draft_vocabulary(counts, 3).tolist() == [1, 2, 4]
    assert draft_vocabulary(counts, 3, always=(0,)).tolist() == [0, 2, 4]
    assert draft_vocabulary(counts, 99).tolist() == [0, 1, 2, 3, 4]
