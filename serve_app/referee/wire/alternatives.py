"""Logprobs that a server reports beside its tokens' own: of the likeliest tokens, those that a request names, the
prompt's.

Some forms name a token by its text alone. It counts where one token only has this text, and where the server shows the
emitted tokens, whose ids are known, by texts that are these tokens' own, leading spaces included.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from serve_app.referee.judge.answer import Alternatives, KeptAlternatives
from serve_app.referee.wire.reply import Candidate, Choice
from serve_app.text.tokenizer import Tokenizer

_LOST = "\ufffd"  # in the text of a token that is not whole characters
_MASKED = -9999.0  # that OpenAI's API reports of a token which is all but impossible, and servers of one they mask

Pairs = list[tuple[int, float]]


class AlternativesReader:
    """Reads what the choices of a server's replies report beside the logprobs.

    Args:
        tokenizer: of the model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def of_choice(self, choice: Choice, num_prompt: int, ids: Sequence[int]) -> KeptAlternatives:
        """Return the alternatives of an answer, its prompt's first; ids: of its tokens, after num_prompt others."""
        kept = KeptAlternatives()
        for place, entries in enumerate((choice.prompt_logprobs or ())[1:num_prompt], start=1):
            known = {int(token): one for token, one in (entries or {}).items()}
            ranked = [(token, float(one["logprob"])) for token, one in known.items() if one.get("logprob") is not None]
            own = next(iter(known), -1)  # a place's own token comes first
            _add(kept, place, _likeliest(ranked, own), [], 0)
        places = choice.candidates() or ()
        scored = choice.scored_logprobs or ()
        if len(places) not in (0, len(ids)) or len(scored) not in (0, len(ids)):
            kept.num_left_out += sum(map(len, places)) + sum(len(one or ()) for one in scored)
            return kept
        by_text = self._by_text if self._shows_texts(choice, ids) else {}
        for index, own in enumerate(ids):
            pairs, unknown = _with_ids(places[index] if places else (), by_text)
            named = _numbers(scored[index] if scored else {})
            top = [] if unknown else _likeliest(pairs, own)
            rest = [*(pairs if unknown else ()), *named]
            _add(kept, num_prompt + index, top, rest, unknown)
        return kept

    def _shows_texts(self, choice: Choice, ids: Sequence[int]) -> bool:
        """Return whether the texts by which a server shows tokens are those that the tokenizer gives them."""
        shown = choice.token_texts or ()
        if len(shown) != len(ids):
            return False
        pairs = [(text, self._tokenizer.token_text(token)) for text, token in zip(shown, ids, strict=True)]
        whole = [pair for pair in pairs if _LOST not in str(pair[0])]
        return all(text == own for text, own in whole) and any(own.startswith(" ") for _, own in whole)

    @cached_property
    def _by_text(self) -> Mapping[str, int]:
        return tokens_by_text(self._tokenizer)


def tokens_by_text(tokenizer: Tokenizer) -> dict[str, int]:
    """The token of each text that one token only has."""
    found: dict[str, int | None] = {}
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_text(token)
        found[text] = None if text in found else token
    return {text: token for text, token in found.items() if token is not None and text and _LOST not in text}


def _add(kept: KeptAlternatives, place: int, top: Pairs, scored: Pairs, num_unknown: int) -> None:
    """Add one place; what is masked is left out."""
    usable = [tuple((token, value) for token, value in pairs if not value <= _MASKED) for pairs in (top, scored)]
    kept.num_left_out += num_unknown + len(top) + len(scored) - sum(map(len, usable))
    if any(usable):
        kept.add(Alternatives(place, *usable))


def _with_ids(candidates: Iterable[Candidate], by_text: Mapping[str, int]) -> tuple[Pairs, int]:
    """The candidates whose tokens are known, and the number of the others."""
    pairs: Pairs = []
    num_unknown = 0
    for one in candidates:
        token = by_text.get(one.text) if one.token_id is None else one.token_id
        if token is None:
            num_unknown += 1
        else:
            pairs.append((token, one.logprob))
    return pairs, num_unknown


def _likeliest(pairs: Pairs, own: int) -> Pairs:
    """In their order. A server may add the emitted token, which need not be one of the likeliest."""
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    return ordered[:-1] if ordered and ordered[-1][0] == own else ordered


def _numbers(scored: Any) -> Pairs:
    known = scored.items() if isinstance(scored, Mapping) else ()
    return [(int(token), float(value)) for token, value in known if value is not None]
