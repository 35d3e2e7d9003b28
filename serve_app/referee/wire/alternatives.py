"""Logprobs that a server reports beside its tokens' own: of the likeliest tokens, those that a request names, the
prompt's.

Some forms name a token by its text alone. It counts where one token only has this text, and where the server shows the
emitted tokens, whose ids are known, by texts that are these tokens' own, leading spaces included.
"""

from collections.abc import Mapping, Sequence

from serve_app.referee.judge.answer import Alternatives, KeptAlternatives
from serve_app.referee.wire.reply import Choice
from serve_app.text.tokenizer import Tokenizer

_LOST = "\ufffd"  # in the text of a token that is not whole characters
_MASKED = -9999.0  # that OpenAI's API reports of a token which is all but impossible, and servers of one they mask

Pairs = list[tuple[int, float]]


def alternatives_of(choice: Choice, num_prompt: int, ids: Sequence[int], tokenizer: Tokenizer) -> KeptAlternatives:
    """Return what is reported beside the logprobs of an answer, its prompt's first; ids: of its tokens, after
    num_prompt others."""
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
    shown = choice.token_texts or ()
    texts = [*zip(shown, map(tokenizer.token_text, ids), strict=True)] if len(shown) == len(ids) else []
    whole = [pair for pair in texts if _LOST not in str(pair[0])]
    is_alike = all(text == own for text, own in whole) and any(own.startswith(" ") for _, own in whole)
    by_text = tokenizer.ids_by_text if is_alike else {}
    for index, own in enumerate(ids):
        candidates = places[index] if places else ()
        named = [(by_text.get(one.text) if one.token_id is None else one.token_id, one.logprob) for one in candidates]
        pairs = [(token, value) for token, value in named if token is not None]
        unknown = len(named) - len(pairs)
        asked = scored[index] if scored and isinstance(scored[index], Mapping) else {}
        rest = [(int(token), float(value)) for token, value in asked.items() if value is not None]
        if unknown:
            _add(kept, num_prompt + index, [], [*pairs, *rest], unknown)
        else:
            _add(kept, num_prompt + index, _likeliest(pairs, own), rest, 0)
    return kept


def _add(kept: KeptAlternatives, place: int, top: Pairs, scored: Pairs, num_unknown: int) -> None:
    """Add one place; what is masked is left out."""
    usable = [tuple((token, value) for token, value in pairs if not value <= _MASKED) for pairs in (top, scored)]
    kept.num_left_out += num_unknown + len(top) + len(scored) - sum(map(len, usable))
    if any(usable):
        kept.add(Alternatives(place, *usable))


def _likeliest(pairs: Pairs, own: int) -> Pairs:
    """In their order. A server may add the emitted token, which need not be one of the likeliest."""
    ordered = sorted(pairs, key=lambda pair: -pair[1])
    return ordered[:-1] if ordered and ordered[-1][0] == own else ordered
