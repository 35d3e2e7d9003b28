"""The training loop: steps, checkpoints, held-out acceptance, and a learning curve that is written as it grows."""

import copy
import dataclasses
import json
import math
import os
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from speculative.errors import ConfigError
from speculative.model.head_checkpoint import write_held_out_rates
from speculative.training.acceptance import Acceptance, judge, summary
from speculative.training.features import Features
from speculative.training.heads import DraftHead, LossVocabulary, drafted_ids, lm_weight, save_head
from speculative.training.loss import TargetDistribution, draft_loss, step_weights
from speculative.training.unrolling import TrainingBatch, drafted_hidden, is_trainable, make_batch

STATE, REPORT, HEAD = "state.pt", "report.json", "head"  # what a training run leaves in its folder


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The settings of a training. The end is `steps` or `minutes`, whichever comes first.

    Raises:
        ConfigError: a value is out of range.
    """

    steps: int | None = None
    minutes: float | None = None  # of training, including earlier runs that this one resumes
    tokens_per_step: int = 1024
    num_draft_steps: int = 3
    warm_draft_share: float = 0.3  # of the training, with one draft step only: later ones have nothing to read yet
    decay: float = 0.8  # weight of each draft step over the one before
    learning_rate: float = 1e-3
    warmup_steps: int = 50
    weight_decay: float = 0.01
    kl_share: float = 0.5  # of the training, on KL alone; then the acceptance objective is mixed in
    max_mix: float = 0.9
    averaging: float = 0.998  # of the weights that are saved, over the steps
    held_out: int = 48  # conversations
    report_every_s: float = 300.0
    low_precision: bool = True  # bfloat16 products; weights and distributions stay float32
    seed: int = 0

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise ConfigError("Give the training an end: steps, or minutes.")
        for name in ("tokens_per_step", "num_draft_steps", "held_out"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1.")
        if self.steps is not None and self.steps < 0:
            raise ConfigError(f"steps is {self.steps}; give at least 0, or none where minutes are the end.")
        if self.minutes is not None and not 0 < self.minutes < math.inf:
            raise ConfigError(f"minutes is {self.minutes}; give a number above 0, or none where steps are the end.")
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate is {self.learning_rate}; give a number above 0, such as 1e-3.")
        if not 0 <= self.report_every_s < math.inf:
            raise ConfigError(f"report_every_s is {self.report_every_s}; give a number of seconds, at least 0.")

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the training that is done, from 0 to 1."""
        by_steps = 1.0 if self.steps == 0 else step / self.steps if self.steps else 0.0
        by_time = 0.0 if self.minutes is None else elapsed_s / (60 * self.minutes)
        return min(1.0, max(by_steps, by_time))

    def mix(self, progress: float) -> float:
        """Weight of the acceptance objective."""
        return self.max_mix * max(0.0, progress - self.kl_share) / max(1e-9, 1 - self.kl_share)

    def rate(self, step: int, progress: float) -> float:
        """The learning rate: a short rise, then a cosine down to a twentieth."""
        falling = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps)) * falling


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the learning curve.

    elapsed_s: seconds of the training so far, including resumed runs.
    cpu_s: CPU time of all threads of the process in these.
    """

    step: int
    tokens: int
    elapsed_s: float
    cpu_s: float
    loss: float | None
    held_out: Acceptance


@dataclass(frozen=True, slots=True)
class StepReport:
    """The report of a step: acceptance per draft position on its own batch."""

    step: int
    progress: float
    elapsed_s: float
    tokens: int
    loss: float
    acceptance: tuple[float, ...]


OnStep = Callable[[StepReport], None]
OnPoint = Callable[[Point], None]


class Trainer:
    """Trains one head; every decision depends only on its configuration, the data and the steps done.

    When the end is given in steps, a run that was interrupted and resumed gives the same weights, bit for bit.
    """

    def __init__(
        self,
        head: DraftHead,
        vocabulary: LossVocabulary,
        features: Features,
        config: TrainingConfig,
        folder: Path,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare the training.

        Args:
            head: to train, in float32; the target's embedding, if it uses that, stays frozen.
            vocabulary: what the loss is over.
            features: the target's, of all conversations.
            config: how to train.
            folder: gets checkpoints, head and report.
            provenance: for the report; entries of an earlier run that this one does not set are kept.
        """
        self.head, self.config, self.folder = head.requires_grad_(), config, folder
        self.device = head.embedding.device
        self.provenance = dict(provenance or {})
        self.curve: list[Point] = []
        self._features = features
        dtype = torch.bfloat16 if config.low_precision else torch.float32
        self._loss_ids, self._drafted_ids = vocabulary.ids, drafted_ids(head)
        self._loss_rows, self._drafted_rows = (
            vocabulary.weight[ids].to(self.device, dtype) for ids in (self._loss_ids, self._drafted_ids)
        )
        kept = {} if isinstance(head.embedding, nn.Parameter) else {id(head.embedding): head.embedding}
        self._kept = kept
        self._average = copy.deepcopy(head, kept).requires_grad_(False)
        self._best: DraftHead | None = None  # as the best point found it; None = it is in the folder already
        self._optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay)
        self._train_ids, self._held_out_ids = _split(features, config)
        self._step, self._tokens, self._elapsed_s, self._cpu_s = 0, 0, 0.0, 0.0
        self._loss: float | None = None

    def run(self, on_step: OnStep | None = None, on_point: OnPoint | None = None) -> Point:
        """Train to the end; measure, report and save every `report_every_s`. Returns the last point; the saved head is
        that of `best`.

        Raises:
            ConfigError: the training diverged; what was saved before that is kept.
        """
        started, reported = time.monotonic() - self._elapsed_s, time.monotonic()
        started_cpu_s = time.process_time() - self._cpu_s
        if not self.curve:
            self._report(on_point)
        for step, which in enumerate(_batches(self._features, self._train_ids, self.config)):
            if step < self._step:
                continue  # already done before the resume
            progress = self.config.progress(step, self._elapsed_s)
            if progress >= 1:
                break
            shown = self._train(make_batch(self._features, which, self.device), progress)
            self._elapsed_s, self._cpu_s = time.monotonic() - started, time.process_time() - started_cpu_s
            if on_step is not None:
                on_step(dataclasses.replace(shown, elapsed_s=self._elapsed_s))
            if time.monotonic() - reported >= self.config.report_every_s:
                self._report(on_point)
                self.save()
                reported = time.monotonic()
        if self.curve[-1].step != self._step:
            self._report(on_point)
        self.save()
        return self.curve[-1]

    @property
    def best(self) -> Point:
        """The point with the highest held-out acceptance, averaged over the draft positions; the first of equals.

        The start counts too: if training only makes a head worse, the head stays as it was.
        """
        return max(self.curve, key=lambda point: sum(point.held_out.acceptance))

    def save(self) -> None:
        """Write the head of the best point in the public format, and the state that a later run resumes from.

        An interrupt at any time leaves complete files, of this checkpoint or the previous one.
        """
        if self._best is not None:
            self._save_head(self._best)
        state = {
            "head": self.head.state_dict(),
            "average": self._average.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "loss_ids": self._loss_ids,
            "progress": [self._step, self._tokens, self._elapsed_s, self._cpu_s],
        }
        temporary = self.folder / f".{STATE}"
        torch.save(state, temporary)
        os.replace(temporary, self.folder / STATE)

    def _save_head(self, best: DraftHead) -> None:
        beside, head = self.folder / f".{HEAD}", self.folder / HEAD
        save_head(best, beside)
        held_out = self.best.held_out
        write_held_out_rates(beside, held_out.acceptance, held_out.top1 or ())
        head.mkdir(exist_ok=True)
        for file in beside.iterdir():
            os.replace(file, head / file.name)
        beside.rmdir()

    def resume(self) -> bool:
        """Continue from the folder's checkpoint; False when there is none.

        Raises:
            ConfigError: it is damaged, or from another head or another version of this program.
        """
        path = self.folder / STATE
        if not path.is_file():
            return False
        state = _read_state(path)
        parts = {"head", "average", "optimizer", "loss_ids", "progress"}
        if not parts <= state.keys() or state["head"].keys() != self.head.state_dict().keys():
            raise ConfigError(
                f"{path} is of another kind of head, or of an earlier version; train into another folder."
            )
        if not torch.equal(state["loss_ids"].to(self.device), self._loss_ids):
            raise ConfigError(f"{path} is of a head with another draft vocabulary; train into another folder.")
        self.head.load_state_dict(state["head"])
        self._average.load_state_dict(state["average"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step, self._tokens, self._elapsed_s, self._cpu_s = state["progress"]
        provenance, curve = read_report(self.folder)
        self.curve = [point for point in curve if point.step <= self._step]
        self.provenance = provenance | self.provenance
        return True

    def evaluate(self) -> Acceptance:
        """Acceptance of the averaged head on the held-out conversations."""
        parts = []
        with torch.inference_mode(), self._autocast():
            for which in _grouped(self._features, self._held_out_ids, self.config.tokens_per_step):
                batch = make_batch(self._features, which, self.device)
                hidden = drafted_hidden(self._average, batch, self.config.num_draft_steps)
                distribution, weight = (
                    TargetDistribution.of(batch, self._drafted_rows),
                    lm_weight(self._average, self._drafted_rows),
                )
                parts.append(judge(hidden, weight, distribution, self._drafted_ids, batch))
        return summary(parts)

    def _train(self, batch: TrainingBatch, progress: float) -> StepReport:
        config = self.config
        num_steps = 1 if progress < config.warm_draft_share else config.num_draft_steps
        with self._autocast():
            hidden = drafted_hidden(self.head, batch, num_steps)
        weights = step_weights(batch.depths, num_steps, config.decay)
        distribution, weight = TargetDistribution.of(batch, self._loss_rows), lm_weight(self.head, self._loss_rows)
        loss, acceptance = draft_loss(hidden, weight, distribution, weights, config.mix(progress))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = config.rate(self._step, progress)
        self._optimizer.step()
        self._step += 1
        self._tokens += len(batch.token_ids)
        self._average_weights()
        self._loss = shown = float(loss.detach())
        self._require_finite("loss", shown)
        counted = weights > 0
        means = (acceptance * counted).sum(1) / counted.sum(1).clamp(min=1)
        return StepReport(self._step, progress, self._elapsed_s, self._tokens, shown, tuple(means.tolist()))

    def _average_weights(self) -> None:
        """Exponential moving average over the steps, shorter at the start, so that saved weights are always usable."""
        share = 1 - min(self.config.averaging, self._step / (self._step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.parameters()), list(self.head.parameters()), share)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.low_precision)

    def _require_finite(self, name: str, *values: float) -> None:
        wrong = [value for value in values if not math.isfinite(value)]
        if wrong:
            raise ConfigError(
                f"The training diverged: its {name} is {wrong[0]} at step {self._step}, and nothing of it was saved. "
                f"Give a lower learning rate; {self.folder} holds the last checkpoint before it, if there was one."
            )

    def _report(self, on_point: OnPoint | None) -> None:
        held_out = self.evaluate()
        self._require_finite("held-out acceptance", *held_out.acceptance)
        point = Point(self._step, self._tokens, self._elapsed_s, self._cpu_s, self._loss, held_out)
        self.curve.append(point)
        if self.best is point:
            self._best = copy.deepcopy(self._average, dict(self._kept))
        report = {
            "provenance": self.provenance,
            "config": dataclasses.asdict(self.config),
            "draft_vocab_size": len(self._drafted_ids),
            "loss_vocab_size": len(self._loss_ids),
            "num_parameters": sum(parameter.numel() for parameter in self.head.parameters()),
            "num_conversations": len(self._train_ids),
            "curve": [dataclasses.asdict(point) for point in self.curve],
            "final": dataclasses.asdict(point),
            "best": dataclasses.asdict(self.best),  # whose head is saved
        }
        write_report(self.folder, report)
        if on_point is not None:
            on_point(point)


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write a training report atomically: `provenance`, `curve`, and whatever else it contains."""
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{REPORT}"
    temporary.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    os.replace(temporary, folder / REPORT)


def read_report(folder: Path) -> tuple[dict[str, Any], list[Point]]:
    """Provenance and learning curve of an earlier run.

    Raises:
        ConfigError: the report is missing or damaged.
    """
    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        return dict(report["provenance"]), [_point(entry) for entry in report["curve"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise damaged(folder / REPORT, error) from error


def damaged(path: Path, reason: object) -> ConfigError:
    """The error for an unreadable file in a training folder, with the fix."""
    return ConfigError(
        f"{path} cannot be read ({str(reason).partition(chr(10))[0]}), so this training cannot go on. Delete {STATE} "
        f"and {REPORT} in {path.parent}, and --resume trains again on the same conversations; or give another folder."
    )


def _split(features: Features, config: TrainingConfig) -> tuple[list[int], list[int]]:
    """Conversations to train on, and those held out: evenly spaced, never trained on."""
    conversations = features.conversations
    pairs = zip(conversations.lengths.tolist(), conversations.prompt_lengths.tolist(), strict=True)
    usable = [index for index, pair in enumerate(pairs) if is_trainable(*pair)]
    if len(usable) < 2:
        raise ConfigError(f"Only {len(usable)} conversations have an answer to learn from; give more data.")
    count = min(config.held_out, max(1, len(usable) // 5))
    held_out = [usable[i] for i in np.linspace(0, len(usable) - 1, count).astype(int)]
    return sorted(set(usable) - set(held_out)), held_out


def _batches(features: Features, ids: list[int], config: TrainingConfig) -> Iterator[list[int]]:
    """Endless batches; each epoch has its own order, derived from the seed."""
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


def _read_state(path: Path) -> dict[str, Any]:
    """A checkpoint, in host memory."""
    try:
        return dict(torch.load(path, map_location="cpu", weights_only=True))
    except (RuntimeError, OSError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        raise damaged(path, error) from error
