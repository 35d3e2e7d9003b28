"""`echo` on /v1/completions: the prompt and its logprobs before the answer's, in OpenAI's old form."""

import itertools
from typing import Any

import pytest

from serve_app.openai.completions.echo import EchoedPrompt
from serve_app.openai.frontend import FrontEnd
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import EngineFault
from speculative.request import FinishReason, TokenDelta, TokenLogprobs
from tests.support.front_ends import DeltaSource, completion, fake_front_end, front_end, reply_to

PROMPT = "hello the quick fox"


async def choice_of(front: FrontEnd, **fields: Any) -> dict[str, Any]:
    return (await reply_to(front, completion(**fields)))["choices"][0]


async def test_without_logprobs_the_engine_is_not_asked_for_the_prompts(tokenizer: Tokenizer) -> None:
    front, _, _ = fake_front_end(tokenizer)
    job = await front.prepare(completion(prompt=PROMPT, echo=True, n=2))
    assert [request.params.prompt_logprobs for request in job.requests] == [None, None]
    choice = await choice_of(front, prompt=PROMPT, echo=True)
    assert choice["text"].startswith(PROMPT) and choice["logprobs"] is None


async def test_a_stop_token_in_the_place_of_nothing_is_no_stop(tokenizer: Tokenizer) -> None:
    source = DeltaSource(TokenDelta("", (2,), finish_reason=FinishReason.STOP, stop_token_id=2))
    choice = await choice_of(front_end(source, tokenizer), prompt=[5, 6], max_tokens=0, echo=True)
    assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode([5, 6]), "length")


async def test_the_echo_has_as_many_top_tokens_as_the_answer_and_prompt_logprobs_its_own_number(
    tokenizer: Tokenizer,
) -> None:
    front, _, _ = fake_front_end(tokenizer)
    for echoed, own in ((1, 3), (3, 1)):
        choice = await choice_of(front, prompt=[5, 6], max_tokens=0, logprobs=echoed, prompt_logprobs=own, echo=True)
        assert (len(choice["logprobs"]["top_logprobs"][1]), len(choice["prompt_logprobs"][1])) == (echoed, own)


async def test_what_another_choice_says_before_the_prompts_logprobs_come_waits_for_them(tokenizer: Tokenizer) -> None:
    said = (TokenLogprobs(9, -0.5, 1),)
    late = TokenDelta("0", (7,), logprobs=(TokenLogprobs(7, -0.25, 1),), finish_reason=FinishReason.LENGTH)

    class Late(DeltaSource):
        async def stream(self, requests: Any) -> Any:
            yield TokenDelta(requests[1].request_id, (9,), logprobs=said, finish_reason=FinishReason.LENGTH)
            yield late._replace(request_id=requests[0].request_id, prompt_logprobs=(TokenLogprobs(6, -2.0, 3),))

    reply = await reply_to(
        front_end(Late(), tokenizer), completion(prompt=[5, 6], n=2, max_tokens=1, logprobs=0, echo=True)
    )
    assert [choice["logprobs"]["token_logprobs"] for choice in reply["choices"]] == [
        [None, -2.0, -0.25],
        [None, -2.0, -0.5],
    ]


async def test_logprobs_of_the_prompt_that_do_not_come_are_a_fault(tokenizer: Tokenizer) -> None:
    source = DeltaSource(TokenDelta("", (7,), logprobs=(TokenLogprobs(7, -1.0, 1),), finish_reason=FinishReason.LENGTH))
    for most in (0, 1):
        with pytest.raises(EngineFault, match="prompt of 2 tokens"):
            await choice_of(front_end(source, tokenizer), prompt=[5, 6], max_tokens=most, logprobs=0, echo=True)


@pytest.mark.parametrize("prompt_logprobs", [None, 1])
async def test_logprobs_of_named_tokens_alone_do_not_ask_for_the_prompts(
    tokenizer: Tokenizer, prompt_logprobs: int | None
) -> None:
    front, _, _ = fake_front_end(tokenizer)
    fields: dict[str, Any] = {"prompt": [5, 6], "max_tokens": 1, "logprob_token_ids": [7], "echo": True}
    choice = await choice_of(front, **fields, prompt_logprobs=prompt_logprobs)
    assert choice["text"].startswith(tokenizer.decode([5, 6])) and choice["logprobs"]["text_offset"] == [2]


def test_a_prompt_that_breaks_off_within_a_character_is_echoed_as_it_decodes(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello 🙂")[:-1]
    echoed = EchoedPrompt.of(None, ids, tokenizer)
    assert echoed.text == tokenizer.decode(ids, skip_special=False) == "hello \ufffd"


@pytest.mark.parametrize("text", ["Hello", " Hello  wörld", "<s>Hello</s>Hew", "<s> Hello", "H</s>"])
def test_offsets_point_into_the_text_that_was_sent(sentencepiece: Tokenizer, text: str) -> None:
    echoed = EchoedPrompt.of(text, sentencepiece.encode(text), sentencepiece)
    shown = [text[start:end] for start, end in itertools.pairwise([*echoed.offsets, len(text)])]
    names = [sentencepiece.token_text(token) for token in sentencepiece.encode(text)]
    assert [one.strip() for one in shown] == [name.strip() for name in names]


def test_tokens_that_the_tokenizer_put_before_a_text_take_no_characters_of_it(tokenizer: Tokenizer) -> None:
    ids = [0, *tokenizer.encode("hello")]
    echoed = EchoedPrompt.of("hello", ids, tokenizer, added=1)
    assert echoed.text == "hello" and echoed.offsets[:2] == (0, 0)
    special = EchoedPrompt.of("<|im_start|>hello", [1, *ids[1:]], tokenizer)
    assert special.offsets[:2] == (0, len("<|im_start|>"))
    assert EchoedPrompt.of(None, [1, *ids[1:]], tokenizer).text == "<|im_start|>hello"
