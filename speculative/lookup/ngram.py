"""Prompt-lookup drafting: what followed the last time these tokens were seen.

Source: Saxena, "Prompt Lookup Decoding" (2023). Drafts are point masses; they depend on the sequence's own tokens
alone.
"""

from dataclasses import dataclass

from speculative.drafters import drafter
from speculative.options import OptionError, Options, option
from speculative.state.sequence import Sequence


@dataclass(frozen=True, slots=True)
class NgramOptions(Options):
    """Lengths of the runs that are looked up."""

    ngram_max: int = option(4, "`ngram`: longest run of tokens to look up.", least=1)
    ngram_min: int = option(2, "`ngram`: shortest run of tokens to look up.", least=1)

    def check(self) -> None:
        """The shortest is no longer than the longest."""
        if self.ngram_min > self.ngram_max:
            raise OptionError("ngram_min", f"must be at most ngram_max ({self.ngram_max}), got {self.ngram_min}.")


@drafter("ngram", NgramOptions)
class NgramDrafter:
    """Looks for the longest recent suffix that occurred before in the same sequence, and drafts what followed it.

    Each sequence is kept as a string, a character for each token: searching it takes about a nanosecond a token, and
    nothing has to be indexed.
    """

    def __init__(self, options: NgramOptions, max_drafts: int) -> None:
        del max_drafts
        self._options = options
        self._texts: dict[str, str] = {}

    def forget(self, request_id: str) -> None:
        """Drop the text of a request that has left."""
        self._texts.pop(request_id, None)

    def draft(self, sequence: Sequence, max_drafts: int) -> list[int]:
        """Up to `max_drafts` tokens; none where no n-gram was seen before."""
        return self.find(sequence, max_drafts)[0]

    def find(self, sequence: Sequence, max_drafts: int) -> tuple[list[int], int]:
        """Return drafts, and the length of the suffix that was seen before, 0 for none.

        An occurrence that overlaps the end goes on periodically, so a loop is drafted to full length.
        """
        if max_drafts == 0:
            return [], 0
        tokens, request_id = sequence.tokens, sequence.request.request_id
        text = self._texts.get(request_id, "")
        self._texts[request_id] = text = text + "".join(map(chr, tokens[len(text) :]))
        length, after = longest_repeat(text, self._options.ngram_min, self._options.ngram_max)
        if length == 0:
            return [], 0
        period = len(tokens) - after
        return [tokens[after + offset % period] for offset in range(max_drafts)], length


def longest_repeat(text: str, least: int, most: int) -> tuple[int, int]:
    """The longest suffix, of `least` to `most` characters, that also occurs before the end of the text.

    Returns:
        Its length and where its last such occurrence ends; 0 and 0 if there is none.
    """
    length, end = 0, len(text)
    while length < most and end > 1:
        wanted = max(length + 1, least)
        start = text.rfind(text[-wanted:], 0, end - 1)  # where shorter ones end further on, this one does not
        if start < 0:
            break
        length, end = wanted, start + wanted
        while length < most and start > 0 and text[start - 1] == text[-length - 1]:
            start, length = start - 1, length + 1
    return (length, end) if length else (0, 0)
