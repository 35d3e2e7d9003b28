"""Checks receipts: is the answer what its seed demands of these weights?

The logits are computed again, by our engine or, for an independent second opinion, by `transformers` in float32; then
our rules turn them into draws again. Needs neither Ray nor a server.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from deploy.run.replayers import Replayer, ReplayerOptions, make_replayer
from deploy.run.replied import Replied
from serve_app.backends.base import Replayed, precision_of
from serve_app.referee.judge.detectors import distribution_alarm, why_shifted
from serve_app.referee.judge.draws import (
    NOT_REPLAYED,
    DrawResult,
    DrawsChecked,
    DrawTolerance,
    check_draws,
    placement_checks,
)
from serve_app.referee.judge.drift import TokenDrift, request_drifted, tme_of
from serve_app.referee.judge.shift import moves_of
from serve_app.referee.judge.tolerance import Tolerance
from serve_app.referee.records.receipts import Receipt, on_one_line, wrong_ending, wrong_rounds
from serve_app.referee.records.signatures import PublicKey
from serve_app.text.answer_text import AnswerText
from serve_app.text.tokenizer import StopMatcher, Tokenizer
from speculative.errors import ConfigError
from speculative.model.config import ModelConfig
from speculative.model.fingerprint import model_fingerprint
from speculative.model.forms import format_held
from speculative.request import SamplingParams
from speculative.weight_formats import FORMATS, PRECISIONS, is_rounded

EngineName = Literal["torch", "transformers"]

_DTYPES = ("float32", "bfloat16")
_CLAIMS = ("id", "model", "created", "truespec", "weight_versions", "dtype", "quantization", "computing")
_ALWAYS_SHOWN = ("max_tokens", "temperature")
_COMPARED = ("raw_logprobs",)


@dataclass(frozen=True, slots=True)
class ReceiptVerdict:
    """On one receipt."""

    receipt: Receipt
    reason: str  # why it does not verify; "" = it does
    signature: str
    replayed_by: str = ""
    tolerance_nats: float = 0.0
    tolerance: str = ""  # where it comes from
    tme: float | None = None  # mean of exp|g - t| over the logprobs in the receipt
    max_drift_nats: float | None = None  # of them
    most_drifted: int | None = None  # the token of this
    draws: DrawsChecked = NOT_REPLAYED
    is_signed: bool = False  # by the key that was given
    with_reply: bool = False  # whether it was compared with the reply that it came in

    @property
    def open(self) -> str:
        """Return why it is not verified though nothing is wrong: tokens that nothing binds; "" = it is."""
        if self.reason or self.is_signed or not (num := len(self.receipt.claimed_draws)):
            return ""
        return (
            f"{num} of {len(self.receipt.token_ids)} tokens rest on what the receipt says of sampled drafts; check its "
            "signature (--public-key), or ask with `reproducible`"
        )

    @property
    def not_shown(self) -> list[str]:
        """Return what a receipt like this does not show, even where it verifies."""
        receipt, missing = self.receipt, []
        if not self.with_reply:
            missing.append("text, finish_reason and usage: the file has no reply")
        if receipt.logprobs is None:
            missing.append("logprobs: it has none")
        elif receipt.logprobs_mode not in _COMPARED:
            missing.append(f"logprobs: its are {on_one_line(receipt.logprobs_mode)}, and raw_logprobs are compared")
        if self.replayed_by and self.draws.reason:
            num = len(receipt.token_ids) - self.draws.num_checked
            missing.append(f"the draws of {num} tokens: {self.draws.reason}")
        return missing

    def in_words(self) -> str:
        """Return the text that `truespec verify` prints."""
        receipt, draws = self.receipt, self.draws
        num_tokens = len(receipt.token_ids)
        ended = f", finish_reason {receipt.ending.finish_reason}"
        lines = [
            f"{num_tokens} tokens in {len(receipt.rounds)} rounds, {receipt.num_delivered} of them delivered{ended}",
            f"  claimed      {_listed(_claims(receipt))}",
            f"  asked for    {_listed(_asked(receipt))} (as claimed: compare it with your request)",
            f"  signature    {self.signature}",
        ]
        if self.replayed_by:
            lines += [
                f"  replayed by  {self.replayed_by}",
                f"  tolerance    {self.tolerance_nats:.2g} nats, {self.tolerance}",
            ]
        if self.tme is not None:
            largest = f"the largest {self.max_drift_nats:.2g} nats off (token {self.most_drifted})"
            lines.append(f"  logprobs     {len(receipt.logprobs or ())} compared: TME {self.tme:.5g}, {largest}")
        if self.replayed_by:
            lines.append(f"  tokens       {draws.num_checked} checked")
        lines += [f"  worst        token {one.token_index}: {one.kind}, {one.miss:.2g} nats off" for one in draws.worst]
        lines += [f"  not shown    {one}" for one in self.not_shown]
        undecided = f"UNDECIDED: {self.open}." if self.open else "VERIFIED"
        return "\n".join([*lines, f"NOT VERIFIED: {self.reason}." if self.reason else undecided])

    def to_wire(self) -> dict[str, Any]:
        """Return the object that `truespec verify --json` prints."""
        receipt = self.receipt
        return {
            "id": receipt.id,
            "verified": None if self.open else not self.reason,
            "reason": self.reason or self.open or None,
            "claimed": {name: getattr(receipt, name) for name in _CLAIMS} | {"verifier": _verifier(receipt)},
            "not_shown": self.not_shown,
            "signature": self.signature,
            "finish_reason": receipt.ending.finish_reason,
            "num_tokens": len(receipt.token_ids),
            "num_delivered": receipt.num_delivered,
            "replayed_by": self.replayed_by or None,
            "tolerance_nats": self.tolerance_nats,
            "tolerance": self.tolerance or None,
            "tme": self.tme,
            "max_drift_nats": self.max_drift_nats,
            "most_drifted": self.most_drifted,
            "first_wrong": self.draws.wrong,
            "draws": self.draws.to_wire(),
        }


def _claims(receipt: Receipt) -> dict[str, Any]:
    """Return what nothing in a receipt proves, by field."""
    claims = {name: getattr(receipt, name) for name in _CLAIMS}
    with contextlib.suppress(ValueError, OverflowError, OSError):  # no date
        claims["created"] = f"{datetime.fromtimestamp(receipt.created, UTC):%Y-%m-%d %H:%M:%S} UTC"
    return claims | {"weight_versions": " ".join(receipt.weight_versions), "verifier": _verifier(receipt)}


def _verifier(receipt: Receipt) -> str:
    return " ".join(sorted({one.verifier for one in receipt.rounds}))


def _asked(receipt: Receipt) -> dict[str, Any]:
    """Return what the request asked for beyond the defaults, as its answer depends on it."""
    shown = receipt.params.changed.union(_ALWAYS_SHOWN)
    asked = {field.name: getattr(receipt.params, field.name) for field in fields(SamplingParams) if field.name in shown}
    ending = receipt.ending
    of_text = {"stop": ending.stop_strings, "include_stop_str_in_output": ending.include_stop}
    return asked | {"seed": receipt.seed} | {name: value for name, value in of_text.items() if value}


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {on_one_line(str(value))}" for name, value in values.items() if value is not None)


@dataclass
class Verifier:
    """Checks receipts against one model. Each form of the weights is read once, and let go when the block ends."""

    folder: Path  # the model's
    engine: EngineName  # what computes the logits again
    longest: int  # tokens of prompt and answer of the longest receipt that will come
    public_key: PublicKey | None = None  # of whoever must have signed them; None = nobody
    precision: str = ""  # the coarsest of `PRECISIONS` that it may claim; "" = that of bfloat16, or of the checkpoint
    _fingerprints: dict[str, str] = field(default_factory=dict)  # by form of the weights
    _replayers: dict[ReplayerOptions, Replayer] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.precision = self.precision or precision_of("bfloat16", format_held(self.folder))

    async def __aenter__(self) -> "Verifier":
        return self

    async def __aexit__(self, *_: object) -> None:
        for replayer in self._replayers.values():
            await replayer.stop()

    async def check(self, receipt: Receipt, replied: Replied | None = None) -> ReceiptVerdict:
        """Compute a receipt's answer again, and compare; replied: the choice that it came with. Raises TruespecError:
        it cannot be checked here; the message says why, and what to do."""
        reason, signature = _check_signature(receipt, self.public_key)
        reason = reason or self._wrong_contents(receipt, replied)
        if reason:
            return ReceiptVerdict(receipt, reason, signature)
        tolerance = Tolerance.against_float32(precision_of(receipt.dtype, receipt.weights))
        found = _judge(receipt, await self._replayed(receipt), tolerance, signature, _name(receipt, self.engine))
        return replace(found, is_signed=self.public_key is not None, with_reply=replied is not None)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_folder(self.folder)

    @cached_property
    def _model(self) -> ModelConfig:
        return ModelConfig.from_folder(self.folder)

    def _wrong_contents(self, receipt: Receipt, replied: Replied | None) -> str:
        """Say what is wrong before anything is computed; "" = nothing."""
        if len(receipt.weight_versions) > 1:
            versions = ", ".join(receipt.weight_versions)
            raise ConfigError(
                f"The weights were changed while it was generated ({versions}); no one model gives it again."
            )
        if receipt.dtype not in _DTYPES:
            return f"its dtype is {on_one_line(receipt.dtype)}, and an engine computes in {' or '.join(_DTYPES)}"
        if receipt.weights not in FORMATS:
            return f"its weights are {on_one_line(receipt.weights)}, a form that no engine has"
        if PRECISIONS.index(own := precision_of(receipt.dtype, receipt.weights)) > PRECISIONS.index(self.precision):
            allowed = f"and {self.precision} is the coarsest that is allowed for this model"
            return f"it says that it was computed in {own}, {allowed} (--precision)"
        model = self._model
        if receipt.num_tokens > model.max_position_embeddings:
            return f"it has {receipt.num_tokens} tokens, and the model takes {model.max_position_embeddings}"
        drafts = [draft for one in receipt.rounds for draft in one.drafts]
        ids = (*receipt.prompt_token_ids, *receipt.token_ids, *drafts)
        beyond = next((id for id in ids if not 0 <= id < model.vocab_size), None)
        if beyond is not None:
            return f"it holds the token {beyond}, and the model has {model.vocab_size}"
        receipt.params.check_vocabulary(model.vocab_size)
        if reason := wrong_rounds(receipt, model.eos_token_ids):
            return reason
        said, text = self._said(receipt)
        stopped = None if said.found is None else (said.num_delivered, said.found)
        if reason := wrong_ending(receipt, model.eos_token_ids, stopped):
            return reason
        if replied is not None and (reason := replied.wrong(receipt, text, said.found, self._tokenizer)):
            return reason
        if receipt.weights not in self._fingerprints:
            self._fingerprints[receipt.weights] = model_fingerprint(self.folder, weights=receipt.weights)
        found = self._fingerprints[receipt.weights]
        if found != receipt.fingerprint:
            return f"the weights' fingerprint is {receipt.fingerprint[:64]}, and that of {self.folder} is {found}"
        return ""

    def _said(self, receipt: Receipt) -> tuple[AnswerText, str]:
        """Return how the text of a receipt's tokens ended, and the text."""
        ending, params, special = receipt.ending, receipt.params, receipt.ending.shown_special
        answer = AnswerText(
            self._tokenizer.detokenizer(skip_special=special is not None, shown=special or (), continuation=True),
            StopMatcher(ending.stop_strings, ending.include_stop),
            include_stop=ending.include_stop,
            min_tokens=params.min_tokens,
        )
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._model.eos_token_ids)}
        last = receipt.token_ids[-1]
        _, released = answer.push(receipt.token_ids, last if last in ends else None)
        return answer, "".join(released) + answer.end()

    async def _replayed(self, receipt: Receipt) -> Replayed:
        """By our engine, in float32 or in the form that the weights were rounded to; or by `transformers`."""
        rounded = is_rounded(receipt.weights)
        options = ReplayerOptions(
            self.folder,
            self.engine,
            dtype="bfloat16" if rounded and receipt.dtype == "bfloat16" else "float32",
            quantization=receipt.weights if rounded else "auto",
            device="cpu" if "cpu" in FORMATS[receipt.weights].devices else "auto",
            max_model_len=self.longest,
            at_once=1,
        )
        if options not in self._replayers:
            replayer = make_replayer(options)
            try:
                await replayer.start()
            except BaseException:
                await replayer.stop()
                raise
            self._replayers[options] = replayer
        return await self._replayers[options].replay(receipt.scored())


def _check_signature(receipt: Receipt, key: PublicKey | None) -> tuple[str, str]:
    """Return why the signature is wrong ("" = it is not), and what is known of it."""
    own = receipt.signature
    if key is None:
        return "", "none" if own is None else f"ed25519 by key {own.key_id}, not checked: no public key was given"
    if own is None:
        return "it is not signed", "none"
    if not key.signed(receipt.canonical(), own):
        return f"the signature is not that of key {key.id} on this receipt", f"ed25519 by key {own.key_id}, wrong"
    return "", f"ed25519 by key {own.key_id}, valid"


def _name(receipt: Receipt, engine: EngineName) -> str:
    if engine == "transformers":
        return "transformers in float32" + (f" with {receipt.weights} weights" if is_rounded(receipt.weights) else "")
    return f"truespec with {receipt.weights} weights" if is_rounded(receipt.weights) else "truespec in float32"


def _judge(receipt: Receipt, replay: Replayed, pair: Tolerance, signature: str, replayed_by: str) -> ReceiptVerdict:
    """By the rules of `Judge`, and the pair's tolerance alone: nothing that a receipt holds may widen or narrow it."""
    rows, num_tokens, greedy = replay.replayed or (), len(receipt.token_ids), receipt.params.greedy
    served = receipt.logprobs if receipt.logprobs and receipt.logprobs_mode in _COMPARED else ()
    drifts = [TokenDrift.between(*one) for one in zip(served, replay.logprobs, strict=False)]
    checks = placement_checks(rows, receipt.params) + ([] if greedy else receipt.replayable_rounds.check(rows))
    found = DrawTolerance(pair.edge_nats).judge_all(checks, [None] * num_tokens)
    draws = check_draws(num_tokens, checks, found)
    largest = max(range(len(drifts)), key=lambda index: drifts[index].nats, default=None)
    wrong = []  # each with its place; of two at one place the draw comes first
    if (at := draws.wrong) is not None:
        kind = receipt.token_kinds[at].value
        wrong.append((at, f"token {at} ({kind}) is not the one that seed and weights demand"))
    if largest is not None and request_drifted(drifts, pair.max_tme - 1, pair.jump_nats):
        wrong.append((largest, f"the logprob of token {largest} is {drifts[largest].nats:.3g} nats from its own"))
    moves = moves_of(receipt.prompt_token_ids + receipt.token_ids[: len(drifts)], served, replay.logprobs)
    if shifted := why_shifted(moves, pair):
        wrong.append((num_tokens, shifted))
    if alarm := distribution_alarm(rows, rows, greedy, pair):
        wrong.append((num_tokens, f"its tokens do not follow the model's distribution ({alarm})"))
    if claimed := receipt.claimed_draws:  # their checks can only accuse
        results = tuple(
            None if at in claimed and result is not DrawResult.WRONG else result
            for at, result in enumerate(draws.results)
        )
        draws = replace(draws, results=results, reason="the drafter's probabilities are as the receipt says")
    return ReceiptVerdict(
        receipt,
        min(wrong, key=lambda one: one[0], default=(0, ""))[1],
        signature,
        replayed_by,
        pair.edge_nats,
        pair.source,
        tme_of(drifts),
        None if largest is None else drifts[largest].nats,
        largest,
        draws,
    )
