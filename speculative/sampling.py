"""From logits to the target's law p: each request's own temperature and filters, on every verify row.

Nothing here writes to the logits it is given. The law is a function of one row's logits and of that request's
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
class SamplingRows:
    """The parameters of every verify row, on the device.

    temperature: [R, 1] float32; 1 in greedy rows.
    greedy: [R] bool.
    filtered: rows with a filter, as (rows [F], top_k [F], top_p [F]); None when no row has one.
    """

    temperature: Tensor
    greedy: Tensor
    any_greedy: bool
    filtered: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def build(cls, params: Sequence[SamplingParams], vocab_size: int, device: torch.device) -> "SamplingRows":
        """`params` holds one entry per verify row."""
        greedy = torch.tensor([p.greedy for p in params], dtype=torch.bool, device=device)
        temperature = torch.tensor([1.0 if p.greedy else max(p.temperature, _COLDEST) for p in params], device=device)
        rows = [row for row, p in enumerate(params) if not p.greedy and (p.top_k > 0 or p.top_p < 1)]
        filtered = None
        if rows:
            top_k = [min(params[row].top_k, vocab_size) or vocab_size for row in rows]
            top_p = [params[row].top_p for row in rows]
            filtered = (
                torch.tensor(rows, device=device),
                torch.tensor(top_k, device=device),
                torch.tensor(top_p, device=device),
            )
        return cls(temperature[:, None], greedy, any(p.greedy for p in params), filtered)


def process(logits: Tensor, rows: SamplingRows) -> Tensor:
    """Logits after temperature and filters: [R, V] float32, -inf where a token is filtered out."""
    processed = logits / rows.temperature
    if rows.filtered is not None:
        which, top_k, top_p = rows.filtered
        processed[which] = _keep_nucleus(_keep_top_k(processed[which], top_k), top_p)
    return processed


def target_probs(processed: Tensor, rows: SamplingRows) -> Tensor:
    """The law p that tokens are drawn from: [R, V] float32; greedy rows have all mass on the most likely token."""
    probs = torch.softmax(processed, dim=-1)
    if not rows.any_greedy:
        return probs
    best = processed.argmax(dim=-1, keepdim=True)
    return torch.where(rows.greedy[:, None], torch.zeros_like(probs).scatter_(1, best, 1.0), probs)


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


def draw(law: Tensor, uniform: Tensor) -> Tensor:
    """Draw one token per row by inverse CDF.

    Args:
        law: [E, V] float32, non-negative, need not be normalised.
        uniform: [E] float64 in (0, 1).

    Returns:
        [E] int64; a token of mass 0 is never drawn. From a row of NaN some token of the vocabulary, to be thrown away.
    """
    cdf = law.cumsum(dim=-1, dtype=torch.float64)
    total = cdf[:, -1:].contiguous()
    token = torch.searchsorted(cdf, uniform[:, None] * total, right=True)
    last_possible = torch.searchsorted(cdf, total)  # the product above may round up to the total
    return torch.minimum(token, last_possible).clamp(max=law.shape[-1] - 1)[:, 0]
