"""Reproducible requests beside others.

That a text is a function of seed and prompt, whatever is drafted: `test_properties.py`, `test_neural_drafter.py`, and
`test_replayed_draws.py` draw by draw.
"""

from pathlib import Path

from speculative.request import Request, SamplingParams
from tests.support.engines import answer_all, texts, tiny_engine

PROMPTS = [tuple(3 + (7 * i * j) % 41 for j in range(4 + 9 * i)) for i in range(1, 9)]
REPRODUCIBLE = SamplingParams(max_tokens=40, ignore_eos=True, reproducible=True)


def test_reproducible_requests_beside_others_equal_a_coupled_engine(tiny_folder: Path) -> None:
    wanted = [Request(f"r{i}", prompt, REPRODUCIBLE, seed=2**63 + 17 * i) for i, prompt in enumerate(PROMPTS)]
    others = [Request(f"other {i}", prompt, SamplingParams(max_tokens=40), i) for i, prompt in enumerate(PROMPTS)]
    sizes = {"kv_cache_tokens": 4096, "max_batched_tokens": 512, "prefix_caching": False}
    beside, alone = (
        answer_all(tiny_engine(tiny_folder, verifier=verifier, **sizes), asked)
        for verifier, asked in (("token_wise", [*wanted, *others]), ("coupled", wanted))
    )
    assert {name: beside[name].token_ids for name in alone} == texts(alone)
    assert len(set(map(tuple, texts(alone).values()))) == len(wanted)
    assert sum(answer.num_drafted for answer in alone.values()) > 0
