"""From an exchange with a server to its answers, as the referee judges them, one a choice."""

import hashlib
import json
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from serve_app.backends.base import ModelInfo
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.strata import WATCHED_LENGTHS, WATCHED_POSITIONS, shared
from serve_app.referee.wire.alternatives import alternatives_of
from serve_app.referee.wire.demands import CHANGES_CHOICES, Demands, Made, counts_all
from serve_app.referee.wire.exchange import CHAT, COMPLETIONS, Exchange
from serve_app.referee.wire.reply import Choice, Json, Reply, Unreadable, read_object, read_reply
from serve_app.referee.wire.sampling import Sampled, sampled_as
from serve_app.referee.wire.vendors import FALLBACK, Vendor, vendor_of
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest
from speculative.request import Request, SamplingParams

UNNAMED = "server"
"""The replica of answers whose headers name none."""

_MISSING = "the reply does not report all of its token ids"
_ENDS = ("stop", "length", "tool_calls")
_LONGEST_TEXT = 10_000  # bytes, of which other spellings are looked for
_MOST_REPLICAS, _LONGEST_REPLICA = 256, 100
_OTHERS = "others"


def bucket(value: int, names: Mapping[str, int]) -> str:
    """The stratum of a value; `names` gives the first value beyond each, in ascending order."""
    return next(name for name, beyond in names.items() if value < beyond)


def _strata(
    params: SamplingParams, num_prompt: int, num_tokens: int, num_cached: int | None, ended: str | None
) -> Iterator[tuple[str, ...]]:
    """Return each token's strata: length, position, prefix cache, sampling, and the end of the answer."""
    common = (
        "all",
        "greedy" if params.greedy else "filtered" if params.filtered else "sampled",
        "cached_prefix" if num_cached else "computed_prefix",
        f"ended_{ended if ended in _ENDS else 'otherwise'}",
    )
    for index in range(num_tokens):
        yield (*common, bucket(index, WATCHED_POSITIONS), bucket(num_prompt + index, WATCHED_LENGTHS))


@dataclass(slots=True)
class ExchangeReader:
    """Reads the answers in exchanges.

    Args:
        defaults: what the server samples with where a request does not say.
        coldest: the temperature below which rounding decides between tokens, so that an answer is judged as one of
            temperature 0.
    """

    model: ModelInfo  # that replays
    tokenizer: Tokenizer  # of the same folder; for prompts and answers whose token ids are not reported
    dialect: str = "auto"  # the server's vendor; "auto" = as the proxy found, and as vLLM where that is not known
    defaults: Mapping[str, float] = field(default_factory=dict)
    coldest: float = 0.0
    processed: bool = False  # whether the server's logprobs are those after temperature and filters
    _replicas: set[str] = field(default_factory=set)
    _generation: Json = field(init=False)  # the model's generation_config.json; {} = it has none
    _spellings: tuple[Mapping[bytes, int], int] = field(init=False)

    def __post_init__(self) -> None:
        generation = Path(self.model.folder) / "generation_config.json"
        self._generation = json.loads(generation.read_text(encoding="utf-8")) if generation.is_file() else {}
        texts = Counter(map(self.tokenizer.token_bytes, range(self.tokenizer.vocab_size)))
        self._spellings = texts, max(map(len, texts))

    def answers(self, exchange: Exchange) -> list[Answer]:
        """The answers of an exchange, in the order of its choices. Raises Unreadable: it cannot be computed again; the
        message says why."""
        body, reply = read_object(exchange.request, "the request is not a JSON object"), read_reply(exchange)
        vendor = vendor_of((exchange.dialect or FALLBACK) if self.dialect == "auto" else self.dialect)
        is_chat = exchange.path == CHAT
        sampled = sampled_as(vendor, self._generation, self.defaults, body, is_chat=is_chat)
        if 0 < sampled.params.temperature < self.coldest:
            compared = sampled.compared and not self.processed
            sampled = replace(sampled, params=replace(sampled.params, temperature=0.0), compared=compared)
        choices = [reply.choices[index] for index in sorted(reply.choices)]
        prompts = self._prompts(body, choices, reply.num_prompt, vendor.joins_texts_by if is_chat else None)
        tokens = [self._tokens(choice, sampled, vendor) for choice in choices]
        _check_whole(reply, [*zip(choices, tokens, strict=True)], claims=counts_all(reply, vendor))
        broken = self._broken(body, reply, vendor, exchange)
        read = zip(choices, tokens, prompts, strict=True)
        return [self._answer(exchange, reply, *one, sampled, broken) for one in read]

    def _broken(self, body: Json, reply: Reply, vendor: Vendor, exchange: Exchange) -> dict[int, str]:
        """What choices break, in words, by their index; those that keep to everything are not there."""
        if any(body.get(name) for name in CHANGES_CHOICES):
            return {}
        try:
            demands = Demands.of(body, self.tokenizer, vendor, is_chat=exchange.path == CHAT, added=exchange.added)
            made = ((one, Made(one.token_ids or (), self.model.eos_token_ids)) for one in reply.choices.values())
            found = {choice.index: demands.broken(choice, known) for choice, known in made}
            whole = demands.broken_whole(reply)
        except Exception:  # a body that nobody has checked may hold anything; its answers are judged all the same
            return {}
        return found | ({min(reply.choices): whole} if whole else {})

    def _prompts(
        self, body: Json, choices: Sequence[Choice], num_tokens: int | None, between: str | None
    ) -> list[tuple[int, ...]]:
        """The prompt's token ids of each choice; several prompts have `n` choices each.

        Args:
            num_tokens: of the prompt, as the server counts them.
            between: what the server joins the texts of a chat's message with; None = it is no chat.
        """
        if all(choice.prompt_token_ids for choice in choices):
            return [choice.prompt_token_ids or () for choice in choices]
        try:
            if between is None:
                prompts = self._plain(body.get("prompt"))
            else:
                messages = [_as_text(message, between) for message in body.get("messages") or ()]
                if not isinstance(body.get("chat_template_kwargs") or {}, dict):
                    raise Unreadable("its chat_template_kwargs are not an object")
                variables = dict(body.get("chat_template_kwargs") or {})
                for name in ("add_generation_prompt", "continue_final_message"):
                    variables |= {} if body.get(name) is None else {name: body[name]}
                ids = self.tokenizer.encode_chat(messages, tools=body.get("tools") or (), variables=variables)
                prompts = [tuple(ids)]
        except InvalidRequest as error:  # which may quote it
            raise Unreadable("its prompt cannot be encoded: the chat template refuses it, or there is none") from error
        if len(prompts) == 1 and num_tokens not in (None, 0, len(prompts[0])):
            raise Unreadable("the server's prompt has another number of tokens than the one that is encoded here")
        each, rest = divmod(len(choices), len(prompts))
        if rest:
            raise Unreadable(f"{len(prompts)} prompts have {len(choices)} choices")
        return [prompt for prompt in prompts for _ in range(each)]

    def _plain(self, prompt: Any) -> list[tuple[int, ...]]:
        if isinstance(prompt, str):
            return [tuple(self.tokenizer.encode(prompt))]
        if isinstance(prompt, list) and prompt:
            if all(isinstance(token, int) for token in prompt):
                return [tuple(prompt)]
            if not any(isinstance(part, list) for one in prompt if isinstance(one, list) for part in one):
                return [ids for one in prompt for ids in self._plain(one)]
        raise Unreadable("its prompt is neither a text nor token ids")

    def _answer(
        self,
        exchange: Exchange,
        reply: Reply,
        choice: Choice,
        tokens: "_Tokens",
        prompt: tuple[int, ...],
        sampled: Sampled,
        broken: Mapping[int, str],
    ) -> Answer:
        ids = tuple(tokens.ids)
        if any(type(one) is not int for one in (*prompt, *ids)):
            raise Unreadable("its token ids are not whole numbers")
        if len(prompt) + len(ids) > self.model.max_model_len:
            raise Unreadable(f"prompt and answer have more than {self.model.max_model_len} tokens; see --max-model-len")
        seed = _unseeded(reply.id, choice.index, exchange.began_at)
        if sampled.seed is not None:  # of each prompt the first choice has it, the next the next
            seed = (sampled.seed + choice.index % sampled.num_choices) % 2**64
        if tokens.is_selected:  # which is no sample: its tokens are judged one by one, and as a repeated seed's
            seed = 0
        request_id, replica = f"{reply.id or secrets.token_hex(8)}-{choice.index}", self._replica(exchange.replica)
        beside: Json = {}  # what is reported beside the logprobs of the answer, and of its prompt
        if sampled.compared:
            shown = tuple(choice.token_ids or ())  # those that were added afterwards were reported without anything
            own = shown if ids[: len(shown)] == shown else ()
            found = alternatives_of(choice, len(prompt), own, self.tokenizer)
            whole = tuple(one for one in choice.logprobs_of_prompt(list(prompt)) or () if one is not None)
            places = found.kept
            if len(whole) != len(prompt) - 1:
                whole, places = (), [one for one in places if one.place >= len(prompt)]
            beside = {"prompt_logprobs": whole, "prompt_scored_by": replica}
            beside |= {"alternatives": tuple(places), "num_left_out": found.num_left_out}
        return Answer.reported(
            Request(request_id, prompt, sampled.params, seed),
            replica,
            ids,
            tuple(tokens.logprobs) if sampled.compared else (),
            shared(_strata(sampled.params, len(prompt), len(ids), reply.num_cached, choice.finish_reason)),
            began_at=exchange.began_at,
            num_cached=reply.num_cached or 0,
            untested=sampled.untested,
            broken_limit=broken.get(choice.index, ""),
            **beside,
        )

    def _replica(self, name: str) -> str:
        """The replica as it is shown; those beyond a number that a service may have go by one name."""
        shown = "".join(one if one.isprintable() else "?" for one in name[:_LONGEST_REPLICA]) or UNNAMED
        if shown not in self._replicas and len(self._replicas) >= _MOST_REPLICAS:
            return _OTHERS
        self._replicas.add(shown)
        return shown

    def _tokens(self, choice: Choice, sampled: Sampled, vendor: Vendor) -> "_Tokens":
        """The tokens of an answer, the one that ended it included."""
        reported, reports_end = choice.token_ids, vendor.keeps != "nothing"
        is_selected = len(vendor.extras(COMPLETIONS, False)) > 1  # one that reports ids if it is asked for them
        if reported is not None and choice.pieces:
            tokens = self._whole(choice, reported)
        elif reported is not None:
            given = choice.logprobs or ()
            if len(given) not in (0, len(reported)) and not reports_end:
                raise Unreadable("the reply has logprobs of some of its tokens only")
            tokens = _Tokens(list(reported), list(given) if len(given) == len(reported) else [])
        elif choice.called or not (choice.text or choice.finish_reason == "stop"):
            raise Unreadable("the reply has no token ids")
        else:
            ids = self.tokenizer.encode_continuation(choice.text)
            if is_selected and not self._is_only_spelling(ids):
                raise Unreadable("its text can be written in other tokens, too")
            tokens = _Tokens(list(ids), [], retokenized=True, is_selected=is_selected)
        eos = self.model.eos_token_ids
        by_text = sampled.stops or (isinstance(choice.stopped_by, str) and choice.stopped_by)
        ends_itself = choice.finish_reason in ("stop", "tool_calls") and not by_text
        is_open = (not tokens.ids or tokens.ids[-1] not in eos) and (reported is None or not reports_end)
        if ends_itself and len(eos) == 1 and not sampled.params.ignore_eos and is_open:
            tokens.add(eos[0], None)  # some servers leave it out, and its absence would bias the others
        if not tokens.ids:
            raise Unreadable("the answer is empty")
        return tokens

    def _is_only_spelling(self, ids: Sequence[int]) -> bool:
        """Return whether no other tokens, as many or fewer, spell the same text."""
        text = b"".join(map(self.tokenizer.token_bytes, ids))
        if len(text) > _LONGEST_TEXT:
            return False
        least, ways = [0] + [len(text) + 1] * len(text), [1] + [0] * len(text)
        known, longest = self._spellings
        for end in range(1, len(text) + 1):
            for start in range(max(0, end - longest), end):
                num = known.get(text[start:end], 0) * ways[start]
                if num and least[start] + 1 <= least[end]:
                    ways[end] = num + (ways[end] if least[start] + 1 == least[end] else 0)
                    least[end] = least[start] + 1
        return (least[-1], ways[-1]) == (len(ids), 1)

    def _whole(self, choice: Choice, ids: Sequence[int]) -> "_Tokens":
        """With the tokens in the middle of a character, which llama.cpp leaves out: the piece of text holds them."""
        tokens = _Tokens([], [])
        for token, logprob, piece in zip(ids, choice.logprobs or (), choice.pieces or (), strict=True):
            if piece is not None and piece != self.tokenizer.token_bytes(token):
                *before, last = self.tokenizer.encode_continuation(piece.decode("utf-8", "replace"))
                if last != token:
                    raise Unreadable(_MISSING)
                for one in before:
                    tokens.add(one, None)
            tokens.add(token, logprob)
        return tokens


@dataclass(slots=True)
class _Tokens:
    """The tokens of an answer, and the logprob of each, None = not reported; no logprobs at all = []. retokenized:
    whether they were read off the text. is_selected: whether only such texts are read as have one spelling."""

    ids: list[int]
    logprobs: list[float | None]
    retokenized: bool = False
    is_selected: bool = False

    def add(self, token: int, logprob: float | None) -> None:
        """Add a token at the end."""
        if self.logprobs or not self.ids:
            self.logprobs.append(logprob)
        self.ids.append(token)


def _unseeded(reply_id: str, index: int, began_at: float) -> int:
    """The seed of an answer whose request has none: another for each answer, the same for one that comes twice."""
    if not reply_id:
        return secrets.randbits(64)
    return int.from_bytes(hashlib.sha256(repr((reply_id, index, began_at)).encode()).digest()[:8], "big")


def _check_whole(reply: Reply, answers: Sequence[tuple[Choice, _Tokens]], *, claims: bool) -> None:
    """Refuse a reply that does not report all tokens of its answers, or whose text can be written in another number of
    tokens than were drawn. claims: where it has token ids, another number is its server's fault."""
    if reply.num_tokens is None and any(tokens.is_selected for _, tokens in answers):
        raise Unreadable("the reply does not say how many tokens its text has")
    if reply.num_tokens is None or (claims and not answers[0][1].retokenized):
        return
    for some in (answers, *([answer] for answer in answers)):  # llama.cpp counts those of one choice
        known = sum(len(tokens.ids) for _, tokens in some)
        ended = sum(choice.finish_reason == "stop" for choice, _ in some)
        if known - ended <= reply.num_tokens <= known:  # servers differ in whether they count the one that ends it
            return
    retokenized = answers[0][1].retokenized
    raise Unreadable("its text has another number of tokens than were drawn" if retokenized else _MISSING)


def _as_text(message: Any, between: str) -> Json:
    """A message whose content is a text, as chat templates take it. between: what the server joins its parts with."""
    if not isinstance(message, dict):
        raise Unreadable("a message is not an object")
    content = message.get("content")
    if not isinstance(content, list):
        return message
    if any(not isinstance(part, dict) or part.get("type") != "text" for part in content):
        raise Unreadable("a message holds more than text")
    return message | {"content": between.join(str(part.get("text") or "") for part in content)}
