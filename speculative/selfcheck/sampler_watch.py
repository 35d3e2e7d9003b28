"""The self-checks of another engine's sampler: of its p and q, and of what it emitted.

That engine is vLLM, in whose worker this runs, around two functions of its 0.32; nothing changes of what they return:

- `Sampler.sample` samples one token a request: each token of a step without drafts, and the bonus token of a round.
  p is computed here from the logits and parameters that it is given, so what vLLM does to them in between is checked.
- `rejection_sample` judges drafts and draws what replaces them. There p is what vLLM made of the logits for it:
  temperature, top-k and top-p of drafts are not checked here, but by replays.

Greedy requests draw nothing: their tokens must be the likeliest. Requests whose seed was there before, or was chosen by
their client, are left out of the terms, and tokens that vLLM throws away."""

import inspect
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from speculative.sampling.draft_probs import DraftProbs, Drawn, PointMass
from speculative.sampling.verification import VerifyInput, VerifyOutput
from speculative.sampling.verify_rows import VerifyRows
from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.terms import TermScope, take_terms
from speculative.state.batch import Terms

_MOST_TERMS = 8192  # that are kept until somebody asks
_MOST_SEEDS = 65536  # that are remembered

Filter = Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
"""Logits [B, V], top_k and top_p [B] to the logits that they leave; may write over what it is given."""


class SamplingMetadata(Protocol):
    """The part that is read of vLLM's class of that name."""

    all_greedy: bool
    temperature: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    generators: dict[int, torch.Generator]
    logitsprocs: Any


@dataclass(frozen=True, slots=True)
class _Step:
    """A step that is checked: of each request, whether it is greedy, and whether its terms count."""

    greedy: list[bool]
    counted: list[bool]


class SamplerWatch:
    """Checks what vLLM samples, and adds up the terms.

    Args:
        share: of the steps that are checked.
        sampled: whether vLLM's drafter samples its drafts; then a step without q has lost it.
        owners: the ids of the requests in the step, in vLLM's order; None for one that does not count.
    """

    def __init__(self, share: float, *, sampled: bool, owners: Callable[[], Sequence[str | None]]) -> None:
        self._clock = SelfCheck(share)
        self._sampled = sampled
        self._owners = owners
        self._first_owners: OrderedDict[int, str] = OrderedDict()  # of each seed
        self._step: _Step | None = None
        self._kept: deque[Terms] = deque(maxlen=_MOST_TERMS)
        self._violations: Counter[str] = Counter()
        self._excess = 0.0

    def around_sample(self, sample: Callable[..., Any], filtered: Filter) -> Callable[..., Any]:
        """vLLM's `Sampler.sample`, watched; it is the first in every step."""

        def watched(logits: Tensor, sampling: SamplingMetadata, *args: Any, **kwargs: Any) -> Any:
            step = self._step = self._begin(sampling)
            if step is None:
                return sample(logits, sampling, *args, **kwargs)
            greedy, counted = (_where(rows, logits.device) for rows in (step.greedy, step.counted))
            scores = logits[greedy]  # a copy: vLLM writes over its tensors
            probs = _distribution(logits, sampling, filtered)[counted] if any(step.counted) else None
            output = sample(logits, sampling, *args, **kwargs)
            token_ids = output[0].long()
            self._count("greedy", _unlikely(scores, token_ids[greedy]))
            if probs is not None:
                emitted, none = token_ids[counted, None], [0] * len(counted)
                no_drafts = token_ids.new_empty(0)
                self._kept.append(round_terms(probs, PointMass(), no_drafts, none, emitted, [True] * len(counted)))
            return output

        return watched

    def around_rejection(self, rejection_sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """vLLM's `rejection_sample`, watched."""
        signature = inspect.signature(rejection_sample)

        def watched(*args: Any, **kwargs: Any) -> Tensor:
            given = signature.bind(*args, **kwargs).arguments
            if self._lost_q(given):
                self._violations["q_missing"] += 1
            elif self._step is not None:
                return self._check(self._step, given, lambda: rejection_sample(*args, **kwargs))
            return rejection_sample(*args, **kwargs)

        return watched

    def take(self) -> list[Terms]:
        """The terms of the steps since the last call."""
        taken, self._kept = list(self._kept), deque(maxlen=_MOST_TERMS)
        return taken

    def take_violations(self) -> dict[str, int]:
        """Broken invariants since the last call, by kind.

        `q_missing` counts steps whose drafts were sampled, and came to the sampler without q: no term is theirs.
        `greedy` and `draw` count tokens: one that is not a greedy request's likeliest, and a bonus token that is not
        the one that was drawn.
        """
        taken, self._violations = dict(self._violations), Counter()
        return taken

    def take_excess(self) -> float:
        """Return how many more drafts the checked steps should have accepted since the last call, by vLLM's own p and
        q, than they did."""
        taken, self._excess = self._excess, 0.0
        return taken

    def _begin(self, sampling: SamplingMetadata) -> _Step | None:
        """Return what is checked of a step; None if nothing is. Who had a seed first is noted in every step."""
        owners = self._owners()
        first = [
            owner is not None and self._is_first(sampling.generators.get(row), owner)
            for row, owner in enumerate(owners)
        ]
        if not self._clock.due():
            return None
        if sampling.all_greedy or sampling.temperature is None:
            return _Step([True] * len(first), [False] * len(first))
        greedy = (sampling.temperature[: len(first)] == 0).tolist()
        return _Step(greedy, [fresh and not same for fresh, same in zip(first, greedy, strict=True)])

    def _is_first(self, generator: torch.Generator | None, request_id: str) -> bool:
        """Return whether nobody had this request's seed before it: the same random numbers would count twice."""
        if generator is None:
            return True
        owner = self._first_owners.setdefault(generator.initial_seed(), request_id)
        self._first_owners.move_to_end(generator.initial_seed())
        if len(self._first_owners) > _MOST_SEEDS:
            self._first_owners.popitem(last=False)
        return owner == request_id

    def _lost_q(self, given: dict[str, Any]) -> bool:
        """Return whether a request that samples has sampled drafts, and nobody knows from what.

        A step that vLLM did not draft for, since a request was too near its longest length, has token 0 as every draft.
        Where all requests of a step are greedy vLLM drafts greedily, without q; these have to be the same in the next.
        """
        sampling = given["sampling_metadata"]
        if not self._sampled or given["draft_probs"] is not None or sampling.temperature is None:
            return False
        counts = torch.tensor(given["num_draft_tokens"])
        drawn = sampling.temperature[: len(counts)].cpu() > 0
        return bool((drawn & (counts > 0)).any() and (given["draft_token_ids"] > 0).any())

    def _check(self, step: _Step, given: dict[str, Any], rejection_sample: Callable[[], Tensor]) -> Tensor:
        """Check a step with drafts; what was emitted."""
        logits, draft_ids, draft_probs = given["target_logits"], given["draft_token_ids"].long(), given["draft_probs"]
        counts, device = np.array(given["num_draft_tokens"]), logits.device
        owners = np.arange(len(counts)).repeat(counts)  # [D]
        of_greedy = np.array(step.greedy)[owners]
        greedy, drawn = _where(of_greedy, device), _where(~of_greedy, device)
        scores = logits[greedy]  # copies: vLLM may write over its tensors
        probs = logits[drawn].softmax(dim=-1, dtype=torch.float32)
        q = PointMass() if draft_probs is None else Drawn(draft_probs[drawn].float())
        emitted = rejection_sample()
        tokens = emitted.long()
        tokens = torch.where(tokens < logits.shape[1], tokens, -1)  # what is no token is thrown away by vLLM too
        num_accepted = (tokens >= 0).sum(dim=-1) - 1  # [B]
        after = torch.from_numpy(counts).to(device)
        bonus = tokens.gather(1, after[:, None])
        self._count("draw", (num_accepted == after) & (bonus != given["bonus_token_ids"])[:, 0])
        places = np.arange(len(owners)) - (counts.cumsum() - counts)[owners]
        at_drafts = tokens[torch.from_numpy(owners).to(device), torch.from_numpy(places).to(device)]  # [D]
        reached = at_drafts[greedy] >= 0
        self._count("greedy", reached & _unlikely(scores, at_drafts[greedy].clamp(min=0)))
        rows = [row for row, count in enumerate(counts) if count and not step.greedy[row]]
        accepted = num_accepted.tolist()
        of_drawn = sum(accepted[row] for row in rows)
        terms = Terms((), np.empty((0, 0)), 0.0)
        if rows:
            own = [step.counted[row] for row in rows]
            terms = round_terms(probs, q, draft_ids[drawn], counts[rows].tolist(), tokens[rows], own)
            self._excess += terms.achievable - of_drawn
        of_greedy_rows = sum(accepted[row] for row, count in enumerate(counts) if count and step.greedy[row])
        self._kept.append(replace(terms, achievable=terms.achievable + of_greedy_rows))
        return emitted

    def _count(self, kind: str, broken: Tensor) -> None:
        number = int(broken.sum())
        if number:
            self._violations[kind] += number


def _where(rows: Any, device: torch.device) -> Tensor:
    """The indices of what holds, [n] int64."""
    return torch.from_numpy(np.flatnonzero(rows)).to(device)


def _unlikely(scores: Tensor, token_ids: Tensor) -> Tensor:
    """[N] bool: whether tokens [N] are not the likeliest of scores [N, V]. Equal scores are equally likely."""
    if len(scores) == 0:
        return token_ids.new_zeros(0, dtype=torch.bool)
    return ~(scores.gather(1, token_ids[:, None])[:, 0] >= scores.amax(dim=-1))


def _distribution(logits: Tensor, sampling: SamplingMetadata, filtered: Filter) -> Tensor:
    """[B, V] what the parameters make of logits; meaningless for greedy requests."""
    assert sampling.temperature is not None  # else all are greedy
    scaled = logits.float() / torch.where(sampling.temperature == 0, 1.0, sampling.temperature)[:, None]
    for processor in sampling.logitsprocs.argmax_invariant:
        scaled = processor.apply(scaled)
    return filtered(scaled, sampling.top_k, sampling.top_p).softmax(dim=-1)


def round_terms(
    distribution: Tensor,
    draft_probs: DraftProbs,
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    emitted: Tensor,
    counted: list[bool],
) -> Terms:
    """The terms of one step: of requests that all have drafts, or of those that have none.

    Args:
        distribution: [D, V] p at every draft; or, if there is none, [B, V] at every request.
        draft_probs: q there.
        draft_token_ids: [D].
        num_draft_tokens: per request, B of them; their sum is D.
        emitted: [B, most + 1] the tokens of each request; -1 behind the last.
        counted: per request, whether its terms count.
    """
    device, num_drafts = distribution.device, len(draft_token_ids)
    counts = np.array(num_draft_tokens)
    owners = np.arange(len(counts)).repeat(counts + 1)  # [R]
    offsets = np.concatenate([np.arange(count + 1) for count in counts])
    nothing = [0] * len(counts)  # vLLM's random numbers are not known, and no term reads them
    judges = offsets < counts[owners]
    known = VerifyRows.build((owners, offsets), counts, nothing, nothing, np.where(judges, 0, -1)).on_device(device)
    judged, entries, packed = known["drafts"] >= 0, known["entries"], known["packed"]
    probs, drafts = distribution, known["drafts"]
    if num_drafts:
        probs = distribution.new_full((len(entries), distribution.shape[1]), torch.nan)
        probs[judged] = distribution  # what follows the last draft is sampled elsewhere
        drafts = torch.where(judged, draft_token_ids[packed.clamp(max=num_drafts - 1)], -1)
    num_accepted = (emitted >= 0).sum(dim=-1) - 1
    step = VerifyInput(probs=probs, draft_probs=draft_probs, **{**known, "drafts": drafts})
    last = emitted.gather(1, num_accepted.clamp(min=0)[:, None])[:, 0]
    verified = VerifyOutput(num_accepted, last, probs.new_zeros(len(counts), dtype=torch.float64))
    scope = TermScope(torch.tensor(counted, device=device))
    at_rows = torch.where(known["offsets"] < num_accepted[entries], drafts, last[entries]).clamp(min=0)
    return take_terms(step, verified, at_rows, scope).to_host()
