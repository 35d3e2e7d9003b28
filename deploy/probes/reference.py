"""The same weights, computed independently of the server: `transformers` on the CPU, float32, one sequence at a time.

It shares no code with any server, ours included, except that our `adjust` and `process` apply a request's parameters to
the logits.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deploy.exchange.dialect import AuditFailed
from serve_app.referee.transformers_model import TransformersModel
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError
from speculative.request import SURPRISAL_CLIP_NATS, SamplingParams
from speculative.sampling.logits_processors import adjust
from speculative.sampling.probs import SamplingRows, process
from speculative.selfcheck.eprocess import Floats
from speculative.state.batch import RowContext
from speculative.state.logit_constraints import rules_of

_COPY_LEAST = 2  # tokens that must have occurred before for their continuation to count as a draft


class AnswerDistribution:
    """The reference's figures for the n tokens of one answer; every array is [n], in nats or probabilities.

    raw, processed: log-probability of the token under the model's distribution, and under the request's. p, mean_p: its
    probability and the mean of that. surprisal, mean_surprisal: clipped at SURPRISAL_CLIP_NATS. gap: distance
    below the most likely token; outside: distance outside the filters, inf = a rule forbids it; both before the
    temperature. below, own: mass of more likely tokens, and its own. margin: between the two most likely. copied,
    p_copied: whether it is what followed the latest tokens before, and the probability of that; p < 0 if there is no
    such token. best, p_best: the same for the most likely token.
    """

    def __init__(self, logits: Tensor, adjusted: Tensor, params: SamplingParams, tokens: Sequence[int], start: int):
        served = torch.tensor(tokens[start:])[:, None]
        rows = SamplingRows.build([params] * len(logits), logits.shape[1], logits.device)
        scaled, kept = adjusted / rows.temperature, process(adjusted, rows)
        raw, processed = logits.log_softmax(-1), kept.log_softmax(-1)
        probs = processed.exp()
        self.raw, self.processed = _array(raw.gather(1, served)[:, 0]), _array(processed.gather(1, served)[:, 0])
        own = scaled.gather(1, served)[:, 0]
        self._judge(params, kept, own, probs, processed, served)
        ranked = kept.topk(2).values
        self.margin = _array(ranked[:, 0] - ranked[:, 1])
        likelier = torch.where(probs > probs.gather(1, served), probs, 0.0)
        self.below, self.own = _array(likelier.sum(-1)), _array(probs.gather(1, served)[:, 0])
        self.best, self.p_best = _array(probs.argmax(-1) == served[:, 0]), _array(probs.amax(-1))
        copies = [_copy_of(tokens, place) for place in range(start, len(tokens))]
        self.copied = np.array([copy == token for copy, token in zip(copies, tokens[start:], strict=True)], float)
        there = torch.tensor([max(copy, 0) for copy in copies])[:, None]
        self.p_copied = np.where(np.array(copies) >= 0, _array(probs.gather(1, there)[:, 0]), -1.0)

    def _judge(
        self, params: SamplingParams, kept: Tensor, own: Tensor, probs: Tensor, processed: Tensor, served: Tensor
    ) -> None:
        inside = kept.gather(1, served)[:, 0] > -torch.inf
        edge = torch.where(kept > -torch.inf, kept, torch.inf).amin(-1)
        logprob = own - kept.logsumexp(-1)
        surprisals = (-processed).clamp(max=SURPRISAL_CLIP_NATS)
        self.p, self.mean_p = _array(logprob.exp()), _array(probs.square().sum(-1))
        self.surprisal = _array((-logprob).clamp(max=SURPRISAL_CLIP_NATS))
        self.mean_surprisal = _array((probs * surprisals).sum(-1))
        temperature = 1.0 if params.greedy else params.temperature
        self.gap = temperature * _array(kept.amax(-1) - own)
        self.outside = temperature * _array(torch.where(inside, 0.0, edge - own))

    def __len__(self) -> int:
        return len(self.raw)


class Reference(TransformersModel):
    """A model folder's distribution. Loads on construction.

    Raises:
        AuditFailed: transformers cannot load a model from the folder.
    """

    def __init__(self, folder: Path) -> None:
        try:
            super().__init__(folder)
        except ConfigError as error:
            raise AuditFailed(f"there is nothing to compare with: {error}") from error
        self.tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None

    @torch.inference_mode()
    def distribution(self, prompt: Sequence[int], emitted: Sequence[int], params: SamplingParams) -> AnswerDistribution:
        """The model's distribution for an answer, under the request's parameters."""
        tokens, start = [*prompt, *emitted], len(prompt)
        logits = self.logits(tokens, start)
        rules = rules_of(params, prompt)
        contexts = [RowContext(rules, (), tuple(emitted[:offset])) for offset in range(len(emitted))]
        adjusted = adjust(logits, contexts, self.eos_token_ids)
        return AnswerDistribution(logits, adjusted, params, tokens, start)

    @torch.inference_mode()
    def scores(self, tokens: Sequence[int]) -> Floats:
        """Log-probability of every token but the first, [len(tokens) - 1] nats."""
        found = []
        for start in range(1, len(tokens), 128):
            piece = tokens[: start + 128]
            rows = self.logits(piece, start).log_softmax(-1)
            found.append(_array(rows.gather(1, torch.tensor(list(piece[start:]))[:, None])[:, 0]))
        return np.concatenate(found)


def _array(values: Tensor) -> Floats:
    found: Floats = values.double().numpy()
    return found


def _copy_of(tokens: Sequence[int], place: int) -> int:
    """What followed the latest tokens before `place` the last time they occurred; -1 where they never did."""
    latest = tuple(tokens[place - _COPY_LEAST : place])
    for end in range(place - 1, _COPY_LEAST - 1, -1):
        if tuple(tokens[end - _COPY_LEAST : end]) == latest:
            return tokens[end]
    return -1
