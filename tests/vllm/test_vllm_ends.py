"""An answer of vLLM's ends where one of our own engine ends, and clients are told the same of it."""

import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serve_app.backends.base import Backend
from serve_app.backends.torch_backend import TorchBackend
from serve_app.backends.vllm_backend import VllmBackend
from serve_app.backends.vllm_parts.settings import SIZES, VllmSettings
from serve_app.openai.frontend import FrontEnd
from serve_app.text.tokenizer import Tokenizer
from speculative.config import DrafterConfig, EngineConfig
from speculative.request import FinishReason, Request, SamplingParams
from tests.support.backend_conformance import PROMPT, collect, handed_off, tokens
from tests.support.fake_serving import BackendSource
from tests.support.front_ends import chunks_of, completion, reply_to
from tests.support.tiny_models import write_tiny_model
from tests.support.vllm_installed import NEEDS_VLLM

pytestmark = [*NEEDS_VLLM, pytest.mark.asyncio(loop_scope="module")]
CONFIG = EngineConfig(
    dtype="float32", device="cpu", max_model_len=200, max_num_seqs=4, kv_cache_tokens=1024, block_size=32,
    drafter=DrafterConfig(kind="none"),
)  # fmt: skip
OF_GENERATION, OF_CONFIG, OF_TOKENIZER, PLAIN_TOKEN = 5, 0, 2, 7
ENDS = (OF_GENERATION, OF_CONFIG, OF_TOKENIZER)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fine-tune each of whose files names another end; <|im_end|> is in tokenizer_config.json only."""
    shape = {"num_hidden_layers": 2, "hidden_size": 128, "head_dim": 32, "max_position_embeddings": 512}
    folder = write_tiny_model(tmp_path_factory.mktemp("ends") / "m", vocab_size=512, tokenizer=True, **shape)
    for name, end in (("config.json", OF_CONFIG), ("generation_config.json", [OF_GENERATION])):
        content = json.loads((folder / name).read_text())
        (folder / name).write_text(json.dumps(content | {"eos_token_id": end}))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(folder: Path) -> AsyncIterator[dict[Backend, FrontEnd]]:
    """vLLM and our own engine, each behind a front end."""
    made: dict[Backend, FrontEnd] = {}
    for backend in (
        VllmBackend(str(folder), "m", VllmSettings(CONFIG, SIZES, {"enforce_eager": True}, handoff="copy")),
        TorchBackend(str(folder), "m", CONFIG),
    ):
        info = await backend.start()
        made[backend] = FrontEnd(BackendSource(backend), Tokenizer.from_folder(folder), info)  # type: ignore[arg-type]
    yield made
    for backend in made:
        await backend.stop()


def leaning(token: int, **fields: Any) -> dict[str, Any]:
    """A request whose answer has this token wherever it may."""
    return {"logit_bias": {str(token): 100}, **fields}


async def told(front: FrontEnd, **fields: Any) -> tuple[dict[str, Any], dict[str, Any], list[float]]:
    """The choice of a reply without its logprobs, the usage, and the logprobs; a stream ends in the same way."""
    asked = {"max_tokens": 8, "temperature": 0, "logprobs": 2, "return_token_ids": True, **fields}
    reply = await reply_to(front, completion(**asked))
    (choice,) = reply["choices"]
    streamed = [chunk["choices"][0] for chunk in await chunks_of(front, completion(stream=True, **asked))]
    assert "".join(one["text"] for one in streamed) == choice["text"]
    assert [token for one in streamed for token in one["token_ids"]] == choice["token_ids"]
    assert all(streamed[-1][name] == choice[name] for name in ("finish_reason", "stop_reason"))
    logprobs = choice.pop("logprobs")
    assert choice.pop("token_logprobs", logprobs["token_logprobs"]) == logprobs["token_logprobs"]
    return choice | {"tokens": logprobs["tokens"]}, reply["usage"], logprobs["token_logprobs"]


async def test_clients_are_told_the_same(engines: dict[Backend, FrontEnd]) -> None:
    theirs, ours = engines.values()
    plain, _, _ = await told(ours, ignore_eos=True)
    word = plain["text"][2:4]
    for fields, reason, stop, num_tokens in (
        (leaning(OF_TOKENIZER), "stop", None, 1),
        (leaning(OF_GENERATION), "stop", OF_GENERATION, 1),
        (leaning(OF_CONFIG), "stop", OF_CONFIG, 1),
        *((leaning(end, min_tokens=3), "stop", None if end == OF_TOKENIZER else end, 4) for end in ENDS),
        *((leaning(end, ignore_eos=True), "length", None, 8) for end in ENDS),
        *((leaning(end, ignore_eos=True, min_tokens=3), "length", None, 8) for end in ENDS),
        (leaning(OF_TOKENIZER, ignore_eos=True, stop_token_ids=[OF_TOKENIZER]), "stop", OF_TOKENIZER, 1),
        (leaning(OF_TOKENIZER, ignore_eos=True, min_tokens=3, stop_token_ids=[PLAIN_TOKEN]), "length", None, 8),
        (leaning(PLAIN_TOKEN, stop_token_ids=[PLAIN_TOKEN]), "stop", PLAIN_TOKEN, 1),
        (leaning(PLAIN_TOKEN, stop_token_ids=[PLAIN_TOKEN], min_tokens=5), "stop", PLAIN_TOKEN, 6),
        (leaning(PLAIN_TOKEN, stop_token_ids=[PLAIN_TOKEN], include_stop_str_in_output=True), "stop", PLAIN_TOKEN, 1),
        (leaning(OF_TOKENIZER, max_tokens=1), "stop", None, 1),
        ({"stop": ["never", word], "ignore_eos": True}, "stop", word, None),
        ({"stop": word, "ignore_eos": True, "include_stop_str_in_output": True}, "stop", word, None),
        ({"stop": "never", "ignore_eos": True, "max_tokens": 5}, "length", None, 5),
    ):
        (choice, usage, logprobs), (wanted, wanted_usage, wanted_logprobs) = [
            await told(front, **fields) for front in (theirs, ours)
        ]
        assert choice == wanted and usage == wanted_usage, fields
        assert logprobs == pytest.approx(wanted_logprobs, abs=1e-3), fields
        assert (choice["finish_reason"], choice["stop_reason"]) == (reason, stop), fields
        assert len(choice["token_ids"]) == len(choice["tokens"]) == usage["completion_tokens"], fields
        assert num_tokens is None or len(choice["token_ids"]) == num_tokens, fields


async def test_an_answer_that_goes_on_elsewhere_ends_there_too(engines: dict[Backend, FrontEnd]) -> None:
    for end in ENDS:
        params = SamplingParams(max_tokens=8, temperature=0, logit_bias=((end, 100.0),), min_tokens=3)
        found = []
        request, ignoring = Request("r", PROMPT, params), Request("i", PROMPT, replace(params, ignore_eos=True))
        for backend in engines:
            whole = await collect(backend.resume(request, await handed_off(backend, request)))
            rest = await collect(backend.generate(request, emitted=tokens(whole)[:2]))
            longest = await collect(backend.generate(ignoring, emitted=(9,)))
            found.append((tokens(whole), tokens(rest), tokens(longest)))
            for deltas in (whole, rest):
                assert (deltas[-1].finish_reason, deltas[-1].stop_token_id) == (FinishReason.STOP, end)
            assert (longest[-1].finish_reason, longest[-1].stop_token_id) == (FinishReason.LENGTH, None)
        assert found[0] == found[1]
        assert [len(part) for part in found[0]] == [4, 2, 7]
