"""Training of draft heads: what is trained on is what serving does, and training makes it better."""

import dataclasses
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.model.decoder import Decoder
from speculative.model.head_checkpoint import read_held_out_rates
from speculative.model.loading import load_decoder
from speculative.request import Request, SamplingParams
from speculative.training.data import ChatFrame, Conversations, write_answers, write_questions
from speculative.training.features import Features, PlainAttention, compute_features
from speculative.training.heads import (
    DraftHead,
    HeadKind,
    LossVocabulary,
    aux_layers,
    draft_vocabulary,
    drafted_ids,
    initial_head,
    lm_weight,
    load_head,
    save_head,
)
from speculative.training.loop import Point, Trainer, TrainingConfig
from speculative.training.loss import TargetDistribution, draft_loss, step_weights
from speculative.training.unrolling import drafted_hidden, make_batch
from tests.support.engines import NO_DRAFTS, run, settings
from tests.support.tiny_models import write_tiny_model

VOCAB = 64
NUM_STEPS = 3


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
    return write_answers(EngineCore.load(target_folder, config), prompts, max_tokens=40)


@pytest.fixture(scope="module", params=["eagle3", "mtp"])
def kind(request: pytest.FixtureRequest) -> HeadKind:
    return request.param  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def features(
    target: Decoder, conversations: Conversations, kind: HeadKind, tmp_path_factory: pytest.TempPathFactory
) -> Features:
    layers = aux_layers(initial_head(kind, target, torch.arange(48)))
    assert layers == ((0, 2, 3) if kind == "eagle3" else ())
    return compute_features(target, conversations, tmp_path_factory.mktemp("features"), layers)


@pytest.fixture
def head(target: Decoder, kind: HeadKind) -> DraftHead:
    """Away from its start, so that every part of it matters."""
    head = initial_head(kind, target, draft_vocabulary(np.arange(VOCAB), 48))
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

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor, /) -> Tensor:
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
    head: DraftHead, lm_head: Tensor, tokens: Tensor, inputs: Tensor, first_row: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Draft as serving does, row after row: (step, position of the drafted token, logits), true tokens accepted."""
    cache = GrowingCache()
    for row in range(len(tokens) - 2):
        cache.truncate(row)  # true features overwrite what was drafted
        hidden = head.fuse(inputs[row : row + 1])
        for step in range(NUM_STEPS):
            if row + 2 + step >= len(tokens) or (step and row < first_row):
                break
            position = torch.tensor([row + step])
            hidden = head(tokens[row + 1 + step][None], hidden, position, cache)
            if row >= first_row:
                yield step, row + 2 + step, functional.linear(head.norm(hidden), lm_head)[0]


def test_training_sees_what_drafting_gives(head: DraftHead, features: Features, target: Decoder) -> None:
    which = [3, 11, 6]
    batch = make_batch(features, which, torch.device("cpu"))
    lm_head = lm_weight(head, target.lm_head.weight)
    with torch.inference_mode():
        trained = functional.linear(drafted_hidden(head, batch, NUM_STEPS), lm_head)
    first_target, seen = 0, 0
    for index in which:
        start = int(features.conversations.starts[index])
        length, prompt = int(features.conversations.lengths[index]), int(features.conversations.prompt_lengths[index])
        tokens = torch.from_numpy(features.conversations.token_ids[start : start + length]).long()
        inputs = features.inputs[start : start + length].float()
        with torch.inference_mode():
            for step, position, logits in naive_drafting(head, lm_head, tokens, inputs, prompt - 1):
                column = first_target + position - 1 - prompt
                assert batch.next_ids[column] == tokens[position]
                assert batch.depths[column] >= step
                torch.testing.assert_close(trained[step, column], logits, atol=2e-5, rtol=2e-5)
                seen += 1
        first_target += length - 1 - prompt
    assert first_target == len(batch.depths)
    weights = step_weights(batch.depths, NUM_STEPS, 0.8)
    assert seen == int((weights > 0).sum()), "every draft that counts was compared, and no other counts"


def test_features_and_distributions_are_the_targets(target: Decoder, features: Features) -> None:
    conversations = features.conversations
    start, length = int(conversations.starts[5]), int(conversations.lengths[5])
    tokens = torch.from_numpy(conversations.token_ids[start : start + length]).long()
    with torch.inference_mode():
        hidden, aux = target.run(tokens, torch.arange(length), PlainAttention([length]), (0, 2, 3))
        distribution = target.logits(hidden).log_softmax(-1)
    batch = make_batch(features, [5], torch.device("cpu"))
    torch.testing.assert_close(batch.inputs, (hidden if features.aux is None else aux).bfloat16())
    draft_ids = torch.tensor([1, 5, 40])
    of_draft = TargetDistribution.of(batch, target.lm_head.weight[draft_ids]).log_probs(slice(None))
    prompt = int(conversations.prompt_lengths[5])
    torch.testing.assert_close(of_draft, distribution[prompt:-1, draft_ids], atol=0.1, rtol=0)  # kept in bfloat16
    everything = TargetDistribution.of(batch, target.lm_head.weight)
    torch.testing.assert_close(everything.log_probs(slice(None)).logsumexp(-1), torch.zeros(length - 1 - prompt))


def test_the_features_are_computed_once(target: Decoder, features: Features, tmp_path: Path) -> None:
    some = features.conversations.first(4)
    calls: list[tuple[int, int]] = []

    def compute(data: Conversations, key: str = "a") -> Features:
        return compute_features(
            target, data, tmp_path, (0, 2, 3), model_key=key, progress=lambda *done: calls.append(done)
        )

    first = compute(some).aux.clone()
    assert calls == [(4, 4)]
    assert torch.equal(compute(some).aux, first)
    assert len(calls) == 1
    compute(some, key="another model")
    compute(some.first(3), key="another model")
    assert calls == [(4, 4), (4, 4), (3, 3)]
    (tmp_path / "aux.bin").unlink()
    assert torch.equal(compute(some.first(3), key="another model").aux, first[: int(some.lengths[:3].sum())])
    for damage in (b"", b'{"key', b"[]", b"\xff"):
        (tmp_path / "features.json").write_bytes(damage)
        calls.clear()
        compute(some)
        assert calls == [(4, 4)], "a damaged mark marks nothing"


@pytest.mark.parametrize("mix", [0.0, 0.6, 1.0])
def test_the_loss_and_its_gradient_are_the_plain_ones(target: Decoder, features: Features, mix: float) -> None:
    batch = make_batch(features, range(3), torch.device("cpu"))
    draft_ids = draft_vocabulary(np.arange(VOCAB), 40)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, len(batch.depths), 16, generator=generator, requires_grad=True)
    weight = torch.randn(40, 16, generator=generator, requires_grad=True)
    distribution = TargetDistribution.of(batch, target.lm_head.weight[draft_ids])
    weights = step_weights(batch.depths, 2, 0.8)
    loss, acceptance = draft_loss(hidden, weight, distribution, weights, mix)
    (3 * loss).backward()
    ours = hidden.grad, weight.grad
    hidden.grad = weight.grad = None

    p, q = distribution.log_probs(slice(None)).exp(), functional.linear(hidden, weight).softmax(-1)
    renormalised = p / p.sum(-1, keepdim=True)
    kl = (renormalised * (renormalised / q).log()).sum(-1)
    accepted = torch.minimum(p, q).sum(-1)
    plain = (weights * ((1 - mix) * kl + mix * (1 - accepted))).sum()
    (3 * plain).backward()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(acceptance, accepted, atol=1e-5, rtol=1e-5)
    for one, other in zip(ours, (hidden.grad, weight.grad), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def make_trainer(
    kind: HeadKind, target: Decoder, features: Features, folder: Path, start: DraftHead | None = None, **changes: object
) -> Trainer:
    defaults = {"steps": 60, "tokens_per_step": 320, "held_out": 12, "low_precision": False, "warmup_steps": 5}
    config = TrainingConfig(**{**defaults, "learning_rate": 3e-3, **changes})  # type: ignore[arg-type]
    draft_ids = draft_vocabulary(features.conversations.answer_counts(VOCAB), 56)
    head = start or initial_head(kind, target, draft_ids)
    return Trainer(head, LossVocabulary.of(head, target, draft_ids), features, config, folder)


@pytest.fixture(scope="module")
def trained(
    kind: HeadKind, target: Decoder, features: Features, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[Point]]:
    folder = tmp_path_factory.mktemp("trained")
    points: list[Point] = []
    make_trainer(kind, target, features, folder).run(on_point=points.append)
    return folder, points


def test_training_improves_held_out_acceptance(trained: tuple[Path, list[Point]]) -> None:
    folder, points = trained
    before, after = points[0].held_out, points[-1].held_out
    assert points[-1].step == 60
    for position in range(NUM_STEPS):
        assert after.acceptance[position] > before.acceptance[position] + 0.05
    assert after.length_t1 > before.length_t1 + 0.1
    assert after.length_t0 > before.length_t0
    report = json.loads((folder / "report.json").read_text())
    assert [point["step"] for point in report["curve"]] == [0, 60]
    assert report["curve"][-1]["held_out"]["acceptance"] == pytest.approx(after.acceptance)


def test_what_is_trained_is_what_loads(
    trained: tuple[Path, list[Point]], kind: HeadKind, target: Decoder, features: Features, tmp_path: Path
) -> None:
    """The figures of the report are those of the saved head, drafting as serving does."""
    folder, points = trained
    best = max(points, key=lambda point: sum(point.held_out.acceptance)).held_out
    sampled, greedy = read_held_out_rates(folder / "head")
    assert sampled == pytest.approx(best.acceptance, abs=1e-3) and greedy == pytest.approx(best.top1, abs=1e-3)
    head = load_head(kind, folder / "head", target)
    ids, lm_head = drafted_ids(head), lm_weight(head, target.lm_head.weight)
    held_out = make_trainer(kind, target, features, tmp_path)._held_out_ids
    matches: list[list[float]] = [[] for _ in range(NUM_STEPS)]
    distributions: list[list[float]] = [[] for _ in range(NUM_STEPS)]
    for index in held_out:
        start, length = int(features.conversations.starts[index]), int(features.conversations.lengths[index])
        tokens = torch.from_numpy(features.conversations.token_ids[start : start + length]).long()
        prompt, temperature = features.conversations.prompt_lengths[index], features.conversations.temperatures[index]
        with torch.inference_mode():
            hidden = target.run(tokens, torch.arange(length), PlainAttention([length]), ())[0]
            p = target.logits(hidden).softmax(-1)[:, ids]
            inputs = features.inputs[start : start + length].float()
            for step, position, logits in naive_drafting(head, lm_head, tokens, inputs, int(prompt) - 1):
                if temperature == 1:
                    distributions[step].append(float(torch.minimum(p[position - 1], logits.softmax(-1)).sum()))
                elif temperature == 0:
                    matches[step].append(float(ids[logits.argmax()] == tokens[position]))
    reported = points[-1].held_out
    assert [np.mean(one) for one in distributions] == pytest.approx(
        reported.acceptance, abs=0.01
    )  # bfloat16 in the file
    assert [np.mean(one) for one in matches] == pytest.approx(reported.top1, abs=0.03)


def test_a_trained_head_is_accepted_more_often_in_the_engine(
    trained: tuple[Path, list[Point]], kind: HeadKind, target: Decoder, target_folder: Path, tmp_path: Path
) -> None:
    save_head(initial_head(kind, target, torch.arange(VOCAB)), tmp_path / "start")
    rates = []
    for folder in (tmp_path / "start", trained[0] / "head"):
        engine = head_engine(target_folder, kind, folder)
        for seed in range(16):
            prompt = (3 + seed, 50 - seed, 7)
            engine.add(Request(str(seed), prompt, SamplingParams(max_tokens=30, ignore_eos=True), seed=seed))
        run(engine)
        stats = engine.take_stats()
        rates.append(stats.expected_accepted / stats.num_drafted)
    assert rates[1] > rates[0] + 0.03


def test_a_trained_head_drafts_in_the_engine_as_row_by_row(
    trained: tuple[Path, list[Point]], kind: HeadKind, target: Decoder, target_folder: Path
) -> None:
    engine = head_engine(target_folder, kind, trained[0] / "head")
    prompts = [(5, 9, 33), (40, 8, 8, 12), (21,) * 5]
    for index, prompt in enumerate(prompts):
        engine.add(Request(str(index), prompt, SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)))
    head = load_head(kind, trained[0] / "head", target)
    for name, answer in sorted(run(engine).items()):
        prompt = prompts[int(name)]
        expected = naive_rounds(head, target, (*prompt, *answer.token_ids), len(prompt))
        full = len(answer.round_sizes) - 3  # less is drafted near the end
        assert answer.round_sizes[1 : 1 + full] == expected[:full]
        assert max(expected) > 1


def head_engine(target_folder: Path, kind: HeadKind, head: Path) -> EngineCore:
    drafter = DrafterConfig(kind=kind, model=str(head), num_draft_tokens=NUM_STEPS)
    return EngineCore.load(target_folder, settings(drafter=drafter))


@torch.inference_mode()
def naive_rounds(head: DraftHead, target: Decoder, text: tuple[int, ...], pending: int) -> list[int]:
    """Tokens emitted in each round of greedy decoding, from the first whose pending token is at that place on."""
    tokens = torch.tensor(text)
    layers = aux_layers(head) or (target.config.num_layers,)
    inputs = target.run(tokens, torch.arange(len(tokens)), PlainAttention([len(tokens)]), layers)[1]
    lm_head, ids = lm_weight(head, target.lm_head.weight), drafted_ids(head)
    right = {
        (position - 2 - step, step): bool(ids[logits.argmax()] == tokens[position])
        for step, position, logits in naive_drafting(head, lm_head, tokens, inputs, 0)
    }
    rounds = []
    while pending < len(text) - 1:
        accepted = next((step for step in range(NUM_STEPS) if not right.get((pending - 1, step))), NUM_STEPS)
        rounds.append(accepted + 1)
        pending += accepted + 1
    return rounds


def test_training_goes_on_from_a_head(
    trained: tuple[Path, list[Point]], kind: HeadKind, target: Decoder, features: Features, tmp_path: Path
) -> None:
    folder, points = trained
    start = load_head(kind, folder / "head", target)
    trainer = make_trainer(kind, target, features, tmp_path, start, steps=5, learning_rate=3e-4, warm_draft_share=0.0)
    first, last = trainer.evaluate(), trainer.run().held_out
    assert first.acceptance == pytest.approx(points[-1].held_out.acceptance, abs=0.01)  # bfloat16 in the file
    assert last.acceptance == pytest.approx(first.acceptance, abs=0.03)
    assert last.acceptance[0] > points[0].held_out.acceptance[0] + 0.05


def test_a_resumed_training_ends_with_the_same_weights(
    kind: HeadKind, target: Decoder, features: Features, tmp_path: Path
) -> None:
    whole = make_trainer(kind, target, features, tmp_path / "whole", steps=8)
    whole.run()

    def stop(report: object) -> None:
        if report.step == 5:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    broken = make_trainer(kind, target, features, tmp_path / "broken", steps=8, report_every_s=0.0)
    with pytest.raises(KeyboardInterrupt):
        broken.run(on_step=stop)
    resumed = make_trainer(kind, target, features, tmp_path / "broken", steps=8)
    assert not make_trainer(kind, target, features, tmp_path / "none").resume()
    assert resumed.resume()
    assert resumed.run().step == 8
    for (name, one), (_, other) in zip(whole.head.named_parameters(), resumed.head.named_parameters(), strict=True):
        assert torch.equal(one, other), name
    one, other = ((tmp_path / name / "head" / "model.safetensors").read_bytes() for name in ("whole", "broken"))
    assert one == other
    curve = json.loads((tmp_path / "broken" / "report.json").read_text())["curve"]
    assert [point["step"] for point in curve] == [0, 1, 2, 3, 4, 8]
    for name in ("elapsed_s", "cpu_s"):
        reported = [point[name] for point in curve]
        assert reported == sorted(reported) and reported[0] == 0 and reported[-1] > reported[-2], "what came before "
        "it was resumed counts"


def test_the_best_head_is_saved_and_not_the_last(
    kind: HeadKind, target: Decoder, features: Features, tmp_path: Path
) -> None:
    """A training that makes a head worse leaves the better one; also when it was interrupted in between."""
    make_trainer(kind, target, features, tmp_path).run()
    good = (tmp_path / "head" / "model.safetensors").read_bytes()

    def spoil(trainer: Trainer) -> None:
        assert trainer.resume()
        with torch.no_grad():  # all that was learnt is lost
            for parameter in trainer.head.parameters():
                parameter.normal_(generator=torch.Generator().manual_seed(0))
        last = trainer.run()
        assert last.held_out.acceptance[0] < trainer.best.held_out.acceptance[0] - 0.05
        assert (last.step, trainer.best.step) == (trainer.config.steps, 60)
        assert (tmp_path / "head" / "model.safetensors").read_bytes() == good
        report = json.loads((tmp_path / "report.json").read_text())
        assert (report["best"]["step"], report["final"]["step"]) == (60, last.step)

    for steps in (64, 68):
        spoil(make_trainer(kind, target, features, tmp_path, steps=steps, report_every_s=0.0))


def test_a_checkpoint_of_another_head_is_refused(
    kind: HeadKind, target: Decoder, features: Features, tmp_path: Path
) -> None:
    make_trainer(kind, target, features, tmp_path, steps=1).run()
    other_ids = torch.arange(56)
    head = initial_head(kind, target, other_ids)
    other = Trainer(head, LossVocabulary.of(head, target, other_ids), features, TrainingConfig(steps=1), tmp_path)
    with pytest.raises(ConfigError, match="another draft vocabulary"):
        other.resume()
    torch.save({"head": {}}, tmp_path / "state.pt")
    with pytest.raises(ConfigError, match="another kind of head, or of an earlier"):
        other.resume()


def test_a_damaged_checkpoint_is_reported_with_the_way_out(
    kind: HeadKind, target: Decoder, features: Features, tmp_path: Path
) -> None:
    make_trainer(kind, target, features, tmp_path, steps=1).run()
    whole = {name: (tmp_path / name).read_bytes() for name in ("state.pt", "report.json")}
    for name, content in whole.items():
        for damage in (b"", content[: len(content) // 2], b"[1]"):
            (tmp_path / name).write_bytes(damage)
            with pytest.raises(ConfigError, match=rf"{name} cannot be read .* Delete state\.pt and report\.json"):
                make_trainer(kind, target, features, tmp_path).resume()
        (tmp_path / name).write_bytes(content)
    (tmp_path / "report.json").unlink()
    with pytest.raises(ConfigError, match=r"report\.json cannot be read"):
        make_trainer(kind, target, features, tmp_path).resume()


def test_an_interrupted_save_leaves_the_checkpoint_before(
    kind: HeadKind, target: Decoder, features: Features, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(kind, target, features, tmp_path, steps=1)
    trainer.run()
    before = (tmp_path / "head" / "model.safetensors").read_bytes()

    def interrupted(head: DraftHead, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("speculative.training.loop.save_head", interrupted)
        with pytest.raises(KeyboardInterrupt):
            trainer.save()
    assert (tmp_path / "head" / "model.safetensors").read_bytes() == before
    trainer.save()
    assert not (tmp_path / ".head").exists()
    load_head(kind, tmp_path / "head", target)


def test_a_training_that_diverges_keeps_the_last_good_checkpoint(
    kind: HeadKind, target: Decoder, features: Features, tmp_path: Path
) -> None:
    make_trainer(kind, target, features, tmp_path, steps=2).run()
    kept = [tmp_path / name for name in ("state.pt", "report.json", "head/model.safetensors")]
    before = [path.read_bytes() for path in kept]
    for wild in (
        {"steps": 8, "learning_rate": 1e30},  # found in the loss of its second step
        {"steps": 3, "learning_rate": 1e30},  # found where its only step is measured
    ):
        trainer = make_trainer(kind, target, features, tmp_path, **wild)
        assert trainer.resume()
        with pytest.raises(ConfigError, match=r"diverged: its (loss|held-out acceptance) is nan .* lower learning"):
            trainer.run()
        assert [path.read_bytes() for path in kept] == before


def test_low_precision_learns_too(kind: HeadKind, target: Decoder, features: Features, tmp_path: Path) -> None:
    points: list[Point] = []
    make_trainer(kind, target, features, tmp_path, steps=20, low_precision=True).run(on_point=points.append)
    assert points[-1].held_out.acceptance[0] > points[0].held_out.acceptance[0] + 0.03


def test_held_out_conversations_are_never_trained_on(
    kind: HeadKind, target: Decoder, features: Features, tmp_path: Path
) -> None:
    trainer = make_trainer(kind, target, features, tmp_path)
    assert len(trainer._held_out_ids) == 12
    assert not set(trainer._train_ids) & set(trainer._held_out_ids)
    assert len(trainer._train_ids) + 12 <= len(features.conversations)


def test_the_schedule_begins_with_kl_and_ends_with_acceptance() -> None:
    config = TrainingConfig(steps=100, minutes=10.0)
    assert [config.mix(share) for share in (0, 0.5, 0.75, 1)] == pytest.approx([0, 0, 0.45, 0.9])
    assert config.progress(50, 0) == 0.5
    assert config.progress(10, 570) == 0.95, "whichever end is nearer"
    rates = [config.rate(step, step / 100) for step in (0, 49, 60, 99)]
    assert rates[0] < rates[1] > rates[2] > rates[3] > 0
    with pytest.raises(ConfigError, match="steps, or minutes"):
        TrainingConfig()


@pytest.mark.parametrize(
    "setting",
    [
        *({"minutes": value} for value in (0.0, -1.0, math.nan, math.inf)),
        {"steps": -1},
        *({"steps": 1, "learning_rate": value} for value in (0.0, -1e-3, math.nan, math.inf)),
        *({"steps": 1, "report_every_s": value} for value in (-1.0, math.nan)),
    ],
)
def test_a_training_that_would_not_end_or_not_learn_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{list(setting)[-1]} is .*give "):
        TrainingConfig(**setting)


def test_data_is_written_by_the_target_itself(target_folder: Path, tmp_path: Path) -> None:
    engine = EngineCore.load(target_folder, settings(drafter=NO_DRAFTS))
    frame = ChatFrame.between([1, 8, 9, 30, 2, 5, 6], [1, 8, 9, 31, 32, 2, 5, 6])
    assert frame == ChatFrame((1, 8, 9), (2, 5, 6))
    questions = write_questions(engine, frame, 12, max_tokens=60, seed=3)
    assert questions
    for question in questions:
        assert question[:3] == (1, 8, 9) and question[-3:] == (2, 5, 6)
        assert len(question) > 6 and 2 not in question[3:-3]
    assert len(set(questions)) == len(questions)
    written = write_answers(engine, questions[:4], max_tokens=10, seed=9)
    assert written.temperatures.tolist() == pytest.approx([0.0, 1.0, 0.7, 1.0][: len(written)])
    written.save(tmp_path / "some.npz")
    loaded = Conversations.load(tmp_path / "some.npz")
    for field in dataclasses.fields(Conversations):
        assert np.array_equal(getattr(loaded, field.name), getattr(written, field.name))
    for index, question in enumerate(questions[:4]):
        start = int(loaded.starts[index])
        assert tuple(loaded.token_ids[start : start + loaded.prompt_lengths[index]]) == question


def test_damaged_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        Conversations.load(tmp_path / "none.npz")
    np.savez(tmp_path / "part.npz", token_ids=np.zeros(3))
    with pytest.raises(ConfigError, match="lengths"):
        Conversations.load(tmp_path / "part.npz")
    with pytest.raises(ConfigError, match="do not fit"):
        Conversations.pack([(1, 2)], [(3,)], [0.0]).__class__(
            np.zeros(5, np.int32), np.array([3]), np.array([2]), np.zeros(1, np.float32)
        )


def test_damaged_files_of_conversations_are_named(tmp_path: Path) -> None:
    path = tmp_path / "some.npz"
    Conversations.pack([(1, 2)] * 9, [(3,)] * 9, [0.0] * 9).save(path)
    whole = path.read_bytes()
    altered = bytearray(whole)
    altered[90] ^= 0xFF  # within the first array's packed bytes
    for damage in (b"", b"PK", whole[:-30], whole[: len(whole) // 2], bytes(altered)):
        path.write_bytes(damage)
        with pytest.raises(ConfigError, match=r"some\.npz cannot be read"):
            Conversations.load(path)
    with path.open("wb") as file:
        np.save(file, np.arange(4))
    with pytest.raises(ConfigError, match=r"some\.npz cannot be read"):
        Conversations.load(path)


@pytest.mark.parametrize(
    ("change", "reported"),
    [
        ({"token_ids": [1, -2, 3, 4]}, "below 0"),
        ({"token_ids": [1, 2, 3, 2**40]}, "no vector of int32"),
        ({"token_ids": [1, 2, 3, 4.5]}, "no vector of int32"),
        ({"token_ids": [[1, 2], [3, 4]]}, "no vector of int32"),
        ({"lengths": [5, -1]}, "lengths do not fit their token_ids"),
        ({"lengths": [4, 0]}, "lengths do not fit their token_ids"),
        ({"prompt_lengths": [-1, 1]}, "prompt_lengths do not fit"),
        ({"prompt_lengths": [1, 3]}, "prompt_lengths do not fit"),
        ({"temperatures": [0.0]}, "differ in number"),
        ({"temperatures": [[0.0], [0.0]]}, "differ in number"),
    ],
)
def test_conversations_that_cannot_be_are_refused(tmp_path: Path, change: dict[str, object], reported: str) -> None:
    good = {"token_ids": [1, 2, 3, 4], "lengths": [2, 2], "prompt_lengths": [1, 1], "temperatures": [0.0, 1.0]}
    path = tmp_path / "some.npz"
    np.savez(path, **{name: np.array(value) for name, value in good.items()})
    Conversations.load(path).require_fit(vocab_size=5, max_length=2)
    np.savez(path, **{name: np.array(value) for name, value in {**good, **change}.items()})
    with pytest.raises(ConfigError, match=rf"some\.npz.*{reported}"):
        Conversations.load(path)


def test_conversations_beyond_the_model_are_refused() -> None:
    conversations = Conversations.pack([(1, 2), (9,)], [(3,), (4,)], [0.0, 1.0])
    conversations.require_fit(vocab_size=10, max_length=3)
    with pytest.raises(ConfigError, match="token id 9, but the model's vocabulary has 9"):
        conversations.require_fit(vocab_size=9, max_length=3)
    with pytest.raises(ConfigError, match="3 tokens, but the model has 2 positions"):
        conversations.require_fit(vocab_size=10, max_length=2)


def test_an_interrupted_write_leaves_the_conversations_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "some.npz"
    Conversations.pack([(1, 2)], [(3,)], [0.0]).save(path)

    def interrupted(file: Any, **arrays: object) -> None:
        file.write(b"PK")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(np, "savez_compressed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            Conversations.pack([(4, 5)], [(6,)], [0.0]).save(path)
    assert Conversations.load(path).token_ids.tolist() == [1, 2, 3]
