"""The text of an answer, from its tokens, until a stop string ends it."""

from collections.abc import Sequence

from serve_app.text.tokenizer import Detokenizer, StopMatcher


class AnswerText:
    """Takes tokens as they come, and gives the text that may go out.

    Args:
        detokenizer: of the answer.
        matcher: of its stop strings.
        include_stop: whether a token that ends the answer has a text.
        min_tokens: no stop string counts before so many tokens: what was said until then is not searched.
    """

    def __init__(self, detokenizer: Detokenizer, matcher: StopMatcher, *, include_stop: bool, min_tokens: int) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self._searches = matcher.searches
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self.num_delivered = 0
        """Tokens of the answer; one that completes a stop string is the last."""

    @property
    def stopped(self) -> bool:
        """Return whether a stop string ended it."""
        return self._matcher.stopped

    @property
    def found(self) -> str | None:
        """The stop string that ended it."""
        return self._matcher.found

    def push(self, ids: Sequence[int], stop_token_id: int | None) -> tuple[list[str], list[str]]:
        """Take in the next tokens; stop_token_id: that of the last if it ended the answer.

        Returns the text of each of them, and what may go out with each that is delivered.
        """
        without_text = bool(ids) and stop_token_id == ids[-1] and not self._include_stop
        texts = [*self._detokenizer.push(ids[:-1]), ""] if without_text else self._detokenizer.push(ids)
        if not self._searches and self.num_delivered >= self._min_tokens:
            self.num_delivered += len(texts)
            return texts, texts.copy()
        released: list[str] = []
        for number, text in enumerate(texts, start=self.num_delivered):
            if number < self._min_tokens:
                released.append(text)
                continue
            released.append(self._matcher.push(text))
            if self._matcher.stopped:
                break
        self.num_delivered += len(released)
        return texts, released

    def end(self) -> str:
        """The text that was held back, once no token follows; nothing behind a stop string."""
        if self._matcher.stopped:
            return ""
        rest = self._matcher.push(self._detokenizer.finish())
        return rest if self._matcher.stopped else rest + self._matcher.finish()
