"""The text of an answer, from its tokens, until a stop string ends it."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass

from serve_app.text.tokenizer import Detokenizer, StopMatcher


@dataclass(slots=True)
class AnswerText:
    """Takes tokens as they come, and gives the text that may go out."""

    detokenizer: Detokenizer  # of the answer
    matcher: StopMatcher  # of its stop strings
    _: KW_ONLY
    include_stop: bool  # whether a token that ends the answer has a text
    min_tokens: int  # no stop string counts before so many tokens: what was said until then is not searched
    num_delivered: int = 0  # tokens of the answer; one that completes a stop string is the last

    @property
    def stopped(self) -> bool:
        """Return whether a stop string ended it."""
        return self.matcher.stopped

    @property
    def found(self) -> str | None:
        """The stop string that ended it."""
        return self.matcher.found

    def push(self, ids: Sequence[int], stop_token_id: int | None) -> tuple[list[str], list[str]]:
        """Take in the next tokens; stop_token_id: that of the last if it ended the answer.

        Returns the text of each of them, and what may go out with each that is delivered.
        """
        without_text = bool(ids) and stop_token_id == ids[-1] and not self.include_stop
        texts = [*self.detokenizer.push(ids[:-1]), ""] if without_text else self.detokenizer.push(ids)
        if not self.matcher.strings and self.num_delivered >= self.min_tokens:
            self.num_delivered += len(texts)
            return texts, texts.copy()
        released: list[str] = []
        for number, text in enumerate(texts, start=self.num_delivered):
            if number < self.min_tokens:
                released.append(text)
                continue
            released.append(self.matcher.push(text))
            if self.matcher.stopped:
                break
        self.num_delivered += len(released)
        return texts, released

    def end(self) -> str:
        """The text that was held back, once no token follows; nothing behind a stop string."""
        if self.matcher.stopped:
            return ""
        rest = self.matcher.push(self.detokenizer.finish())
        return rest if self.matcher.stopped else rest + self.matcher.finish()
