"""From a client's sampling parameters to the engine's, and what is reported in return."""

import dataclasses
from typing import Any

import pytest

from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault, InvalidRequest
from speculative.request import FinishReason, SamplingParams, Structure, TokenDelta, TokenLogprobs
from tests.support.fake_backend import fake_logprob
from tests.support.front_ends import DeltaSource, chat, chunks_of, completion, fake_front_end, front_end, reply_to


async def params_of(tokenizer: Tokenizer, wire: Any) -> SamplingParams:
    return (await front_end(DeltaSource(), tokenizer).prepare(wire)).requests[0].params


# ---- what reaches the engine


async def test_every_parameter_reaches_the_engine(tokenizer: Tokenizer) -> None:
    sent: dict[str, Any] = {
        "min_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 7, "min_p": 0.1, "presence_penalty": -1.0,
        "frequency_penalty": 0.5, "repetition_penalty": 1.2, "ignore_eos": True, "speculate": False,
        "reproducible": True, "prompt_logprobs": 3,
    }  # fmt: skip
    lists = {"stop_token_ids": [4, 4, 5], "allowed_token_ids": [3, 7, 3, 9], "logprob_token_ids": [9, 8, 9]}
    params = await params_of(tokenizer, completion(**sent, **lists, logit_bias={"7": -5, "9": 1}, logprobs=1))
    expected = sent | {name: tuple(dict.fromkeys(ids)) for name, ids in lists.items()}
    expected |= {"logit_bias": ((7, -5.0), (9, 1.0)), "logprobs": 1, "max_tokens": 50}
    assert params == SamplingParams(**expected)
    assert params.changed | {"bad_words", "structure"} == {own.name for own in dataclasses.fields(SamplingParams)}
    plain = await params_of(tokenizer, chat(response_format={"type": "json_object"}, top_k=-1))
    assert (plain.structure, plain.top_k) == (Structure("json_object"), 0)


async def test_a_bad_word_is_forbidden_at_the_start_and_after_a_space(tokenizer: Tokenizer) -> None:
    params = await params_of(tokenizer, completion(bad_words=["fox", " dog", "fox", "\n", "über x"]))
    texts = [tokenizer.decode(word, continuation=True) for word in params.bad_words]
    assert texts == ["fox", " fox", "dog", " dog", "\n", "über x", " über x"]
    assert params.bad_words == tuple(tuple(tokenizer.encode(text)) for text in texts)


async def test_bad_words_are_encoded_without_what_begins_a_prompt(sentencepiece: Tokenizer) -> None:
    params = await params_of(sentencepiece, completion(bad_words=["He"]))
    assert [sentencepiece.decode(word, continuation=True) for word in params.bad_words] == ["He", " He"]
    assert not {0, 1, 2} & {token for word in params.bad_words for token in word}


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [0, 2], "min_tokens": 1},
        {"allowed_token_ids": [2, 9], "stop_token_ids": [9], "min_tokens": 3},
        {"allowed_token_ids": "a", "bad_words": ["a"]},
    ],
)
async def test_parameters_that_leave_nothing_to_say_are_refused(tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    if fields["allowed_token_ids"] == "a":
        fields = fields | {"allowed_token_ids": tokenizer.encode("a")}
    with pytest.raises(InvalidRequest, match="no token to choose") as caught:
        await params_of(tokenizer, completion(**fields))
    assert caught.value.field == "allowed_token_ids"
    assert (await params_of(tokenizer, completion(**fields | {"min_tokens": 0, "bad_words": []}))).allowed_token_ids


# ---- what is reported in return


def ranked(tokenizer: Tokenizer, token: int, num_top: int) -> dict[str, Any]:
    """What the fake engine knows of a prompt token, as vLLM writes it."""
    entries = {}
    for rank in range(1, max(num_top, 1) + 1):
        reported = {"logprob": fake_logprob(token) - 0.5 * (rank - 1), "rank": rank}
        entries[str(token + rank - 1)] = reported | {"decoded_token": tokenizer.token_text(token + rank - 1)}
    return entries


async def test_a_chat_reports_prompt_logprobs_beside_the_choices(tokenizer: Tokenizer) -> None:
    front, _, _ = fake_front_end(tokenizer)
    reply = await reply_to(front, chat(prompt_logprobs=1, n=2, max_tokens=5))
    prompt = tokenizer.encode_chat([{"role": "user", "content": "hello"}])
    assert reply["prompt_logprobs"] == [None, *(ranked(tokenizer, token, 1) for token in prompt[1:])]
    assert all("prompt_logprobs" not in choice for choice in reply["choices"])
    chunks = await chunks_of(front, chat(prompt_logprobs=1, n=2, max_tokens=5, stream=True))
    reported = [chunk["prompt_logprobs"] for chunk in chunks if "prompt_logprobs" in chunk]
    assert reported == [reply["prompt_logprobs"]]
    assert "prompt_logprobs" not in await reply_to(front, chat(max_tokens=5))


async def test_prompt_logprobs_that_come_without_a_token_wait_for_the_first_piece(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(6, -2.0, 3, ((9, -0.5), (8, float("-inf"))))
    source = DeltaSource(
        TokenDelta("", prompt_logprobs=(entry,)), TokenDelta("", (7,), finish_reason=FinishReason.LENGTH)
    )
    reply = await reply_to(front_end(source, tokenizer), completion(prompt=[5, 6], prompt_logprobs=2))
    names = tokenizer.token_text
    assert reply["choices"][0]["prompt_logprobs"] == [
        None,
        {
            "6": {"logprob": -2.0, "rank": 3, "decoded_token": names(6)},
            "9": {"logprob": -0.5, "rank": 1, "decoded_token": names(9)},
            "8": {"logprob": -9999.0, "rank": 2, "decoded_token": names(8)},
        },
    ]


@pytest.mark.parametrize("reported", [None, (), (TokenLogprobs(6, -1.0, 1),) * 2])
async def test_missing_prompt_logprobs_are_a_fault_and_not_made_up(tokenizer: Tokenizer, reported: Any) -> None:
    source = DeltaSource(TokenDelta("", (7,), prompt_logprobs=reported, finish_reason=FinishReason.LENGTH))
    with pytest.raises(EngineFault, match="prompt of 2 tokens"):
        await reply_to(front_end(source, tokenizer), completion(prompt=[5, 6], prompt_logprobs=0))


async def test_a_score_of_a_forbidden_token_is_finite_and_a_missing_one_a_fault(tokenizer: Tokenizer) -> None:
    entry = TokenLogprobs(7, -0.5, 1, scored=((3, float("-inf")), (7, -0.5)))
    source = DeltaSource(TokenDelta("", (7,), logprobs=(entry,), finish_reason=FinishReason.LENGTH))
    reply = await reply_to(front_end(source, tokenizer), completion(logprob_token_ids=[3, 7]))
    assert reply["choices"][0]["logprobs"]["scored_logprobs"] == [{"3": -9999.0, "7": -0.5}]
    with pytest.raises(EngineFault, match="logprob_token_ids"):
        await reply_to(front_end(source, tokenizer), completion(logprob_token_ids=[7, 3]))


# ---- min_tokens and stop strings


@pytest.mark.parametrize("run_length", [1, 3, 8])
async def test_a_stop_string_does_not_end_a_text_before_min_tokens(tokenizer: Tokenizer, run_length: int) -> None:
    front, _, script = fake_front_end(tokenizer, run_length=run_length)
    script.say([*tokenizer.encode("!"), *tokenizer.encode("!"), *tokenizer.encode("x"), *tokenizer.encode("!"), 30])
    for min_tokens, text in ((0, ""), (1, "!"), (2, "!!x"), (3, "!!x")):
        reply = await reply_to(front, completion(stop="!", min_tokens=min_tokens))
        assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == (text, "stop")
    reply = await reply_to(front, completion(stop="!", min_tokens=4))
    assert reply["choices"][0]["text"] == "!!x!" + tokenizer.token_text(30)
