"""The terms of the self-checks, taken of another engine's rejection sampler: of its p and q, and of what it emitted.

That engine is vLLM, in whose worker this runs, around the function `rejection_sample` of
`vllm/v1/sample/rejection_sampler.py` (0.32); nothing changes of what that returns. What is drawn after a run of
accepted drafts is another function's work, which shows nobody its distribution: those tokens take no part. Nor do
greedy requests, whose terms are 0, and requests whose seed was there before."""

import inspect
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from speculative.selfcheck.monitor import SelfCheck
from speculative.selfcheck.terms import Scope, take_terms
from speculative.state.batch import Terms
from speculative.verification.base import VerifyInput, VerifyOutput
from speculative.verification.draft_probs import Dense, DraftProbs, PointMass
from speculative.verification.rows import VerifyRows

_MOST_STEPS = 4096  # that are kept until somebody asks
_MOST_SEEDS = 65536  # that are remembered


class SamplingMetadata(Protocol):
    """What is read of vLLM's class of that name."""

    all_greedy: bool
    temperature: Tensor | None
    generators: dict[int, torch.Generator]


class SamplerWatch:
    """Adds up the terms of vLLM's sampler.

    Args:
        share: of the steps whose terms are taken.
        sampled: whether vLLM's drafter samples its drafts; then a step without q has lost it.
        request_ids: of the requests in the step, in vLLM's order.
    """

    def __init__(self, share: float, *, sampled: bool, request_ids: Callable[[], Sequence[str]]) -> None:
        self._clock = SelfCheck(share)
        self._sampled = sampled
        self._num_without_q = 0
        self._request_ids = request_ids
        self._owners: OrderedDict[int, str] = OrderedDict()  # of each seed: who had it first
        self._kept: deque[Terms] = deque(maxlen=_MOST_STEPS)

    def around(self, rejection_sample: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """vLLM's function, and what this sees of it."""

        signature = inspect.signature(rejection_sample)

        def sample(*args: Any, **kwargs: Any) -> Tensor:
            given = signature.bind(*args, **kwargs).arguments
            num_drafts, draft_probs = given["num_draft_tokens"], given["draft_probs"]
            counted = self._counted(given["sampling_metadata"], num_drafts)
            without_q = any(counted) and self._sampled and draft_probs is None
            self._num_without_q += without_q
            if without_q or not any(counted) or not self._clock.due():
                return rejection_sample(*args, **kwargs)
            distribution = given["target_logits"].softmax(
                dim=-1, dtype=torch.float32
            )  # now: vLLM may write over its tensors
            draft_probs = PointMass() if draft_probs is None else Dense(draft_probs.to(torch.float32, copy=True))
            emitted = rejection_sample(*args, **kwargs)
            self._kept.append(
                round_terms(distribution, draft_probs, given["draft_token_ids"], num_drafts, emitted, counted)
            )
            return emitted

        return sample

    def take(self) -> list[Terms]:
        """The terms of the steps since the last call."""
        taken = list(self._kept)
        self._kept.clear()
        return taken

    def take_num_without_q(self) -> int:
        """Steps since the last call whose drafts were sampled, and came to the sampler without q: no term is theirs."""
        taken, self._num_without_q = self._num_without_q, 0
        return taken

    def _counted(self, sampling: SamplingMetadata, num_draft_tokens: list[int]) -> list[bool]:
        """Per request of the step, whether its terms count."""
        if sampling.all_greedy or sampling.temperature is None:
            return [False] * len(num_draft_tokens)
        drawn = (sampling.temperature[: len(num_draft_tokens)] > 0).tolist()
        owners = self._request_ids()
        return [
            bool(count) and drawn[row] and self._is_first(sampling.generators.get(row), owners[row])
            for row, count in enumerate(num_draft_tokens)
        ]

    def _is_first(self, generator: torch.Generator | None, request_id: str) -> bool:
        """Whether nobody had this request's seed before it: the same random numbers would count twice."""
        if generator is None:
            return True
        owner = self._owners.setdefault(generator.initial_seed(), request_id)
        self._owners.move_to_end(generator.initial_seed())
        if len(self._owners) > _MOST_SEEDS:
            self._owners.popitem(last=False)
        return owner == request_id


def round_terms(
    distribution: Tensor,
    draft_probs: DraftProbs,
    draft_token_ids: Tensor,
    num_draft_tokens: list[int],
    emitted: Tensor,
    counted: list[bool],
) -> Terms:
    """The terms of one step.

    Args:
        distribution: [D, V] p at every draft.
        draft_probs: q there.
        draft_token_ids: [D].
        num_draft_tokens: per request, B of them; their sum is D.
        emitted: [B, most + 1] the tokens of each request; -1 behind the last.
        counted: per request, whether its terms count.
    """
    device = distribution.device
    drafting = [row for row, count in enumerate(num_draft_tokens) if count]
    counts = np.array([num_draft_tokens[row] for row in drafting])
    owners = np.arange(len(drafting)).repeat(counts + 1)  # [R]
    offsets = np.concatenate([np.arange(count + 1) for count in counts])
    nothing = [0] * len(drafting)  # vLLM's random numbers are not known, and no term reads them
    without_ids = np.where(offsets < counts[owners], 0, -1)
    known = VerifyRows.build((owners, offsets), counts, nothing, nothing, without_ids).on_device(device)
    judged, entries, packed = known["drafts"] >= 0, known["entries"], known["packed"]
    num_drafts = int(distribution.shape[0])
    probs = distribution.new_full(
        (len(entries), distribution.shape[1]), torch.nan
    )  # nobody knows the distribution behind the last draft
    probs[judged] = distribution
    drafts = torch.where(judged, draft_token_ids.long()[packed.clamp(max=num_drafts - 1)], -1)
    rows = emitted[torch.tensor(drafting, device=device)].long()  # [E, most + 1]
    rows = torch.where(rows < distribution.shape[1], rows, -1)  # a number that is no token is thrown away by vLLM too
    num_accepted = (rows >= 0).sum(dim=-1) - 1
    step = VerifyInput(probs=probs, draft_probs=draft_probs, **{**known, "drafts": drafts})
    last = rows.gather(1, num_accepted.clamp(min=0)[:, None])[:, 0]
    verified = VerifyOutput(num_accepted, last, probs.new_zeros(len(drafting), dtype=torch.float64))
    own = torch.tensor([counted[row] for row in drafting], device=device)
    scope = Scope("token_wise", own)
    at_rows = torch.where(known["offsets"] < num_accepted[entries], drafts, last[entries]).clamp(min=0)
    return take_terms(step, verified, at_rows, scope).to_host()
