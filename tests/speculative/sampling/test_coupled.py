"""Reproducible requests beside others, and greedy ones where all are coupled.

That a text is a function of seed and prompt, whatever is drafted: `test_properties.py`, `test_neural_drafter.py`, and
`test_replayed_draws.py` draw by draw.
"""

from pathlib import Path

from speculative.engine import EngineCore
from speculative.request import Request, SamplingParams
from tests.support.engines import answer_all, texts, tiny_engine

PROMPTS = [tuple(3 + (7 * i * j) % 41 for j in range(4 + 9 * i)) for i in range(1, 9)]


def make_engine(tiny_folder: Path, verifier: str) -> EngineCore:
    sizes = {"kv_cache_tokens": 4096, "max_batched_tokens": 512, "prefix_caching": False}
    return tiny_engine(tiny_folder, verifier=verifier, **sizes)


def requests(**params: object) -> list[Request]:
    settings = SamplingParams(max_tokens=40, ignore_eos=True, **params)  # type: ignore[arg-type]
    return [Request(f"r{i}", prompt, settings, seed=2**63 + 17 * i) for i, prompt in enumerate(PROMPTS)]


def together(engine: EngineCore, wanted: list[Request]) -> dict[str, list[int]]:
    answers = answer_all(engine, wanted)
    assert {answer.error for answer in answers.values()} == {None}
    assert sum(answer.num_drafted for answer in answers.values()) > 0
    return texts(answers)


def test_reproducible_requests_beside_others_equal_a_coupled_engine(tiny_folder: Path) -> None:
    wanted = requests(reproducible=True)
    others = [Request(f"other {i}", prompt, SamplingParams(max_tokens=40), i) for i, prompt in enumerate(PROMPTS)]
    beside = together(make_engine(tiny_folder, "token_wise"), [*wanted, *others])
    alone = together(make_engine(tiny_folder, "coupled"), wanted)
    assert {name: beside[name] for name in alone} == alone
    assert len(set(map(tuple, alone.values()))) == len(wanted)


def test_greedy_requests_are_greedy_in_coupled_mode_too(tiny_folder: Path) -> None:
    greedy = requests(temperature=0)
    coupled, token_wise = (together(make_engine(tiny_folder, name), greedy) for name in ("coupled", "token_wise"))
    assert coupled == token_wise
