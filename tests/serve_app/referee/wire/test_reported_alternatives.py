"""What a watched server reports beside the logprobs is read in the forms that servers have, and compared."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest_asyncio

from deploy.run.replayers import ReplayerOptions, make_replayer
from deploy.watch.referee import Referee, RefereeOptions
from deploy.watch.run import running_referee
from serve_app.referee.judge.answer import Alternatives, KeptAlternatives
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.judge.verdicts import Verdict
from serve_app.referee.wire.alternatives import alternatives_of
from serve_app.referee.wire.exchange import COMPLETIONS, Exchange
from serve_app.referee.wire.reply import read_reply
from serve_app.text.tokenizer import Tokenizer
from speculative.request import Request, SamplingParams

PROMPT, ANSWER, NAMED = [5, 6, 7, 8], [20, 21, 22], [30, 31]
Json = dict[str, Any]


@pytest_asyncio.fixture
async def referee(folder: Path) -> AsyncIterator[Referee]:
    options = RefereeOptions(served="tiny", tolerance=Tolerance.against_float32("float32"))
    async with running_referee(options, ReplayerOptions(folder, threads=1)) as running:
        yield running


async def sound_choice(folder: Path) -> Json:
    """A choice as vLLM and truespec report it, with the numbers of `transformers`."""
    other = make_replayer(ReplayerOptions(folder, engine="transformers", threads=1))
    await other.start()
    whole = (*PROMPT, *ANSWER)
    params = SamplingParams(prompt_logprobs=2)
    request = Request("r", whole, params, score_from=1, scored_ids=(tuple(NAMED),) * (len(whole) - 1))
    entries = (await other.replay(request)).entries
    await other.stop()
    of_prompt = [
        {str(token): {"logprob": value} for token, value in ((one.token_id, one.logprob), *one.top)}
        for one in entries[: len(PROMPT) - 1]
    ]
    own = entries[len(PROMPT) - 1 :]
    names = [{f"token_id:{token}": value for token, value in ((one.token_id, one.logprob), *one.top)} for one in own]
    return {
        "index": 0,
        "token_ids": ANSWER,
        "finish_reason": "length",
        "prompt_logprobs": [None, *of_prompt],
        "logprobs": {
            "tokens": [f"token_id:{token}" for token in ANSWER],
            "token_logprobs": [one.logprob for one in own],
            "top_logprobs": names,
            "scored_logprobs": [{str(token): value for token, value in one.scored} for one in own],
        },
    }


async def test_every_number_is_read_and_compared(referee: Referee, folder: Path) -> None:
    body = {"prompt": PROMPT, "logprobs": 2, "prompt_logprobs": 2, "logprob_token_ids": NAMED}
    reply = json.dumps({"id": "cmpl-1", "choices": [await sound_choice(folder)]}).encode()
    (checked,) = await referee.judge(Exchange(COMPLETIONS, json.dumps(body).encode(), reply, False, 5.0, 6.0))
    assert (checked.verdict, checked.reason) == (Verdict.VERIFIED, "replayed")
    found = checked.to_wire()["alternatives"]
    assert found["num_compared"] >= len(ANSWER) * (2 + len(NAMED)) + (len(PROMPT) - 1) * 2 - len(PROMPT + ANSWER)
    assert found["num_left_out"] == 0


def read(tokenizer: Tokenizer, logprobs: Json, ids: list[int]) -> KeptAlternatives:
    choice = {"index": 0, "token_ids": ids, "finish_reason": "length", "logprobs": logprobs}
    reply = json.dumps({"id": "cmpl-1", "choices": [choice]}).encode()
    found = read_reply(Exchange(COMPLETIONS, b"{}", reply, False, 5.0, 6.0)).first
    return alternatives_of(found, 4, ids, tokenizer)


def test_texts_count_where_the_server_shows_emitted_tokens_by_theirs(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    texts = {token: tokenizer.token_text(token) for token in range(tokenizer.vocab_size)}
    single = {text for text in texts.values() if list(texts.values()).count(text) == 1 and "\ufffd" not in text}
    spaced = next(token for token, text in texts.items() if text.startswith(" ") and text in single)
    other = next(token for token, text in texts.items() if text in single and token != spaced and text.strip())
    top = [{texts[other]: -0.5, texts[spaced]: -1.0}]
    shown = {"token_logprobs": [-1.0], "tokens": [texts[spaced]], "top_logprobs": top}
    assert read(tokenizer, shown, [spaced]).kept == [Alternatives(4, ((other, -0.5),))], "the emitted token came last"
    stripped = shown | {"tokens": [texts[spaced].strip() or "x"]}
    lost = read(tokenizer, stripped, [spaced])
    assert (lost.kept, lost.num_left_out) == ([], 2)


def test_what_is_masked_or_does_not_belong_to_the_tokens_is_left_out_and_counted(folder: Path) -> None:
    tokenizer = Tokenizer.from_folder(folder)
    top = [{"token_id:9": -0.5, "token_id:10": -9999.0, "token_id:20": -0.7}]
    shown = {"token_logprobs": [-0.7], "tokens": ["token_id:20"], "top_logprobs": top}
    kept = read(tokenizer, shown, [20])
    assert kept.kept == [Alternatives(4, ((9, -0.5), (20, -0.7)))]
    assert kept.num_left_out == 1
    assert read(tokenizer, shown, [20, 21]).num_left_out == 3
