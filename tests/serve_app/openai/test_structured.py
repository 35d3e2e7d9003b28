"""Structured output: masks against brute force, look-ahead without a trace, and garbage that harms nobody."""

import asyncio
import contextlib
import itertools
import json
import random
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serve_app.backends.torch_backend import TorchBackend, load_engine
from serve_app.errors import reply_for
from serve_app.openai.frontend import FrontEnd
from serve_app.telemetry.metrics import Metrics, PrometheusSink
from serve_app.text.grammar import StructureCompiler, StructureConstraint
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.errors import InvalidRequest
from speculative.request import FinishReason, Request, SamplingParams, Structure
from tests.support.engines import NGRAM, NO_DRAFTS, settings
from tests.support.fake_serving import BackendSource
from tests.support.front_ends import chat, completion, counts_by, observed, reply_to

VOCAB_SIZE = 512  # the tokenizer knows fewer: the rest is padding
EOS = (2, 0)
SPECIAL = {0, 1, 2}


# -- exact masks --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finite:
    """A structure with finitely many answers, all written out by hand."""

    structure: Structure
    answers: frozenset[bytes]

    @classmethod
    def of(cls, kind: Any, text: str, answers: Any) -> "Finite":
        return cls(Structure(kind, text), frozenset(answer.encode() for answer in answers))


CHOICES = ["a", "ab", "the rain", "then", "", 'q"uo\\te\n', "é🙂", "<|im_end|>", "\x00/"]
WORDS = ["in", "the", "th", "to"]
SCHEMA = {
    "type": "object",
    "properties": {
        "a": {"enum": ["x", "xy", 1]},
        "b": {"type": "integer", "minimum": 0, "maximum": 12},
        "c": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": ""},
}
BOOLEANS = ["", ',"c":[true]', ',"c":[false]'] + [
    f',"c":[{first},{second}]' for first in ("true", "false") for second in ("true", "false")
]
GRAMMAR = 'start: name (" and " name)?\nname: "tea" | "the" NUMBER\nNUMBER: /[0-3]{1,2}/'
NAMES = ["tea", *(f"the{number}" for size in (1, 2) for number in map("".join, itertools.product("0123", repeat=size)))]
FINITE = {
    "choice": Finite.of("choice", json.dumps(CHOICES), CHOICES),
    "regex": Finite.of(
        "regex",
        "^(in|the|th|to){1,3}[0-2]?$",
        [
            "".join(words) + tail
            for size in (1, 2, 3)
            for words in itertools.product(WORDS, repeat=size)
            for tail in ("", "0", "1", "2")
        ],
    ),
    "empty": Finite.of("regex", "", [""]),
    "json": Finite.of(
        "json_schema",
        json.dumps(SCHEMA),
        [f'{{"a":{a},"b":{b}{c}}}' for a in ('"x"', '"xy"', "1") for b in range(13) for c in BOOLEANS],
    ),
    "grammar": Finite.of("grammar", GRAMMAR, [*NAMES, *(f"{a} and {b}" for a in NAMES for b in NAMES)]),
}


def brute_force(answers: frozenset[bytes], so_far: bytes, tokens: list[bytes]) -> np.ndarray:
    """A token may come if an answer goes on with it; an end of text, if an answer ends here."""
    rests = [answer[len(so_far) :] for answer in answers if answer.startswith(so_far)]
    beginnings = {rest[:size] for rest in rests for size in range(1, len(rest) + 1)}
    allowed = [token not in SPECIAL and text in beginnings for token, text in enumerate(tokens)]
    for token in EOS:
        allowed[token] = b"" in rests
    return np.array(allowed)


@pytest.mark.parametrize("name", FINITE)
def test_a_token_is_allowed_if_and_only_if_an_answer_goes_on_with_it(
    name: str, compiler: StructureCompiler, tokens: list[bytes]
) -> None:
    case = FINITE[name]
    rng = random.Random(5)
    seen = set()
    for _ in range(60):
        constraint, output, so_far = compiler(case.structure), list[int](), b""
        while True:
            (mask,) = constraint.allowed(output, ())
            assert mask.shape == (VOCAB_SIZE,) and mask.dtype == np.bool_
            np.testing.assert_array_equal(mask, brute_force(case.answers, so_far, tokens), f"after {so_far!r}")
            token = rng.choice(np.flatnonzero(mask).tolist())
            output.append(token)
            if token in EOS:
                break
            so_far += tokens[token]
        assert so_far in case.answers
        seen.add(so_far)
    assert len(seen) > min(len(case.answers), 20) // 2


def test_the_end_of_text_in_a_grammar_does_not_end_an_answer_that_is_not_complete(compiler: StructureCompiler) -> None:
    constraint = compiler(Structure("grammar", 'start: "a" <|im_end|> "b"'))
    first = np.flatnonzero(constraint.allowed((), ())[0]).tolist()
    assert len(first) == 1
    assert not constraint.allowed(first, ())[0].any()


# -- infinitely many answers --------------------------------------------------------------------------------------

BOUNDED = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
        "size": {"type": "integer", "minimum": -5, "maximum": 300},
        "share": {"anyOf": [{"type": "number", "minimum": 0, "maximum": 1}, {"type": "null"}]},
    },
    "required": ["name", "tags", "size"],
    "additionalProperties": False,
}


INFINITE = {
    "json_object": Structure("json_object"),
    "json_schema": Structure("json_schema", json.dumps(BOUNDED)),
    "regex": Structure("regex", r"[a-z]+@[a-z]+\.(com|org)|\d{2}/\d{2}"),
    "grammar": Structure("grammar", 'start: sum\nsum: term ("+" term)*\nterm: /[0-9]+/ | "(" sum ")"\n%ignore / /'),
}


def wander(
    constraint: StructureConstraint, rng: random.Random, output: list[int], num_steps: int, end: float = 0.5
) -> list[int]:
    """Go on at random, and end with probability `end` where that is allowed."""
    for _ in range(num_steps):
        (mask,) = constraint.allowed(output, ())
        choices = np.flatnonzero(mask).tolist()
        assert choices
        ends = [token for token in choices if token in EOS]
        others = [token for token in choices if token not in EOS]
        token = rng.choice(ends if ends and (not others or rng.random() < end) else others)
        output = [*output, token]
        if token in EOS:
            break
    return output


def test_an_object_that_ends_is_one(compiler: StructureCompiler, tokens: list[bytes]) -> None:
    outputs = [wander(compiler(INFINITE["json_object"]), random.Random(seed), [], 150) for seed in range(40)]
    ended = [output for output in outputs if output[-1] in EOS]
    assert len(ended) >= 10
    assert all(isinstance(json.loads(b"".join(tokens[one] for one in output[:-1])), dict) for output in ended)


def test_json_is_laid_out_as_one_likes_but_never_blank_for_long(
    compiler: StructureCompiler, tokens: list[bytes]
) -> None:
    ids = {text: token for token, text in reversed(list(enumerate(tokens))) if text}
    structure = Structure("json_schema", json.dumps(BOUNDED))
    value = {"name": "a", "tags": ["red"], "size": 1}
    for text in (json.dumps(value), json.dumps(value, separators=(",", ":")), json.dumps(value, indent=4)):
        output = [ids[bytes([byte])] for byte in text.encode()]
        assert compiler(structure).allowed(output, ())[0][list(EOS)].all(), text
    blanks = [ids[bytes([byte])] for byte in b"{" + b" " * 60]
    assert len(compiler(structure).allowed((), blanks)) < 50


# -- look-ahead ---------------------------------------------------------------------------------------------------


def some_drafts(constraint: StructureConstraint, rng: random.Random, output: list[int]) -> list[int]:
    """What a drafter might propose: a way on, cut short, broken, or followed by more than there is."""
    drafts = wander(constraint, rng, output, rng.randrange(6))[len(output) :]
    if rng.random() < 0.4:
        drafts.insert(rng.randrange(len(drafts) + 1), rng.randrange(VOCAB_SIZE))
    return drafts + [rng.choice([*EOS, 5])] * rng.randrange(3)


EVERY = {name: case.structure for name, case in FINITE.items()} | INFINITE
EVERY["max_tokens"] = Structure("grammar", 'start: word " " word\nword[max_tokens=3]: /[a-z]+/')


@pytest.mark.parametrize("name", EVERY)
def test_looking_ahead_leaves_no_trace(name: str, compiler: StructureCompiler) -> None:
    rng = random.Random(name)
    for _ in range(12):
        watched, output = compiler(EVERY[name]), list[int]()
        for _ in range(25):
            drafts = some_drafts(compiler(EVERY[name]), rng, output)
            masks = watched.allowed(output, drafts)
            for place, mask in enumerate(masks):  # each as if nothing had ever been looked ahead at
                (fresh,) = compiler(EVERY[name]).allowed([*output, *drafts[:place]], ())
                np.testing.assert_array_equal(mask, fresh)
            good = [bool(masks[place][draft]) for place, draft in enumerate(drafts[: len(masks)])]
            assert all(good[: len(masks) - 1])
            assert len(masks) == len(drafts) + 1 or not good[-1]
            num_accepted = rng.randrange(len(masks))
            last = rng.choice(np.flatnonzero(masks[num_accepted]).tolist())
            output = [*output, *drafts[:num_accepted], last]
            if EOS[0] in output or EOS[1] in output:
                break


def test_after_the_end_nothing_but_the_end_follows(compiler: StructureCompiler, tokens: list[bytes]) -> None:
    a = tokens.index(b"a")
    only_the_end = np.isin(np.arange(VOCAB_SIZE), EOS)
    constraint = compiler(Structure("choice", '["a", "ab"]'))
    masks = constraint.allowed((), (a, EOS[1], EOS[0], a))
    assert len(masks) == 4
    for mask in masks[2:]:
        np.testing.assert_array_equal(mask, only_the_end)
    for output in ([a, 2], [a, 2, 2], [a, 2, 2, a, 511]):
        for mask in constraint.allowed(output, (2,)):
            np.testing.assert_array_equal(mask, only_the_end)


def test_what_was_not_emitted_under_the_masks_allows_nothing(compiler: StructureCompiler, tokens: list[bytes]) -> None:
    """A damaged resume must not end as a complete answer."""
    constraint = compiler(Structure("choice", '["ab"]'))
    assert not constraint.allowed([tokens.index(b"b")], ())[0].any()
    assert not constraint.allowed([tokens.index(b"b"), 7], (2,))[0].any()


def test_threads_share_a_compiler(compiler: StructureCompiler) -> None:
    def walk(seed: int) -> list[int]:
        return wander(compiler(EVERY["json_schema"]), random.Random(seed), [], 60)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(walk, [seed % 4 for seed in range(32)])) == [walk(seed) for seed in range(4)] * 8


# -- what cannot be compiled --------------------------------------------------------------------------------------


def chain(link: str) -> str:
    """A grammar of as many rules as may be sent, each leading to the next."""
    names = ["".join(name) for size in (2, 3) for name in itertools.product("abcdefghij", repeat=size)]
    rules = [link.format(a, b) for a, b in itertools.pairwise(["start", *names])]
    return "\n".join([*rules, f'{names[-1]}: "x"'])


def references(link: str) -> str:
    """A schema of many definitions, each referring to the next."""
    names = [f"{number:x}" for number in range(1100)]
    definitions = [f'"{a}":{link % b}' for a, b in itertools.pairwise(names)]
    return f'{{"$ref":"#/$defs/0","$defs":{{{",".join(definitions)},"{names[-1]}":{{"type":"null"}}}}}}'


BAD: dict[str, tuple[Structure, str]] = {
    "regex": (Structure("regex", "(a"), "unclosed group"),
    "word border": (Structure("regex", r"a\bb"), "lookarounds"),
    "nothing fits": (Structure("regex", "[^\\s\\S]"), "cannot be used"),
    "half a character": (Structure("regex", "\ud800"), "surrogate"),
    "grammar": (Structure("grammar", "start: ("), "Expected"),
    "no start": (Structure("grammar", 'begin: "a"'), "no start rule"),
    "endless": (Structure("grammar", "start: start"), "cannot be used"),
    "many ways": (Structure("grammar", "start: " + '"a"? ' * 9000), "Too many items"),
    "deep": (Structure("grammar", "start: " + "(" * 900 + '"a"' + ")" * 900), "nested"),
    "not JSON": (Structure("json_schema", "{type: string}"), "key must be a string"),
    "not a schema": (Structure("json_schema", "[1]"), "bject"),
    "never": (Structure("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}'), "nsatisfiable"),
    "remainders": (Structure("json_schema", '{"multipleOf": 9973, "allOf": [{"multipleOf": 9967}]}'), "remainders"),
    "hidden": (Structure("grammar", 'start: %json {"\\u006dultipleOf": 1000003}'), "remainders"),
    "deep schema": (Structure("json_schema", '{"items":' * 500 + "{}" + "}" * 500), "recursion limit"),
    "choice": (Structure("choice", "yes or no"), "Expecting value"),
    "no choice": (Structure("choice", "[]"), "one or more strings"),
    "deep choice": (Structure("choice", "[" * 60_000), "recursion"),
    "long": (Structure("regex", "é" * 40_000), "80000 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_does_not_compile_is_the_clients_fault(name: str, compiler: StructureCompiler) -> None:
    structure, reason = BAD[name]
    with pytest.raises(InvalidRequest, match=re.escape(reason)) as caught:
        compiler(structure)
    assert caught.value.field == "response_format"
    assert caught.value.message.startswith(f"The {structure.kind.replace('_', ' ')} cannot be used: ")
    assert len(caught.value.message) < 350 and "\n" not in caught.value.message
    compiler(Structure("choice", '["fine"]')).allowed((), ())


@pytest.mark.parametrize(
    "structure",
    [
        Structure("grammar", chain("{}: {}")),
        Structure("grammar", chain('{}: "y" | ({})?')),
        Structure("grammar", chain("{}: {}").upper().replace("START", "start").replace('"X"', '"x"')),
        Structure("json_schema", references('{"type":"array","items":{"$ref":"#/$defs/%s"}}')),
        Structure("json_schema", references('{"anyOf":[{"$ref":"#/$defs/%s"},{"type":"null"}]}')),
    ],
    ids=["rules", "options", "terminals", "arrays", "unions"],
)
def test_long_chains_do_not_end_the_process(structure: Structure, compiler: StructureCompiler) -> None:
    """The library recurses along them: on an ordinary stack the whole replica would die."""
    rng, constraint, output = random.Random(0), compiler(structure), list[int]()
    for _ in range(30):
        choices = np.flatnonzero(constraint.allowed(output, ())[0]).tolist()
        if not choices:  # too many ways to go on: the request fails, and nothing else
            break
        output.append(rng.choice(choices))


def garbage(rng: random.Random) -> Structure:
    """A structure that was cut, spliced or scrambled."""
    kind: Any = rng.choice(["json_schema", "regex", "grammar", "choice"])
    texts = [case.text for case in EVERY.values() if case.kind == kind or rng.random() < 0.1]
    text = rng.choice(texts)
    for _ in range(rng.randrange(1, 8)):
        at, until = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        other = rng.choice(texts)
        cut = other[rng.randrange(len(other) + 1) :][: rng.randrange(12)]
        noise = "".join(rng.choice('()[]{}|*+?\\^$"/.,:09azA-~&<>@%\n\x00é\ud800') for _ in range(rng.randrange(4)))
        until = min(until, at + rng.randrange(30))
        text = text[:at] + rng.choice([cut, noise, text[at:until] * 2, ""]) + text[until:]
    return Structure(kind, text)


def test_garbage_is_refused_or_kept_to(compiler: StructureCompiler) -> None:
    rng = random.Random(11)
    outcomes = {"refused": 0, "compiled": 0}
    for _ in range(300):
        structure = garbage(rng)
        try:
            constraint = compiler(structure)
        except InvalidRequest:
            outcomes["refused"] += 1
            continue
        outcomes["compiled"] += 1
        output: list[int] = []
        for _ in range(10):
            masks = constraint.allowed(output, [rng.randrange(VOCAB_SIZE) for _ in range(3)])
            assert masks[0].shape == (VOCAB_SIZE,)
            if not masks[0].any() or EOS[0] in output:
                break
            output.append(rng.choice(np.flatnonzero(masks[0]).tolist()))
    assert min(outcomes.values()) > 30, outcomes


# -- behind the backend -------------------------------------------------------------------------------------------


def asking(name: str, structure: Structure | None, **params: Any) -> Request:
    return Request(name, (5, 6, 7) * 4, SamplingParams(**{"max_tokens": 40, **params}, structure=structure), seed=3)


async def collect(backend: TorchBackend, request: Request) -> tuple[list[int], FinishReason | None]:
    deltas = [delta async for delta in backend.generate(request)]
    return [token for delta in deltas for token in delta.token_ids], deltas[-1].finish_reason


async def test_the_backend_compiles_beside_the_engine_and_only_the_faulty_request_fails(
    folder: Path, tokens: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[str] = []
    compile_one = StructureCompiler._compile

    def recorded(self: StructureCompiler, structure: Structure) -> Any:
        threads.append(threading.current_thread().name)
        return compile_one(self, structure)

    monkeypatch.setattr(StructureCompiler, "_compile", recorded)
    backend = TorchBackend(str(folder), "tiny", settings())
    await backend.start()
    try:
        output, reason = await collect(backend, asking("good", FINITE["json"].structure))
        assert reason is FinishReason.STOP
        assert b"".join(tokens[token] for token in output[:-1]) in FINITE["json"].answers
        assert await collect(backend, asking("again", FINITE["json"].structure)) == (output, reason)
        with pytest.raises(InvalidRequest, match="unclosed group"):
            await collect(backend, asking("bad", Structure("regex", "(")))
        output, _ = await collect(backend, asking("plain", None, ignore_eos=True))
        assert len(output) == 40
        assert backend.usage().num_running == backend.usage().num_waiting == 0
    finally:
        await backend.stop()
    assert len(threads) == 2, "compiled again, though it was kept"
    assert "truespec-engine" not in threads


async def test_an_engine_without_the_means_says_so(folder: Path) -> None:
    def load(path: Path, config: EngineConfig) -> EngineCore:
        return EngineCore.load(path, config)

    backend = TorchBackend(str(folder), "tiny", settings(), load)
    await backend.start()
    try:
        with pytest.raises(InvalidRequest, match="without support"):
            await collect(backend, asking("bare", Structure("json_object")))
    finally:
        await backend.stop()
    assert load_engine(folder, settings()).make_constraint(Structure("json_object")).allowed((), ())[0].any()


DEAD_ENDS: list[dict[str, Any]] = [  # with texts for ids; the first two fields leave no token
    {"allowed_token_ids": "a", "structured_outputs": {"choice": ["no"]}},
    {"allowed_token_ids": "n", "guided_regex": "n{9}o"},
    {"allowed_token_ids": "n", "response_format": {"type": "json_object"}, "logit_bias": {"5": -100}},
    {"bad_words": ["no", "n"], "structured_outputs": {"choice": ["no"]}},
    {"allowed_token_ids": "q", "bad_words": ["qq"]},
    {"allowed_token_ids": "n", "bad_words": ["n"]},
    {"allowed_token_ids": "n", "min_tokens": 2, "stop_token_ids": "n"},
    {"bad_words": ["["], "tool_choice": "required", "tools": [{"type": "function", "function": {"name": "f"}}]},
]


@pytest.mark.parametrize("drafter", [NGRAM, DrafterConfig.of(kind="suffix", suffix_min_match=1), NO_DRAFTS])
@pytest.mark.parametrize("temperature", [0, 1])
async def test_constraints_that_leave_no_token_are_the_clients_mistake(
    folder: Path, drafter: DrafterConfig, temperature: float
) -> None:
    """At once and on the way; the engine breaks no invariant, and who is beside it gets what it gets alone."""
    backend, sink = TorchBackend(str(folder), "m", settings(drafter=drafter)), PrometheusSink(source="r1")
    model, tokenizer = await backend.start(), Tokenizer.from_folder(folder, "chatml-tools")
    end = FrontEnd(observed(BackendSource(backend), Metrics(sink, model_name="m", pool="all")), tokenizer, model)
    beside = completion(max_tokens=40, seed=1, ignore_eos=True)
    try:
        alone = await reply_to(end, beside)
        for sent in DEAD_ENDS:
            ids = {name: tokenizer.encode_continuation(text)[:1] for name, text in sent.items() if name.endswith("ids")}
            asked, make = {"temperature": temperature, **sent, **ids}, chat if "tools" in sent else completion
            task = asyncio.create_task(reply_to(end, beside))
            with pytest.raises(InvalidRequest) as caught:
                await reply_to(end, make(**asked))
            assert all(name in caught.value.message for name in list(sent)[:2])
            assert caught.value.field.partition(".")[0] in sent
            with contextlib.suppress(InvalidRequest):  # before the first event
                *_, last = [one async for one in end.events(await end.prepare(make(**asked, stream=True)))]
                assert json.loads(last.removeprefix(b"data: ")) == reply_for(caught.value).body()
            assert (await task)["choices"][0]["text"] == alone["choices"][0]["text"]
        stats = backend.take_stats()
        assert stats.violations == stats.logprob_violations == stats.alarms == {}
    finally:
        await backend.stop()
    assert "error" not in counts_by(sink, "requests", "outcome")
