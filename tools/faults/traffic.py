"""The traffic of an audited engine."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from speculative.request import EXAMPLES, Request, SamplingParams, Structure

PLAIN = SamplingParams(max_tokens=48, ignore_eos=True)
STOPPING = replace(PLAIN, stop_token_ids=tuple(range(0, 1024, 8)))
WARM = replace(PLAIN, temperature=0.9)
FILTERED = replace(PLAIN, temperature=0.9, top_k=50, top_p=0.95, min_p=0.001)


@dataclass(frozen=True, slots=True)
class TableTraffic:
    """The traffic of a table.

    params: of every request. seed: that every client sends; None = each its own. table: what `table_engine` takes.
    """

    params: SamplingParams = PLAIN
    seed: int | None = None
    table: Mapping[str, Any] = field(default_factory=dict)


TABLES = {
    "sampled": TableTraffic(),
    "deterministic": TableTraffic(table={"deterministic": True}),
    "stopping": TableTraffic(STOPPING, table={"deterministic": True}),
    "close": TableTraffic(WARM, table={"draft_noise": 0.1}),
    "one seed": TableTraffic(seed=42),
    "uniform": TableTraffic(replace(PLAIN, allowed_token_ids=tuple(range(2, 9))), table={"spread": 0.0}),
}
"""By name. `close`: nearly every draft is accepted. `uniform`: seven tokens are equally likely after any other."""


@dataclass(frozen=True, slots=True)
class DecoderTraffic:
    """Requests of all kinds to a tiny decoder.

    drafted: a model drafts, not n-grams. handoffs: prompts are computed by a second engine. switched: the weights are
    changed again and again meanwhile. continues: every so many requests one continues what was said before. salted:
    every other request sends a `cache_salt`. room: tokens of the KV cache; eight requests need about 500.
    """

    drafted: bool = False
    handoffs: bool = False
    switched: bool = False
    continues: int = 3
    salted: bool = False
    room: int = 256


DECODERS = {
    "requests": DecoderTraffic(),
    "handoffs": DecoderTraffic(handoffs=True),
    "drafted requests": DecoderTraffic(drafted=True),
    "drafted handoffs": DecoderTraffic(drafted=True, handoffs=True),
    "switched requests": DecoderTraffic(switched=True),
    "drafted switched requests": DecoderTraffic(drafted=True, switched=True),
    "conversations": DecoderTraffic(continues=1, room=1024),
    "salted requests": DecoderTraffic(salted=True),
}

_ALL = SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True)
_GREEDY = replace(_ALL, temperature=0)
_KINDS: tuple[SamplingParams, ...] = (
    _ALL,
    _GREEDY,
    replace(_ALL, temperature=0.8, top_k=12, top_p=0.9, logprob_token_ids=(3, 5, 7, 11)),
    replace(_GREEDY, frequency_penalty=0.8, presence_penalty=0.5, repetition_penalty=1.2),
    replace(_ALL, min_p=0.05, logit_bias=((9, 6.0),), bad_words=((9, 9), (17,))),
    replace(_ALL, logprobs=None, temperature=0.8, top_k=6),
    replace(_ALL, allowed_token_ids=tuple(range(2, 8)), ignore_eos=False, stop_token_ids=(3,), min_tokens=8),
    replace(_ALL, max_tokens=8, prompt_logprobs=1, repetition_penalty=1.2),
    replace(_ALL, frequency_penalty=0.8, presence_penalty=1.5),
    replace(_ALL, ignore_eos=False, structure=Structure("regex", "(even odd)*")),
)
_KINDS += tuple(  # of parameters that none of these has
    replace(_ALL, **{name: value})  # type: ignore[arg-type]
    for name, value in EXAMPLES.items()
    if not any(name in kind.changed for kind in _KINDS)
)
_LONGEST_CONTINUED = 100  # tokens


def sampling(
    vocab_size: int, params: SamplingParams, seed: int = 0, *, one_seed: int | None = None
) -> Iterator[Request]:
    """Endless requests of one kind, from random one-token prompts; with `one_seed` all of them send that one."""
    random = np.random.default_rng(seed)
    for number in iter(lambda: int(random.integers(2**62)), -1):
        own = number if one_seed is None else one_seed
        yield Request(f"r{number}", (int(random.integers(vocab_size)),), params, seed=own)


def mixed(
    vocab_size: int,
    *,
    longest: int | None = None,
    seed: int = 0,
    earlier: list[tuple[int, ...]] | None = None,
    continues: int = 3,
    salted: bool = False,
) -> Iterator[Request]:
    """Endless requests of all kinds. Prompts repeat themselves; all have the same second and third block, and one of
    three first ones.

    Args:
        vocab_size: of the model.
        longest: where given, most requests run into this limit of prompt and output.
        seed: of the prompts and of the requests.
        earlier: prompts with what was answered, to which the caller appends. Each is continued at most once.
        continues: every so many requests one continues the last of them.
        salted: whether every other request sends a `cache_salt`.
    """
    random = np.random.default_rng(seed)
    starts = [tuple(random.integers(2, vocab_size, 8).tolist()) for _ in range(3)]
    common = tuple(random.integers(2, vocab_size, 16).tolist())
    number = 0
    while True:
        params = _KINDS[number % len(_KINDS)]
        loop = tuple(random.integers(2, vocab_size, 4 + number % 4).tolist())  # answers end everywhere in a block
        start = (*starts[number % len(starts)], *common)
        if params.prompt_logprobs is not None:
            prompt = (*start, *(loop * 14)[:55])  # takes two steps
        elif number % continues == 0 and earlier and len(earlier[-1]) <= (longest or _LONGEST_CONTINUED) - 10:
            prompt = (*earlier.pop(), *loop)
        else:
            prompt = (*start, *loop * 3)
        if longest is not None and params.prompt_logprobs is None:
            params = replace(params, max_tokens=longest)
        salt = "a tenant's" if salted and number % 2 else ""
        yield Request(f"r{number}", prompt, params, seed=int(random.integers(2**62)), cache_salt=salt)
        number += 1
