"""JSON by a real model at T = 1, speculation on: every answer that finished by itself is valid."""

import itertools
import json
from pathlib import Path

import jsonschema
import pytest

from serve_app.text.grammar import StructureCompiler
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.engine import EngineCore
from speculative.kernels.library import cpu_kernels
from speculative.model.catalogue import FetchFailed, fetch_model
from speculative.model.config import ModelConfig
from speculative.request import FinishReason, Request, SamplingParams, Structure
from tests.support.engines import Answer, assert_idle, run

pytestmark = pytest.mark.slow

# Without kernels of ours bfloat16 takes minutes; what may be drawn is the same.
NUM_ANSWERS, DTYPE = (24, "float32") if cpu_kernels() is None else (40, "bfloat16")
COLOURS = ["red", "green", "dark blue", "black"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 16},
        "colour": {"enum": COLOURS},
        "uses": {"type": "array", "items": {"type": "string", "maxLength": 10}, "minItems": 1, "maxItems": 3},
        "price": {"type": "integer", "minimum": 1, "maximum": 999},
        "sizes": {"type": "array", "items": {"enum": ["small", "large", None]}, "maxItems": 2},
        "new": {"type": "boolean"},
    },
    "required": ["name", "colour", "uses", "price", "sizes", "new"],
    "additionalProperties": False,
}
EXAMPLE = {"name": "chair", "colour": "dark blue", "uses": ["sit"], "price": 75, "sizes": ["small"], "new": True}
THINGS = ["lamp", "bicycle", "teapot", "coat", "guitar", "tent", "umbrella", "spoon", "kite", "clock"]


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return fetch_model("smollm2-135m")
    except FetchFailed as error:
        pytest.skip(f"no model here: {error}")


def ask(engine: EngineCore, tokenizer: Tokenizer) -> list[Answer]:
    structure = Structure("json_schema", json.dumps(SCHEMA))
    for seed, thing in zip(range(NUM_ANSWERS), itertools.cycle(THINGS), strict=False):
        form = f"in the form of this example: {json.dumps(EXAMPLE)}" if seed % 2 else f"with {', '.join(EXAMPLE)}."
        text = f"Describe a {thing} as JSON, {form}"
        prompt = tuple(tokenizer.encode_chat([{"role": "user", "content": text}]))
        engine.add(Request(f"{seed}", prompt, SamplingParams(max_tokens=96, structure=structure), seed))
    answers = run(engine)
    assert_idle(engine)
    return list(answers.values())


def test_every_answer_that_stopped_is_valid(folder: Path) -> None:
    config = EngineConfig(
        dtype=DTYPE, device="cpu", max_num_seqs=16, kv_cache_tokens=8192, drafter=DrafterConfig(kind="ngram")
    )
    model = ModelConfig.from_folder(folder)
    engine = EngineCore.load(folder, config, StructureCompiler(folder, model.vocab_size, model.eos_token_ids))
    tokenizer = Tokenizer.from_folder(folder)
    answers = ask(engine, tokenizer)
    assert [answer.error for answer in answers] == [None] * NUM_ANSWERS
    assert sum(answer.num_drafted for answer in answers) > 10 * NUM_ANSWERS
    assert sum(answer.num_accepted for answer in answers) > 2 * NUM_ANSWERS
    stopped = [answer.token_ids[:-1] for answer in answers if answer.finish_reason is FinishReason.STOP]
    assert len(stopped) >= 0.9 * NUM_ANSWERS
    texts = [tokenizer.decode(ids, skip_special=False) for ids in stopped]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 0.9 * len(texts), "drawn at T = 1, answers differ"
