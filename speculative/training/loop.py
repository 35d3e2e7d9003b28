"""The training loop: steps, checkpoints, held-out acceptance, and a learning curve that is written as it grows."""

import copy
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from speculative.errors import ConfigError
from speculative.model.eagle3 import Eagle3Head, save_eagle3
from speculative.training.eagle3 import (
    TargetLaw,
    TrainingBatch,
    draft_loss,
    drafted_hidden,
    is_trainable,
    law_slices,
    make_batch,
    step_weights,
)
from speculative.training.features import Features

_STATE = "state.pt"
_REPORT = "report.json"
_HEAD = "head"


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """How to train. The end is `steps` or `minutes`, whichever comes first.

    Raises:
        ConfigError: a value is out of range.
    """

    steps: int | None = None
    minutes: float | None = None  # of training, earlier runs that this one resumes included
    tokens_per_step: int = 1024
    num_draft_steps: int = 3
    warm_draft_share: float = 0.1  # of the training, with one draft step only: later ones have nothing to read yet
    decay: float = 0.8  # weight of each draft step over the one before
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    kl_share: float = 0.5  # of the training, on KL alone; then the acceptance objective is mixed in
    max_mix: float = 0.9
    averaging: float = 0.998  # of the weights that are saved, over the steps
    held_out: int = 48  # conversations
    report_every_s: float = 300.0
    low_precision: bool = True  # bfloat16 products; weights and laws stay float32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ConfigError("Give the training an end: steps, or minutes.")
        for name in ("tokens_per_step", "num_draft_steps", "held_out"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.")

    def progress(self, step: int, elapsed_s: float) -> float:
        """How much of the training is done, from 0 to 1."""
        by_steps = 1.0 if self.steps == 0 else step / self.steps if self.steps else 0.0
        by_time = elapsed_s / (60 * self.minutes) if self.minutes else 0.0
        return min(1.0, max(by_steps, by_time))

    def mix(self, progress: float) -> float:
        """Weight of the acceptance objective."""
        return self.max_mix * max(0.0, progress - self.kl_share) / max(1e-9, 1 - self.kl_share)

    def rate(self, step: int, progress: float) -> float:
        """The learning rate: a short rise, then a cosine down to a twentieth."""
        falling = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps)) * falling


@dataclass(frozen=True, slots=True)
class Acceptance:
    """How a head does on held-out answers; one entry per draft position.

    acceptance: mean of the sum of min(p, q) at T = 1, prefix and earlier drafts true. top1: how often the head's
    likeliest token is the answer's next, on greedy answers. length_t1, length_t0: emitted tokens a round with as many
    drafts, the token after them included; None where the data has no answers at that temperature.
    """

    acceptance: tuple[float, ...]
    top1: tuple[float, ...] | None
    length_t1: float | None
    length_t0: float | None
    num_targets: int


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the learning curve."""

    step: int
    tokens: int
    elapsed_s: float
    loss: float | None
    held_out: Acceptance


@dataclass(frozen=True, slots=True)
class StepReport:
    """What a step tells: acceptance per draft position on its own batch."""

    step: int
    progress: float
    elapsed_s: float
    tokens: int
    loss: float
    acceptance: tuple[float, ...]


OnStep = Callable[[StepReport], None]
OnPoint = Callable[[Point], None]


class Trainer:
    """Trains one head; everything it decides follows from its configuration, the data and the steps done.

    Where the end is given in steps, a run that was interrupted and resumed gives the same weights, bit for bit.
    """

    def __init__(
        self, head: Eagle3Head, law_weight: Tensor, features: Features, config: TrainingConfig, folder: Path
    ) -> None:
        """`law_weight`: see `speculative.training.eagle3.law_weight`. `folder`: for checkpoints, head and report."""
        self.head, self.config, self.folder = head.requires_grad_(), config, folder
        self.device = head.draft_ids.device
        self.curve: list[Point] = []
        self._features = features
        self._dtype = torch.bfloat16 if config.low_precision else torch.float32
        self._law_weight = law_weight.to(self.device, self._dtype)
        self._average = copy.deepcopy(head).requires_grad_(False)
        if not head.owns_embedding:
            self._average.embedding = head.embedding
        self._optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay)
        self._train_ids, self._held_out_ids = _split(features, config)
        self._step, self._tokens, self._elapsed_s = 0, 0, 0.0
        self._loss: float | None = None

    def run(self, on_step: OnStep | None = None, on_point: OnPoint | None = None) -> Point:
        """Train to the end; every `report_every_s` measure, report and save. Returns the last point."""
        started, reported = time.monotonic() - self._elapsed_s, time.monotonic()
        if not self.curve:
            self._report(on_point)
        for step, which in enumerate(_batches(self._features, self._train_ids, self.config)):
            if step < self._step:
                continue  # done before the run was resumed
            progress = self.config.progress(step, self._elapsed_s)
            if progress >= 1:
                break
            told = self._train(make_batch(self._features, which, self.device), progress)
            self._elapsed_s = time.monotonic() - started
            if on_step is not None:
                on_step(dataclasses.replace(told, elapsed_s=self._elapsed_s))
            if time.monotonic() - reported >= self.config.report_every_s:
                self._report(on_point)
                self.save()
                reported = time.monotonic()
        if self.curve[-1].step != self._step:
            self._report(on_point)
        self.save()
        return self.curve[-1]

    def save(self) -> None:
        """Write the averaged head in the public format, and beside it what a later run resumes from."""
        save_eagle3(self._average, self.folder / _HEAD)
        state = {
            "head": self.head.state_dict(),
            "average": self._average.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "draft_ids": self.head.draft_ids,
            "progress": [self._step, self._tokens, self._elapsed_s],
        }
        temporary = self.folder / f".{_STATE}"
        torch.save(state, temporary)
        os.replace(temporary, self.folder / _STATE)

    def resume(self) -> bool:
        """Go on from the folder's checkpoint; False when there is none.

        Raises:
            ConfigError: it is of another head.
        """
        path = self.folder / _STATE
        if not path.is_file():
            return False
        state = torch.load(path, map_location=self.device, weights_only=True)
        if not torch.equal(state["draft_ids"], self.head.draft_ids):
            raise ConfigError(f"{path} is of a head with another draft vocabulary; train into another folder.")
        self.head.load_state_dict(state["head"])
        self._average.load_state_dict(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._tokens, self._elapsed_s = state["progress"]
        report = json.loads((self.folder / _REPORT).read_text(encoding="utf-8"))
        self.curve = [_point(entry) for entry in report["curve"] if entry["step"] <= self._step]
        return True

    def evaluate(self) -> Acceptance:
        """How the averaged head does on the held-out conversations."""
        parts = []
        with torch.inference_mode(), self._autocast():
            for which in _grouped(self._features, self._held_out_ids, self.config.tokens_per_step):
                batch = make_batch(self._features, which, self.device)
                hidden = drafted_hidden(self._average, batch, self.config.num_draft_steps)
                parts.append(_judge(self._average, hidden, self._law(batch), batch))
        return _summary(parts, self.config.num_draft_steps)

    def _train(self, batch: TrainingBatch, progress: float) -> StepReport:
        config = self.config
        num_steps = 1 if progress < config.warm_draft_share else config.num_draft_steps
        with self._autocast():
            hidden = drafted_hidden(self.head, batch, num_steps)
        weights = step_weights(batch.depths, num_steps, config.decay)
        law = self._law(batch)
        loss, acceptance = draft_loss(hidden, self.head.lm_head.weight, law, weights, config.mix(progress))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = config.rate(self._step, progress)
        self._optimizer.step()
        self._step += 1
        self._tokens += len(batch.token_ids)
        self._average_weights()
        self._loss = told = float(loss.detach())
        counted = weights > 0
        means = (acceptance * counted).sum(1) / counted.sum(1).clamp(min=1)
        return StepReport(self._step, progress, self._elapsed_s, self._tokens, told, tuple(means.tolist()))

    def _average_weights(self) -> None:
        """Exponential moving average over the steps, shorter at the start: saved weights are good at any time."""
        share = 1 - min(self.config.averaging, self._step / (self._step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.parameters()), list(self.head.parameters()), share)

    def _law(self, batch: TrainingBatch) -> TargetLaw:
        return TargetLaw.of(batch, self._law_weight)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.low_precision)

    def _report(self, on_point: OnPoint | None) -> None:
        point = Point(self._step, self._tokens, self._elapsed_s, self._loss, self.evaluate())
        self.curve.append(point)
        self.folder.mkdir(parents=True, exist_ok=True)
        report = {
            "config": dataclasses.asdict(self.config),
            "draft_vocab_size": len(self.head.draft_ids),
            "num_parameters": sum(parameter.numel() for parameter in self.head.parameters()),
            "num_conversations": len(self._train_ids),
            "curve": [dataclasses.asdict(point) for point in self.curve],
        }
        _write_whole(self.folder / _REPORT, json.dumps(report, indent=2) + "\n")
        if on_point is not None:
            on_point(point)


@dataclass(frozen=True, slots=True)
class _Judged:
    """Per draft step and target: [J, A] each. ratio: min(1, q/p) of the answer's next token, the chance that it would
    be accepted as a draft (in the mean over drafts); hit: whether it is the head's likeliest token."""

    acceptance: Tensor
    ratio: Tensor
    hit: Tensor
    depths: Tensor  # [A]
    temperatures: Tensor  # [A]


def _judge(head: Eagle3Head, hidden: Tensor, law: TargetLaw, batch: TrainingBatch) -> _Judged:
    num_steps, num_targets = hidden.shape[:2]
    acceptance, ratio, hit = (hidden.new_empty(num_steps, num_targets, dtype=torch.float32) for _ in range(3))
    draft_of = torch.full((head.config.shape.vocab_size,), -1, device=hidden.device)
    draft_of[head.draft_ids] = torch.arange(len(head.draft_ids), device=hidden.device)
    next_drafts = draft_of[batch.next_ids]  # -1: never drafted
    logits = functional.linear(hidden.to(law.logits.dtype), head.lm_head.weight.to(law.logits.dtype))
    for run in law_slices(num_targets, hidden.device):
        log_p, wanted = law.log_probs(run), next_drafts[run, None]
        known = wanted >= 0
        for step in range(num_steps):
            log_q = logits[step, run].float().log_softmax(-1)
            acceptance[step, run] = torch.minimum(log_p, log_q).exp().sum(-1)
            ratios = (log_q - log_p).gather(1, wanted.clamp(min=0)).clamp(max=0).exp()
            ratio[step, run] = torch.where(known, ratios, 0.0).squeeze(1)
            hit[step, run] = (log_q.argmax(-1, keepdim=True) == wanted).float().squeeze(1)
    return _Judged(acceptance, ratio, hit, batch.depths, batch.temperatures)


def _summary(parts: list[_Judged], num_steps: int) -> Acceptance:
    acceptance, ratio, hit = (
        torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("acceptance", "ratio", "hit")
    )
    depths, temperatures = (torch.cat([getattr(part, name) for part in parts]) for name in ("depths", "temperatures"))
    drafted = depths[None, :] >= torch.arange(num_steps, device=depths.device)[:, None]
    greedy, own_law = temperatures == 0, temperatures == 1
    everywhere = torch.ones_like(greedy)
    return Acceptance(
        acceptance=_means(acceptance, drafted, own_law if own_law.any() else everywhere),
        top1=_means(hit, drafted, greedy) if greedy.any() else None,
        length_t1=_length(acceptance, ratio, drafted, own_law) if own_law.any() else None,
        length_t0=_length(hit, hit, drafted, greedy) if greedy.any() else None,
        num_targets=len(depths),
    )


def _means(values: Tensor, drafted: Tensor, where: Tensor) -> tuple[float, ...]:
    counted = drafted & where
    return tuple(((values * counted).sum(1) / counted.sum(1).clamp(min=1)).tolist())


def _length(acceptance: Tensor, ratio: Tensor, drafted: Tensor, where: Tensor) -> float:
    """Mean emitted tokens of a round: 1 + a0 + r0 a1 + r0 r1 a2 + ..., along the row that drafts them.

    The answer's token x was drawn from p, and E over x of min(1, q(x)/p(x)) f(x) is the sum of min(p, q)(x) f(x): the
    ratios stand for having accepted x. Only rounds whose drafts all lie within the answer count.
    """
    num_steps, num_targets = acceptance.shape
    num_rounds = num_targets - num_steps + 1
    if num_rounds < 1:
        return 1.0
    last = num_steps - 1
    whole = drafted[last, last:] & where[last:]  # the round's last draft belongs to the answer of its first
    length, reached = torch.ones(num_rounds, device=where.device), torch.ones(num_rounds, device=where.device)
    for step in range(num_steps):
        aligned = slice(step, step + num_rounds)
        length += reached * acceptance[step, aligned]
        reached = reached * ratio[step, aligned]
    return float(length[whole].mean()) if whole.any() else 1.0


def _split(features: Features, config: TrainingConfig) -> tuple[list[int], list[int]]:
    """Conversations to train on, and those held out: evenly spread, never trained on."""
    conversations = features.conversations
    pairs = zip(conversations.lengths.tolist(), conversations.prompt_lengths.tolist(), strict=True)
    usable = [index for index, pair in enumerate(pairs) if is_trainable(*pair)]
    if len(usable) < 2:
        raise ConfigError(f"Only {len(usable)} conversations have an answer to learn from; give more data.")
    count = min(config.held_out, max(1, len(usable) // 5))
    held_out = [usable[i] for i in np.linspace(0, len(usable) - 1, count).astype(int)]
    return sorted(set(usable) - set(held_out)), held_out


def _batches(features: Features, ids: list[int], config: TrainingConfig) -> Iterator[list[int]]:
    """Batches without end; each epoch in an order of its own that follows from the seed."""
    epoch = 0
    while True:
        order = np.random.default_rng([config.seed, epoch]).permutation(ids).tolist()
        yield from _grouped(features, order, config.tokens_per_step)
        epoch += 1


def _grouped(features: Features, order: list[int], tokens_per_step: int) -> Iterator[list[int]]:
    lengths = features.conversations.lengths
    group: list[int] = []
    size = 0
    for index in order:
        if group and size + lengths[index] > tokens_per_step:
            yield group
            group, size = [], 0
        group.append(index)
        size += int(lengths[index])
    yield group


def _point(entry: dict[str, Any]) -> Point:
    held_out = dict(entry["held_out"])
    for name in ("acceptance", "top1"):
        held_out[name] = None if held_out[name] is None else tuple(held_out[name])
    return Point(**{**entry, "held_out": Acceptance(**held_out)})


def _write_whole(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
