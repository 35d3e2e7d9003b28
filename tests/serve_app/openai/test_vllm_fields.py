"""Fields that vLLM's API has and OpenAI's has not."""

import dataclasses
from typing import Any

import pytest
from tokenizers import processors

from serve_app.text.tokenizer import Tokenizer
from speculative.request import FinishReason, Request, TokenDelta, TokenLogprobs
from tests.support.front_ends import DeltaSource, chat, completion, fake_front_end, front_end, reply_to


def stopped_by(token: int, *before: int) -> DeltaSource:
    return DeltaSource(TokenDelta("", (*before, token), finish_reason=FinishReason.STOP, stop_token_id=token))


async def text_of(source: Any, tokenizer: Tokenizer, **fields: Any) -> str:
    reply = await reply_to(front_end(source, tokenizer), completion(**fields))
    text: str = reply["choices"][0]["text"]
    return text


async def test_special_tokens_are_shown_where_they_are_not_to_be_skipped(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("one"), 1, *tokenizer.encode("two")]
    source = DeltaSource(TokenDelta("", tuple(ids), finish_reason=FinishReason.LENGTH))
    assert await text_of(source, tokenizer) == "onetwo"
    assert await text_of(source, tokenizer, skip_special_tokens=False) == "one<|im_start|>two"


async def test_what_stopped_an_answer_is_shown_on_request(tokenizer: Tokenizer) -> None:
    first, second = tokenizer.encode("a")[0], tokenizer.encode("b")[0]
    source = stopped_by(second, first)
    assert await text_of(source, tokenizer, stop_token_ids=[second]) == "a"
    assert await text_of(source, tokenizer, stop_token_ids=[second], include_stop_str_in_output=True) == "ab"
    ended = stopped_by(2, first)
    assert await text_of(ended, tokenizer, include_stop_str_in_output=True) == "a", "the end of text is special"


@pytest.mark.parametrize("make", [completion, chat])
async def test_tokens_are_named_by_id_where_that_is_asked_for(tokenizer: Tokenizer, make: Any) -> None:
    entry = TokenLogprobs(7, -0.5, 1, ((9, -0.25),))
    source = DeltaSource(TokenDelta("", (7,), logprobs=(entry,), finish_reason=FinishReason.LENGTH))
    asked = {"logprobs": 1} if make is completion else {"logprobs": True, "top_logprobs": 1}
    reply = await reply_to(front_end(source, tokenizer), make(**asked, return_tokens_as_token_ids=True))
    logprobs = reply["choices"][0]["logprobs"]
    if make is completion:
        assert logprobs["tokens"] == ["token_id:7"]
        assert logprobs["top_logprobs"] == [{"token_id:9": -0.25, "token_id:7": -0.5}]
    else:
        assert logprobs["content"][0]["token"] == "token_id:7"
        assert logprobs["content"][0]["top_logprobs"][0]["token"] == "token_id:9"


async def prompts_of(tokenizer: Tokenizer, wire: Any) -> list[tuple[int, ...]]:
    front, _, _ = fake_front_end(tokenizer)
    return [request.prompt_token_ids for request in (await front.prepare(wire)).requests]


async def test_a_prompt_is_cut_at_its_beginning(tokenizer: Tokenizer) -> None:
    long = [5, 6, 7] * 40  # longer than the model's context of 100 tokens
    assert await prompts_of(tokenizer, completion(prompt=long, truncate_prompt_tokens=4)) == [tuple(long[-4:])]
    assert await prompts_of(tokenizer, completion(prompt=[5, 6], truncate_prompt_tokens=4)) == [(5, 6)]
    fits = await prompts_of(tokenizer, completion(prompt=long, truncate_prompt_tokens=-1, max_tokens=30))
    assert fits == [tuple(long[-70:])]
    (cut,) = await prompts_of(tokenizer, chat(truncate_prompt_tokens=3))
    assert cut == tuple(tokenizer.encode_chat([{"role": "user", "content": "hello"}])[-3:])


async def test_an_echo_shows_what_is_left_of_a_prompt(tokenizer: Tokenizer) -> None:
    front, _, _ = fake_front_end(tokenizer)
    wire = completion(prompt="one two three", truncate_prompt_tokens=2, echo=True, max_tokens=0, logprobs=0)
    choice = (await reply_to(front, wire))["choices"][0]
    assert choice["text"] == tokenizer.decode(tokenizer.encode("one two three")[-2:], skip_special=False)
    assert len(choice["logprobs"]["tokens"]) == 2


async def test_a_models_own_first_tokens_are_left_out_or_added(sentencepiece: Tokenizer) -> None:
    wrapped = sentencepiece._wrapped
    assert sentencepiece.prefix_ids == ()
    wrapped.backend_tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", [("<s>", 1)])
    try:
        tokenizer = Tokenizer(wrapped)
        assert tokenizer.prefix_ids == (1,)
        (with_it,) = await prompts_of(tokenizer, completion(prompt="He"))
        (without,) = await prompts_of(tokenizer, completion(prompt="He", add_special_tokens=False))
        assert with_it == (1, *without)
        echoed = await reply_to(
            front_end(DeltaSource(TokenDelta("", (9,), finish_reason=FinishReason.LENGTH)), tokenizer),
            completion(prompt="He", echo=True, max_tokens=0),
        )
        assert echoed["choices"][0]["text"] == "He"
    finally:
        wrapped.backend_tokenizer.post_processor = processors.Sequence([])


async def test_a_salt_reaches_the_engine_and_parts_the_cache(tokenizer: Tokenizer) -> None:
    front, _, _ = fake_front_end(tokenizer)
    job = await front.prepare(completion(n=2, cache_salt="tenant"))
    assert [request.cache_salt for request in job.requests] == ["tenant"] * 2
    salted, plain = job.requests[0], dataclasses.replace(job.requests[0], cache_salt="")
    assert plain.cache_scope == "" and salted.cache_scope != plain.cache_scope
    other = Request("r", (1,), adapter="tenant")
    assert (
        len({salted.cache_scope, other.cache_scope, dataclasses.replace(other, cache_salt="tenant").cache_scope}) == 3
    )
