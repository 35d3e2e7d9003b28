"""From logits to the target's distribution p: each request's own temperature and filters, on every verify row.

Nothing here writes to the logits it is given. The distribution is a function of one row's logits and of that request's
parameters alone; neighbours do not enter it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from speculative.request import SamplingParams

_COLDEST = 1e-6  # colder, logits overflow float32; at this temperature a gap of 1e-4 is already certainty
_NUCLEUS_GUESS = 1024  # most nuclei are smaller; sorting a whole vocabulary is the slowest thing a CPU sampler can do


@dataclass(frozen=True, slots=True)
class Filters:
    """The filters of the rows that have one: rows, top_k, top_p [F]; min_p [F] where one of them asks for it."""

    rows: Tensor
    min_p: Tensor | None
    log_min_p: Tensor  # [F] float32 in any case; -inf drops nothing
    top_k: Tensor
    top_p: Tensor

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "Filters | None":
        """`params` holds one entry per verify row; None when no row has a filter."""
        rows = [row for row, p in enumerate(params) if p.filtered]
        if not rows:
            return None
        min_p = torch.tensor([params[row].min_p for row in rows], dtype=torch.float32, device=device)
        top_k = [min(params[row].top_k, vocab_size) or vocab_size for row in rows]
        return cls(
            rows=torch.tensor(rows, device=device),
            min_p=min_p if any(params[row].min_p for row in rows) else None,
            log_min_p=min_p.log(),  # log(0) = -inf
            top_k=torch.tensor(top_k, device=device),
            top_p=torch.tensor([params[row].top_p for row in rows], dtype=torch.float32, device=device),
        )

    def keep(self, logits: Tensor) -> Tensor:
        """Logits [F, V] of the rows with -inf where a token is filtered out."""
        if self.min_p is not None:
            logits = _keep_likely(logits, self.log_min_p)
        return _keep_nucleus(_keep_top_k(logits, self.top_k), self.top_p)


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The parameters of every verify row, on the device."""

    temperature: Tensor  # [R, 1] float32; 1 in greedy rows
    greedy: Tensor  # [R] bool
    any_greedy: bool
    filters: Filters | None  # None when no row has one
    all_warm: bool = False  # every temperature is known to be 1

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "SamplingRows":
        """`params` holds one entry per verify row."""
        greedy = [p.greedy for p in params]
        temperature = list(map(temperature_of, params))
        return cls(
            temperature=torch.tensor(temperature, dtype=torch.float32, device=device)[:, None],
            greedy=torch.tensor(greedy, dtype=torch.bool, device=device),
            any_greedy=any(greedy),
            filters=Filters.build(params, vocab_size, device),
            all_warm=all(value == 1.0 for value in temperature),
        )


def temperature_of(params: SamplingParams) -> float:
    """The divisor of a request's logits; 1 for a greedy one."""
    return 1.0 if params.greedy else max(params.temperature, _COLDEST)


class LastRows:
    """Gives the rows of the last step again where no row's parameters have changed."""

    def __init__(self) -> None:
        self._last: tuple[list[SamplingParams], SamplingRows] | None = None

    def of(self, params: list[SamplingParams], vocab_size: int, device: torch.device) -> SamplingRows:
        """Implement `SamplingRows.build`."""
        if self._last is None or self._last[0] != params:
            self._last = params, SamplingRows.build(params, vocab_size, device)
        return self._last[1]


def _keep_likely(logits: Tensor, log_min_p: Tensor) -> Tensor:
    """Keep the tokens that are at least min_p [F] times as likely as the row's likeliest, which always stays.

    Source: Nguyen et al., "Turning Up the Heat: Min-p Sampling for Creative and Coherent LLM Outputs" (2024).
    """
    floor = logits.amax(dim=-1, keepdim=True) + log_min_p[:, None]
    return logits.masked_fill(logits < floor, -torch.inf)


def _keep_top_k(logits: Tensor, top_k: Tensor) -> Tensor:
    """Keep the top_k [F] largest logits of each row; ties with the last one stay."""
    largest = int(top_k[top_k < logits.shape[-1]].max()) if bool((top_k < logits.shape[-1]).any()) else 0
    if largest == 0:
        return logits
    best = logits.topk(largest, dim=-1).values
    floor = best.gather(1, (top_k.clamp(max=largest) - 1)[:, None])
    floor = torch.where((top_k < logits.shape[-1])[:, None], floor, -torch.inf)
    return logits.masked_fill(logits < floor, -torch.inf)


def _keep_nucleus(logits: Tensor, top_p: Tensor) -> Tensor:
    """Keep the smallest set of likeliest tokens with mass >= top_p [F]; ties with the last one stay.

    Source: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020).
    """
    limited = top_p < 1
    if not bool(limited.any()):
        return logits
    probs = torch.softmax(logits, dim=-1)
    size = min(_NUCLEUS_GUESS, probs.shape[-1])
    best = probs.topk(size, dim=-1).values
    if bool((limited & (best.sum(-1) < top_p)).any()):
        best = probs.sort(dim=-1, descending=True).values
    before = best.cumsum(dim=-1) - best  # mass of the tokens ranked higher
    size_of_nucleus = (before < top_p[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)  # a top_p may round to 0
    floor = best.gather(1, size_of_nucleus - 1)
    floor = torch.where(limited[:, None], floor, 0.0)
    return logits.masked_fill(probs < floor, -torch.inf)


def draw(distribution: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row by inverse CDF.

    Args:
        distribution: [E, V] float32, non-negative, need not be normalised.
        uniform: [E] float64 in (0, 1).

    Returns:
        [E] int64; a token of mass 0 is never drawn. From a row of NaN some token of the vocabulary, to be thrown away.
    """
    cdf = distribution.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    token = torch.searchsorted(cdf, uniform[:, None] * total, right=True)
    last_possible = torch.searchsorted(cdf, total)  # the product above may round up to the total
    return torch.minimum(token, last_possible).clamp(max=distribution.shape[-1] - 1)[:, 0]
