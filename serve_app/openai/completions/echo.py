"""`echo: true`: each choice begins with its prompt, and its logprobs with the prompt's."""

from collections.abc import Sequence
from dataclasses import dataclass

from serve_app.openai.replies import ChoiceDelta, TokenEntry
from serve_app.text.tokenizer import Tokenizer
from speculative.request import FinishReason, TokenDelta


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt as it is echoed: its text, and for each of its tokens the characters before it."""

    text: str
    offsets: tuple[int, ...]

    @classmethod
    def of(
        cls, prompt: str | None, token_ids: Sequence[int], tokenizer: Tokenizer, *, added: int = 0
    ) -> "EchoedPrompt":
        """A prompt that was sent as text, or (None) as token ids, whose text then includes special tokens.

        The first `added` tokens were put before the text by the tokenizer, and take no characters of it.
        """
        detokenizer = tokenizer.detokenizer(skip_special=False)
        texts = detokenizer.push(token_ids[added:])
        whole = "".join(texts) + detokenizer.finish() if prompt is None else prompt
        offsets, offset = [0] * added, 0
        for text in texts:
            offsets.append(offset)
            # A prompt as it was sent lacks the space that sentencepiece puts behind a special token.
            bare = text.removeprefix(" ")
            shown = bare if not whole.startswith(text, offset) and whole.startswith(bare, offset) else text
            offset = min(offset + len(shown), len(whole))
        return cls(whole, tuple(offsets))


class Echo:
    """Puts a prompt before the first piece of each of its choices.

    Its logprobs come with the first choice alone; what the others say before waits for them.

    Args:
        prompt: to echo.
        with_logprobs: whether its tokens' entries are echoed, too.
    """

    def __init__(self, prompt: EchoedPrompt, *, with_logprobs: bool) -> None:
        self.prompt = prompt
        self.entries: tuple[TokenEntry, ...] | None = None if with_logprobs else ()
        self._waiting: list[ChoiceDelta] = []

    def prepend(self, piece: ChoiceDelta | None) -> list[ChoiceDelta]:
        """The pieces that may go out once this one has come, first ones with the prompt before them."""
        if piece is not None:
            self._waiting.append(piece)
        if self.entries is None:
            return []
        released, self._waiting = self._waiting, []
        return [self._echoed(piece, self.entries) if piece.first else piece for piece in released]

    def _echoed(self, piece: ChoiceDelta, entries: tuple[TokenEntry, ...]) -> ChoiceDelta:
        logprobs = None if piece.logprobs is None else entries + piece.logprobs
        return piece._replace(text=self.prompt.text + piece.text, logprobs=logprobs)


def without_answer(delta: TokenDelta) -> TokenDelta:
    """A delta of a request that asked for no answer (`max_tokens: 0`): its engine had to generate a token."""
    reason = FinishReason.LENGTH if delta.finish_reason is FinishReason.STOP else delta.finish_reason
    logprobs = None if delta.logprobs is None else ()
    return delta._replace(token_ids=(), kinds=(), logprobs=logprobs, stop_token_id=None, finish_reason=reason)
