"""Structured output through the engine: always valid, lossless under speculation, whatever happens on the way."""

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch

from serve_app.text.grammar import StructureCompiler
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.request import FinishReason, Request, SamplingParams, Structure
from speculative.state.token_constraint import Bools
from tests.support.distributions import assert_departs, assert_follows
from tests.support.engines import (
    NGRAM,
    NO_DRAFTS,
    Answer,
    answer_all,
    decoder_of,
    hand_over,
    naive_logits,
    run,
    settings,
    texts,
)
from tests.support.tiny_models import write_tiny_model

VOCAB_SIZE = 512
EOS = (2,)
CHOICES = ["in the hat", "in the tree", "in rain", "no", "on the sea at noon"]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"enum": ["rose", "rise"]}, "minItems": 2, "maxItems": 4},
        "b": {"type": "integer", "minimum": -9, "maximum": 99},
        "c": {"type": "string", "maxLength": 4},
    },
    "required": ["a", "b", "c"],
    "additionalProperties": False,
}
PATTERN = r"(the |one |to ){2,8}end"


VALID: dict[str, tuple[Structure, Callable[[str], Any]]] = {
    "choice": (Structure("choice", json.dumps(CHOICES)), CHOICES.__contains__),
    "regex": (Structure("regex", PATTERN), re.compile(PATTERN).fullmatch),
    "json": (
        Structure("json_schema", json.dumps(SCHEMA)),
        lambda text: jsonschema.validate(json.loads(text), SCHEMA) is None,
    ),
}


@dataclass(frozen=True)
class Model:
    """A tiny model, and a prompt of what answers are made of, so that n-gram drafts are often right."""

    folder: Path
    tokenizer: Tokenizer
    compiler: StructureCompiler
    prompt: tuple[int, ...]

    def engine(self, drafter: DrafterConfig = NGRAM, **changes: Any) -> EngineCore:
        changes = {"kv_cache_tokens": 4096, "max_batched_tokens": 256, **changes}
        return EngineCore.load(self.folder, settings(drafter=drafter, **changes), self.compiler)

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = write_tiny_model(tmp_path_factory.mktemp("structured"), vocab_size=VOCAB_SIZE, tokenizer=True)
    tokenizer = Tokenizer.from_folder(folder)
    text = 'the one to the end; in the hat; in the tree {"a": ["rose", "rise", "rose"], "b": 12, "c": "in"}'
    return Model(folder, tokenizer, StructureCompiler(folder, VOCAB_SIZE, EOS), tuple(tokenizer.encode(text * 2)))


def asking(name: str, prompt: tuple[int, ...], structure: Structure | None, **params: Any) -> Request:
    seed = sum(map(ord, name))
    return Request(name, prompt, SamplingParams(**{"max_tokens": 120, **params}, structure=structure), seed)


def some_requests(prompt: tuple[int, ...], temperature: float, copies: int = 4) -> list[Request]:
    """Every kind, and requests without a structure between them."""
    requests = []
    for copy in range(copies):
        start = prompt[copy:]
        for name, (structure, _) in VALID.items():
            requests.append(asking(f"{name}-{copy}", start, structure, temperature=temperature))
        requests.append(asking(f"free-{copy}", start, None, temperature=temperature, max_tokens=20, ignore_eos=True))
    return requests


def assert_valid(answers: dict[str, Answer], model: Model) -> int:
    """Whatever stopped keeps to its structure; what was cut off began like something that does. How many stopped."""
    num_stopped = 0
    for name, answer in answers.items():
        assert answer.error is None, f"{name}: {answer.error}"
        if name.startswith("free"):
            assert len(answer.token_ids) == 20
        elif answer.finish_reason is FinishReason.STOP:
            num_stopped += 1
            assert answer.token_ids[-1] in EOS
            text = model.text(answer.token_ids[:-1])
            assert VALID[name.split("-")[0]][1](text), f"{name}: {text!r}"
    return num_stopped


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1.5])
def test_answers_keep_to_their_structures_in_a_mixed_batch(temperature: float, model: Model) -> None:
    requests = some_requests(model.prompt, temperature)
    answers = answer_all(model.engine(), requests)
    assert assert_valid(answers, model) >= 11
    structured = [answer for name, answer in answers.items() if not name.startswith("free")]
    assert sum(answer.num_drafted for answer in structured) > 50
    assert sum(answer.num_accepted for answer in structured) > 10
    assert max(max(answer.round_sizes) for answer in answers.values()) > 2
    for name, answer in answer_all(model.engine(NO_DRAFTS), requests).items() if temperature == 0 else ():
        assert answers[name].token_ids == answer.token_ids, name
        assert answers[name].finish_reason == answer.finish_reason


@pytest.mark.parametrize("prefill_only_after", [0, 1, 7])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_handoff_goes_on_within_the_structure(temperature: float, prefill_only_after: int, model: Model) -> None:
    requests = [request for request in some_requests(model.prompt, temperature) if request.params.structure is not None]
    prefill, decode = model.engine(max_num_seqs=16), model.engine()
    answers = run(decode, hand_over(prefill, decode, requests, prefill_only_after))
    assert len(answers) == len(requests)
    assert assert_valid(answers, model) >= 8
    if temperature == 0:
        plain = answer_all(model.engine(NO_DRAFTS), requests)
        assert texts(answers) == texts(plain)


def test_a_moved_answer_goes_on_where_it_was(model: Model) -> None:
    """`emitted` feeds the constraint all at once what it was fed step by step before."""
    request = asking("json-0", model.prompt, VALID["json"][0], temperature=0.0)
    whole = answer_all(model.engine(), [request])["json-0"].token_ids
    assert len(whole) > 20
    for cut in (1, 2, 9, len(whole) - 1):
        engine = model.engine()
        engine.add(request, emitted=whole[:cut])
        assert run(engine)["json-0"].token_ids == whole[cut:]


class ForbidsAll:
    """A constraint for tests only: nothing may come, as when a structure outgrows the library's limits."""

    def allowed(self, output: Sequence[int], drafts: Sequence[int]) -> list[Bools]:
        return [np.zeros(VOCAB_SIZE, np.bool_)]


def test_a_dead_end_fails_its_request_alone(model: Model) -> None:
    def make(structure: Structure) -> Any:
        return ForbidsAll() if structure.kind == "json_object" else model.compiler(structure)

    engine = EngineCore.load(model.folder, settings(kv_cache_tokens=4096), make)
    dead = asking("dead", model.prompt, Structure("json_object"))
    answers = answer_all(engine, [*some_requests(model.prompt, 1.0, copies=1), dead])
    failed = answers.pop("dead")
    assert failed.finish_reason is FinishReason.ERROR and not failed.token_ids
    assert assert_valid(answers, model) >= 2


# -- the distribution --------------------------------------------------------------------------------------------------


def distribution_of_choices(engine: EngineCore, model: Model, prompt: tuple[int, ...]) -> dict[str, float]:
    """The probability of every answer, by walking all its tokenisations with plain forward passes."""
    constraint_of = VALID["choice"][0]
    distribution: Counter[str] = Counter()
    beginnings: list[tuple[tuple[int, ...], float]] = [((), 1.0)]
    while beginnings:
        longer = []
        token_ids = [[*prompt, *output] for output, _ in beginnings]
        length = max(map(len, token_ids))
        padded = torch.tensor([[*ids, *[0] * (length - len(ids))] for ids in token_ids])
        logits = naive_logits(decoder_of(engine), padded)
        for row, (output, chance) in enumerate(beginnings):
            mask = torch.from_numpy(model.compiler(constraint_of).allowed(output, ())[0])
            last = logits[row, len(token_ids[row]) - 1].double().masked_fill(~mask, -torch.inf)
            for token in mask.nonzero().flatten().tolist():
                probability = chance * float(last.softmax(-1)[token])
                if token in EOS:
                    distribution[model.text(output)] += probability
                else:
                    longer.append(((*output, token), probability))
        beginnings = longer
    return dict(distribution)


def count_choices(
    engine: EngineCore, model: Model, prompt: tuple[int, ...], seeds: range
) -> tuple[list[int], int, int]:
    """How often each choice came, and the drafts made and accepted."""
    structure = VALID["choice"][0]
    for seed in seeds:
        engine.add(Request(f"r{seed}", prompt, SamplingParams(max_tokens=40, structure=structure), seed))
    answers = run(engine).values()
    counts = Counter(model.text(answer.token_ids[:-1]) for answer in answers)
    assert set(counts) <= set(CHOICES)
    drafted, accepted = (sum(getattr(answer, name) for answer in answers) for name in ("num_drafted", "num_accepted"))
    return [counts[choice] for choice in CHOICES], drafted, accepted


@pytest.mark.parametrize("verifier", ["token_wise", "coupled"])
def test_the_distribution_is_the_models_own_within_the_structure(verifier: str, model: Model) -> None:
    prompt = tuple(model.tokenizer.encode("in the hat, in the tree, in the hat, no, on the sea, in the"))
    engine = model.engine(verifier=verifier, max_num_seqs=64, max_batched_tokens=512, kv_cache_tokens=8192)
    distribution = distribution_of_choices(engine, model, prompt)
    assert sum(distribution.values()) == pytest.approx(1, abs=1e-5)
    expected = [distribution[choice] for choice in CHOICES]
    assert sorted(expected)[-2] > 0.05, "a distribution with one likely answer tests nothing"
    with_drafts, drafted, accepted = count_choices(engine, model, prompt, range(1200))
    assert drafted > 1200 and 0.05 < accepted / drafted < 0.95
    assert_follows(with_drafts, expected)
    plain = model.engine(NO_DRAFTS, max_num_seqs=64, max_batched_tokens=512, kv_cache_tokens=8192)
    without, _, _ = count_choices(plain, model, prompt, range(2000, 3200))
    assert_follows(without, expected)
    assert_departs(with_drafts, [1 / len(CHOICES)] * len(CHOICES))
