"""The training loop: steps, held-out acceptance, and a report and a head that are written as it goes."""

import copy
import dataclasses
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from speculative.errors import ConfigError
from speculative.model.decoder import Decoder
from speculative.model.eagle3 import Eagle3Head
from tools.train_head.batches import TrainingBatch, make_batch
from tools.train_head.conversations import Conversations
from tools.train_head.head import save_head
from tools.train_head.loss import Acceptance, acceptance, draft_log_probs, losses, step_weights, summary
from tools.train_head.unrolling import drafted_hidden


@dataclass(frozen=True, slots=True)
class TrainingConfig:
    """The settings of a training. The end is `steps` or `minutes`, whichever comes first."""

    steps: int | None = None
    minutes: float = 60.0
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

    def progress(self, step: int, elapsed_s: float) -> float:
        """Share of the training that is done, from 0 to 1."""
        return min(1.0, max(step / self.steps if self.steps else 0.0, elapsed_s / (60 * self.minutes)))

    def mix(self, progress: float) -> float:
        """Weight of the acceptance objective."""
        return self.max_mix * max(0.0, progress - self.kl_share) / max(1e-9, 1 - self.kl_share)

    def rate(self, step: int, progress: float) -> float:
        """The learning rate: a short rise, then a cosine down to a twentieth."""
        falling = 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * min(1.0, (step + 1) / max(1, self.warmup_steps)) * falling


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the learning curve; `loss` is that of the last step."""

    step: int
    tokens: int
    elapsed_s: float
    loss: float | None
    held_out: Acceptance


class Trainer:
    """Trains one head; every decision depends only on its configuration, the data and the steps done."""

    def __init__(
        self,
        head: Eagle3Head,
        target: Decoder,
        conversations: Conversations,
        config: TrainingConfig,
        folder: Path,
        provenance: Mapping[str, Any] | None = None,
    ) -> None:
        """Prepare to train a head in float32; the target's embedding, if it uses that, stays frozen.

        `folder` gets report.json, with `provenance`, and the head of the best point in `head`.
        """
        self.head, self.config, self.folder = head.requires_grad_(), config, folder
        self.provenance = dict(provenance or {})
        self.curve: list[Point] = []
        self.train_ids, self.held_out_ids = _split(conversations, config)
        self._target, self._conversations = target, conversations
        self._dtype = torch.bfloat16 if config.low_precision else torch.float32
        kept = {} if head.owns_embedding else {id(head.embedding): head.embedding}
        self._average = copy.deepcopy(head, kept).requires_grad_(False)
        self._optimizer = torch.optim.AdamW(head.parameters(), betas=(0.9, 0.95), weight_decay=config.weight_decay)
        self._step, self._tokens, self._elapsed_s = 0, 0, 0.0
        self._loss: float | None = None

    def run(self) -> Point:
        """Train to the end; measure every `report_every_s`. Returns the last point; the saved head is that of `best`.
        Raises ConfigError: the training diverged; what was saved before that is kept."""
        self._report()
        started = reported = time.monotonic()
        for which in _batches(self._conversations, self.train_ids, self.config):
            progress = self.config.progress(self._step, self._elapsed_s)
            if progress >= 1:
                break
            self._train(self._batch(which), progress)
            self._elapsed_s = time.monotonic() - started
            if time.monotonic() - reported >= self.config.report_every_s:
                self._report()
                reported = time.monotonic()
        if self.curve[-1].step != self._step:
            self._report()
        return self.curve[-1]

    @property
    def best(self) -> Point:
        """The point with the highest held-out acceptance, averaged over the draft positions; the first of equals.

        The start counts too: if training only makes a head worse, the head stays as it was.
        """
        return max(self.curve, key=lambda point: sum(point.held_out.sampled))

    @torch.inference_mode()
    def evaluate(self) -> Acceptance:
        """Acceptance of the averaged head on the held-out conversations."""
        accepted, hits, depths, temperatures = [], [], [], []
        weight, draft_ids = self._average.lm_head.weight, self._average.draft_ids
        for which in _grouped(self._conversations, self.held_out_ids, self.config.tokens_per_step):
            batch = self._batch(which)
            with self._autocast():
                drafted = drafted_hidden(self._average, batch, self.config.num_draft_steps)
            log_qs = [draft_log_probs(hidden, weight, self._dtype) for hidden in drafted]
            accepted.append(torch.stack([acceptance(batch.log_p, log_q) for log_q in log_qs]))
            hits.append(torch.stack([draft_ids[log_q.argmax(-1)] == batch.next_ids for log_q in log_qs]))
            depths.append(batch.depths)
            temperatures.append(batch.temperatures)
        return summary(torch.cat(accepted, 1), torch.cat(hits, 1), torch.cat(depths), torch.cat(temperatures))

    def _train(self, batch: TrainingBatch, progress: float) -> None:
        config = self.config
        num_steps = 1 if progress < config.warm_draft_share else config.num_draft_steps
        with self._autocast():
            drafted = drafted_hidden(self.head, batch, num_steps)
        loss = torch.zeros((), device=batch.log_p.device)
        for hidden, weights in zip(drafted, step_weights(batch.depths, num_steps, config.decay), strict=True):
            log_q = draft_log_probs(hidden, self.head.lm_head.weight, self._dtype)
            loss = loss + (weights * losses(batch.log_p, log_q, config.mix(progress))).sum()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for group in self._optimizer.param_groups:
            group["lr"] = config.rate(self._step, progress)
        self._optimizer.step()
        self._step += 1
        self._tokens += len(batch.token_ids)
        self._loss = float(loss.detach())
        if not math.isfinite(self._loss):
            raise ConfigError(
                f"The training diverged: its loss is {self._loss} at step {self._step}. Give a lower learning rate; "
                f"{self.folder} holds the best head before it."
            )
        # A moving average over the steps, shorter at the start, so that saved weights are always usable.
        share = 1 - min(config.averaging, self._step / (self._step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self._average.parameters()), list(self.head.parameters()), share)

    def _batch(self, which: list[int]) -> TrainingBatch:
        return make_batch(self._target, self.head, self._conversations, which)

    def _autocast(self) -> torch.autocast:
        return torch.autocast(self.head.draft_ids.device.type, torch.bfloat16, enabled=self.config.low_precision)

    def _report(self) -> None:
        held_out = self.evaluate()
        point = Point(self._step, self._tokens, self._elapsed_s, self._loss, held_out)
        self.curve.append(point)
        if self.best is point:
            save_head(self._average, self.folder / "head", dataclasses.asdict(held_out))
        report = {
            "provenance": self.provenance,
            "config": dataclasses.asdict(self.config),
            "draft_vocab_size": len(self.head.draft_ids),
            "num_parameters": sum(parameter.numel() for parameter in self.head.parameters()),
            "num_conversations": len(self.train_ids),
            "curve": [dataclasses.asdict(point) for point in self.curve],
            "best": dataclasses.asdict(self.best),  # whose head is saved
        }
        (self.folder / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        click.echo(
            f"step {point.step}, {point.tokens:,} tokens, {point.elapsed_s:.0f} s, loss {point.loss}: {held_out}"
        )


def _split(conversations: Conversations, config: TrainingConfig) -> tuple[list[int], list[int]]:
    """Conversations to train on, and those held out: evenly spaced, never trained on."""
    answers = conversations.lengths - conversations.prompt_lengths
    usable = np.flatnonzero((conversations.prompt_lengths >= 1) & (answers >= 2)).tolist()
    if len(usable) < 2:
        raise ConfigError(f"Only {len(usable)} conversations have an answer to learn from; give more data.")
    count = min(config.held_out, max(1, len(usable) // 5))
    held_out = [usable[i] for i in np.linspace(0, len(usable) - 1, count).astype(int)]
    return sorted(set(usable) - set(held_out)), held_out


def _batches(conversations: Conversations, ids: list[int], config: TrainingConfig) -> Iterator[list[int]]:
    """Endless batches; each epoch has its own order, derived from the seed."""
    epoch = 0
    while True:
        order = np.random.default_rng([config.seed, epoch]).permutation(ids).tolist()
        yield from _grouped(conversations, order, config.tokens_per_step)
        epoch += 1


def _grouped(conversations: Conversations, order: list[int], tokens_per_step: int) -> Iterator[list[int]]:
    group: list[int] = []
    size = 0
    for index in order:
        length = int(conversations.lengths[index])
        if group and size + length > tokens_per_step:
            yield group
            group, size = [], 0
        group.append(index)
        size += length
    yield group
