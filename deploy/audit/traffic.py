"""What an audited engine is asked to do."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from speculative.request import Request, SamplingParams

PLAIN = SamplingParams(max_tokens=48, ignore_eos=True)
STOPPING = replace(PLAIN, stop_token_ids=tuple(range(0, 1024, 8)))
FILTERED = replace(PLAIN, temperature=0.9, top_k=50, top_p=0.95, min_p=0.001)

_ALL = SamplingParams(max_tokens=24, logprobs=2, ignore_eos=True)
_GREEDY = replace(_ALL, temperature=0)
_KINDS = (
    _ALL,
    _GREEDY,
    replace(_ALL, temperature=0.8, top_k=12, top_p=0.9, logprob_token_ids=(3, 5, 7, 11)),
    replace(_GREEDY, frequency_penalty=0.8, presence_penalty=0.5, repetition_penalty=1.2),
    replace(_ALL, min_p=0.2, logit_bias=((9, 4.0),), bad_words=((9, 9), (17,))),
    replace(_ALL, ignore_eos=False, stop_token_ids=(3, 4, 5, 6), min_tokens=2),
    replace(_ALL, max_tokens=8, prompt_logprobs=1),
    replace(_GREEDY, allowed_token_ids=tuple(range(2, 40)), logit_bias=((5, 2.0),)),
)


def sampling(vocab_size: int, params: SamplingParams, seed: int = 0) -> Iterator[Request]:
    """Endless requests of one kind, from random one-token prompts."""
    random = np.random.default_rng(seed)
    for number in iter(lambda: int(random.integers(2**62)), -1):
        yield Request(f"r{number}", (int(random.integers(vocab_size)),), params, seed=number)


def mixed(vocab_size: int, *, longest: int | None = None, seed: int = 0) -> Iterator[Request]:
    """Endless requests of all kinds. Prompts repeat themselves, and begin like earlier ones.

    Args:
        vocab_size: of the model.
        longest: where given, most requests run into this limit of prompt and output.
        seed: of the prompts and of the requests.
    """
    random = np.random.default_rng(seed)
    starts = [tuple(random.integers(2, vocab_size, 24).tolist()) for _ in range(3)]
    number = 0
    while True:
        params = _KINDS[number % len(_KINDS)]
        loop = tuple(random.integers(2, vocab_size, 5).tolist())
        prompt = (*starts[number % len(starts)], *loop * (3 if params.prompt_logprobs is None else 11))
        if longest is not None and params.prompt_logprobs is None:
            params = replace(params, max_tokens=longest)
        yield Request(f"r{number}", prompt, params, seed=int(random.integers(2**62)))
        number += 1
