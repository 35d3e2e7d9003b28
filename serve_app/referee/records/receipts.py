"""Receipts: what a third party needs to make the draws of one answer again.

A receipt is JSON of known fields; docs/proof.md describes them. What is signed is its canonical text: all fields but
`signature`, keys sorted, no spaces, ASCII, numbers as Python writes them.
"""

import dataclasses
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from serve_app.backends.base import ModelInfo
from serve_app.config.base import fault_in_words
from serve_app.referee.records.records import Record
from serve_app.referee.records.signatures import Signature, SigningKey
from serve_app.referee.wire.demands import broken_limit
from serve_app.text.json_text import load_json
from serve_app.versions import version_of
from speculative.config import LogprobsMode
from speculative.errors import EngineFault, InvalidRequest, TruespecError
from speculative.request import Request, Round, SamplingParams, TokenKind
from speculative.selfcheck.replayed_draws import Rounds

FORMAT: Final = "truespec-receipt-2"

_LONGEST_SHOWN = 200  # characters
_AS_RETURNED = "give the receipt as the service returned it"

TokenId = Annotated[int, Field(ge=0)]


class NotAReceipt(TruespecError):
    """The given text is no receipt of a known format; the message says why."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer, and the part of its text that was searched for stop strings."""

    finish_reason: Literal["stop", "length"]  # of the tokens, whatever calls a parser found in the text
    stop_strings: tuple[Annotated[str, Field(min_length=1)], ...]  # of the request
    include_stop: bool  # what stopped the answer is part of its text
    shown_special: tuple[str, ...] | None  # special tokens that the text has, None = all


@dataclass(frozen=True, slots=True)
class Receipt:
    """The account of how one choice of a reply came about. The tuples of the output have one entry a token."""

    format: Literal["truespec-receipt-2"]
    id: str  # of the reply, and behind a hyphen the choice's index
    created: int  # unix seconds
    model: str  # as clients name it
    fingerprint: str  # of the configuration that matters and the weights, as they were loaded
    weights: str  # the form in which they were loaded: a dtype, or what they were rounded to
    dtype: str  # of activations
    quantization: str | None  # of the weights, whoever rounded them
    computing: str  # replicas of one name and the same weights round alike
    truespec: str  # the version that answered
    weight_versions: Annotated[tuple[str, ...], Field(min_length=1)]  # that made its tokens
    prompt_token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    token_ids: Annotated[tuple[TokenId, ...], Field(min_length=1)]
    token_kinds: tuple[TokenKind, ...]
    num_delivered: int  # tokens of the answer; further ones belong to the round in which a stop string ended it
    logprobs: tuple[float, ...] | None  # nats, where the request asked for them
    logprobs_mode: LogprobsMode  # which these are
    params: SamplingParams
    seed: Annotated[str, Field(pattern="^[0-9]{1,20}$")]  # decimal: it may have 64 bits
    rounds: tuple[Round, ...]
    ending: Ending
    signature: Signature | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_token_ids) + len(self.token_ids)

    @property
    def replayable_rounds(self) -> Rounds:
        """Its rounds, whose draws can be made again."""
        return Rounds(len(self.prompt_token_ids), self.rounds, self.token_ids, self.token_kinds)

    @property
    def claimed_draws(self) -> list[int]:
        """The tokens whose draws rest on what it says of a drafter: accepted sampled drafts, and what replaced one.
        With a smaller q any token is accepted."""
        if self.params.greedy or any(one.verifier == "coupled" for one in self.rounds):
            return []
        sampled = [one.draft_probs is not None for one in self.rounds for _ in range(one.num_tokens)]
        judged = (TokenKind.ACCEPTED, TokenKind.RECOVERED)
        return [at for at, kind in enumerate(self.token_kinds) if sampled[at] and kind in judged]

    def scored(self) -> Request:
        """The request that computes its tokens again. Raises InvalidRequest: no request can have these fields."""
        return Request(
            self.id,
            self.prompt_token_ids + self.token_ids,
            dataclasses.replace(self.params, prompt_logprobs=None),
            int(self.seed),
            score_from=len(self.prompt_token_ids),
            draws=() if self.params.greedy else self.replayable_rounds.draws(),
        )

    def to_wire(self) -> dict[str, Any]:
        """Return the form that the API returns."""
        wire: dict[str, Any] = _RECEIPT.dump_python(self, mode="json")
        return wire | {"rounds": [dict(zip(Round._fields, values, strict=True)) for values in wire["rounds"]]}

    def canonical(self) -> bytes:
        """Return what is signed."""
        unsigned = {name: value for name, value in self.to_wire().items() if name != "signature"}
        return json.dumps(unsigned, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


_RECEIPT = TypeAdapter(Receipt)


def receipt_of(
    record: Record, num_delivered: int, ending: Ending, info: ModelInfo, created: int, signing_key: SigningKey | None
) -> Receipt:
    """The receipt of a finished request, `num_delivered` of whose tokens are the answer. Raises EngineFault: tokens of
    it belong to no round."""
    request, computing = record.request, info.computing
    receipt = Receipt(
        format=FORMAT,
        id=request.request_id,
        created=created,
        model=info.model_name,
        fingerprint=info.fingerprint,
        weights=computing.weights,
        dtype=computing.dtype,
        quantization=info.quantization,
        computing=computing.name,
        truespec=version_of("truespec"),
        weight_versions=tuple(record.weight_versions),
        prompt_token_ids=request.prompt_token_ids,
        token_ids=tuple(record.token_ids),
        token_kinds=tuple(record.kinds),
        num_delivered=num_delivered,
        logprobs=tuple(record.logprobs) or None,
        logprobs_mode=computing.logprobs_mode,  # type: ignore[arg-type]  # of an engine that keeps rounds
        params=request.params,
        seed=str(request.seed),
        rounds=tuple(record.rounds),
        ending=ending,
    )
    if not receipt.replayable_rounds.complete:
        raise EngineFault(f"{request.request_id}: tokens came without the round that made them; there is no receipt.")
    if signing_key is None:
        return receipt
    return dataclasses.replace(receipt, signature=signing_key.sign(receipt.canonical()))


def receipts_in(text: str) -> tuple[list[Any], dict[str, Any]]:
    """The contents of a file in the place of receipts, as JSON that nobody has looked at, and the reply that has them;
    {} = none has.

    Raises:
        NotAReceipt: it is neither a receipt nor a reply with `receipts`, or an object of it has a key twice.
    """
    try:
        content = load_json(text)
    except (ValueError, RecursionError) as error:
        raise NotAReceipt(f"It is not JSON: {error}; {_AS_RETURNED}.") from error
    found = content.get("receipts", [content]) if isinstance(content, dict) else None
    if not isinstance(found, list) or not found:
        raise NotAReceipt("It is neither a receipt nor a reply with `receipts`.")
    return found, content if "choices" in content else {}


def wrong_rounds(receipt: Receipt, eos_token_ids: Sequence[int]) -> str:
    """Return why no engine can have made these tokens in these rounds, whatever the model; "" = one can."""
    params, rounds = receipt.params, receipt.replayable_rounds
    num_tokens = len(receipt.token_ids)
    if not rounds.complete or len(receipt.token_kinds) != num_tokens:
        return "the rounds do not make up the tokens"
    if len(receipt.logprobs or ()) != (num_tokens if params.returns_logprobs else 0):
        return f"{num_tokens} tokens have {len(receipt.logprobs or ())} logprobs"
    if not 0 <= receipt.num_delivered <= num_tokens:
        return f"{receipt.num_delivered} of {num_tokens} tokens cannot have been delivered"
    if reason := broken_limit(params, receipt.token_ids, eos_token_ids):
        return reason
    if (at := next(rounds.wrong_drafts(greedy=params.greedy), None)) is not None:
        return f"token {at} was {receipt.token_kinds[at].value}, and its draft says otherwise"
    start = 0
    for one in receipt.rounds:
        kinds = receipt.token_kinds[start : start + one.num_tokens]
        start += one.num_tokens
        reason = _wrong_round(one, kinds, is_last=start == num_tokens)
        if (kinds[0] is TokenKind.FIRST) != (start == one.num_tokens):
            reason = "only the first token of an answer is its first"
        if reason:
            return f"the round that ends with token {start - 1}: {reason}"
    verifiers = sorted({one.verifier for one in receipt.rounds})
    if len(verifiers) > 1:
        return f"its rounds were judged by several verifiers: {', '.join(verifiers)}"
    if verifiers == ["vllm"]:
        return "vLLM's answers have no receipts"
    if params.reproducible and verifiers != ["coupled"]:
        return f"reproducible answers are not verified by {verifiers[0]}"
    if not params.speculate and any(one.num_drafted for one in receipt.rounds):
        return "its request forbids drafts, and it has some"
    return ""


def wrong_ending(receipt: Receipt, eos_token_ids: Collection[int], stopped: "tuple[int, str] | None") -> str:
    """Return why no answer ends where this one does; "" = one may.

    Args:
        receipt: its rounds make up its tokens.
        eos_token_ids: with which the model ends an answer.
        stopped: how many of its tokens complete a stop string, and that string; None = there is none in its text.
    """
    ending, params, num_tokens = receipt.ending, receipt.params, len(receipt.token_ids)
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    if stopped is None:
        num_whole, reason = num_tokens, "stop" if receipt.token_ids[-1] in ends else "length"
        cause = "no stop string ended it"
    else:
        num_whole, reason = stopped[0], "stop"
        cause = f"the stop string {stopped[1][:50]!r} is complete with token {num_whole - 1}"
    if receipt.num_delivered != num_whole:
        return f"{receipt.num_delivered} of {num_tokens} tokens were delivered, and {cause}"
    if num_tokens - receipt.rounds[-1].num_tokens >= num_whole:
        return f"{cause}, and further rounds follow"
    if ending.finish_reason != reason:
        return f"its finish_reason is {ending.finish_reason!r}, and it can only be {reason!r}"
    if reason == "length" and num_tokens < params.max_tokens:
        return f"it is cut off: it ended for its length with {num_tokens} tokens, and max_tokens is {params.max_tokens}"
    return ""


def _wrong_round(one: Round, kinds: Sequence[TokenKind], *, is_last: bool) -> str:
    """Return why such a round is impossible; "" = it is possible."""
    num_drafts = len(one.drafts)
    probs = one.draft_probs
    if not kinds or num_drafts > one.num_drafted or (probs is not None and len(probs) != num_drafts):
        return "its tokens, drafts and probabilities are not as many as they must be"
    if any(not 0 <= q <= 1 for q in (*(probs or ()), one.last_prob)):
        return "a draft probability is none"
    if any(kind is not TokenKind.ACCEPTED for kind in kinds[:-1]):
        return "a token before its last was not accepted"
    last, offset = kinds[-1], len(kinds) - 1
    if last is TokenKind.ACCEPTED:
        whole = is_last and offset < num_drafts
    elif last is TokenKind.RECOVERED:
        whole = offset + 1 == num_drafts
    else:
        whole = offset == num_drafts == one.num_drafted
    return "" if whole else f"its last token cannot be {last.value}"


def read_receipt(content: Any) -> Receipt:
    """A receipt, as JSON. Raises NotAReceipt: it is none, or has unknown or missing fields."""
    kind = content.get("format") if isinstance(content, dict) else None
    if kind != FORMAT:
        raise NotAReceipt(f"Its format is {str(kind)[:50]!r}; this version reads {FORMAT!r}.")
    try:
        text = json.dumps(content, allow_nan=False)
        receipt = _RECEIPT.validate_json(text, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = on_one_line(".".join(map(str, first["loc"])))
        raise NotAReceipt(f"{where} {fault_in_words(first).rstrip('.')}; {_AS_RETURNED}.") from error
    except InvalidRequest as error:
        raise NotAReceipt(f"params: {error}") from error
    except (ValueError, RecursionError) as error:
        raise NotAReceipt(f"It is not valid JSON: {error}; {_AS_RETURNED}.") from error
    wire = receipt.to_wire()
    if odd := [name for name in content | wire if content.get(name) != wire.get(name)]:
        raise NotAReceipt(f"{on_one_line(odd[0])} is not, or has not, the fields of {FORMAT!r}; {_AS_RETURNED}.")
    return receipt


def on_one_line(text: str) -> str:
    """Return what a receipt claims, on one line."""
    return "".join(one if one.isprintable() else "?" for one in text[:_LONGEST_SHOWN])
