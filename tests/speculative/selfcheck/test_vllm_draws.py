"""vLLM's noise, against plain arithmetic of integers, and what a replay finds of tokens that were drawn with it."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from speculative.request import Draw, Request, Round, SamplingParams, TokenKind
from speculative.selfcheck.draw_margins import Distributions, redraw
from speculative.selfcheck.replayed_draws import Rounds
from speculative.selfcheck.vllm_draws import generator_seed, samples_so, token_numbers, uniforms_of

MASK = 2**64 - 1
NUM_TOKENS = 64


def mixed(word: int) -> int:
    word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ (word >> 27)) * 0x94D049BB133111EB & MASK
    return word ^ (word >> 31)


def noise(number: int, token: int) -> float:
    bits = mixed((mixed(number) + (token + 1) * 0x9E3779B97F4A7C15) & MASK) >> 11
    return -math.log(-math.log((bits + 0.5) * 2**-53))


def sampler(change: Callable[[int], int] = lambda number: number) -> Callable[..., tuple[Tensor, None]]:
    """As vLLM samples on a CPU."""

    def sample(logits: Tensor, generators: dict[int, torch.Generator], *_: object) -> tuple[Tensor, None]:
        tokens = []
        for row, own in enumerate(logits.tolist()):
            number = change(int(torch.randint(0, 2**31, (1,), generator=generators[row])))
            tokens.append(max(range(len(own)), key=lambda token: own[token] + noise(number, token)))
        return torch.tensor(tokens), None

    return sample


def test_the_noise_is_that_of_plain_arithmetic() -> None:
    for number in (0, 1, 2**31 - 1):
        unit = uniforms_of(number, 1000)
        assert unit.dtype == torch.float64 and float(unit.min()) > 0 and float(unit.max()) < 1
        for token in (0, 1, 999):
            assert -math.log(-math.log(float(unit[token]))) == pytest.approx(noise(number, token), rel=1e-12)


def test_only_a_sampler_that_draws_so_is_taken_for_one() -> None:
    assert samples_so(sampler())
    assert not samples_so(sampler(lambda number: number + 1))


def test_an_answer_follows_from_its_seed_and_an_exchanged_token_does_not() -> None:
    request = Request("r", tuple(range(5 + NUM_TOKENS)), SamplingParams(temperature=1.0), seed=7, score_from=5)
    scaled = torch.randn(NUM_TOKENS, 400, generator=torch.Generator().manual_seed(1)) * 2
    generator = torch.Generator().manual_seed(generator_seed(7, 0))
    served = [int(sampler()(row[None].clone(), {0: generator})[0]) for row in scaled]
    assert len(set(token_numbers(7, NUM_TOKENS))) == NUM_TOKENS

    rounds = Rounds(
        5, (Round("vllm", 1), Round("vllm", 3)), tuple(served[:4]), (TokenKind.FIRST, *[TokenKind.BONUS] * 3)
    )
    assert rounds.complete
    assert rounds.draws() == tuple(
        Draw("vllm_noise", start, ahead) for start, ahead in [(5, 0), (6, 0), (6, 1), (6, 2)]
    )

    draws = [Draw("vllm_noise", 5 + index, 0) for index in range(NUM_TOKENS)]

    def misses(tokens: list[int], begin: int = 0) -> list[float]:
        part = slice(begin, NUM_TOKENS)
        target = Distributions(scaled[part], scaled[part], scaled[part].softmax(dim=-1))
        redrawn = redraw(target, tokens[part], draws[part], request, {})
        return [one.miss for one in redrawn]

    assert misses(served) == [0.0] * NUM_TOKENS
    assert misses(served, 40) == [0.0] * (NUM_TOKENS - 40), "a replay comes in parts"
    for place in range(0, NUM_TOKENS, 9):
        changed = [*served[:place], (served[place] + 1) % 400, *served[place + 1 :]]
        wrong = misses(changed)
        assert wrong[place] > 1e-3 and wrong.count(0.0) == NUM_TOKENS - 1
