"""Checks receipts: is the answer what its seed demands of these weights?

The logits are computed again, by our engine or, for an independent second opinion, by `transformers` in float32; then
our rules turn them into draws again. Needs neither Ray nor a server.
"""

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from deploy.run.replayers import LoadedReplayer, ReplayerOptions, make_replayer
from serve_app.backends.base import Numerics, Replayed, precision_of
from serve_app.referee.detectors import distribution_alarm, why_shifted
from serve_app.referee.draws import NOT_REPLAYED, DrawsChecked, DrawTolerance, check_draws, placement_checks
from serve_app.referee.drift import DriftSums, TokenDrift, request_drifted
from serve_app.referee.receipts import Receipt, wrong_rounds
from serve_app.referee.shift import moves_of
from serve_app.referee.signatures import PublicKey
from serve_app.referee.tolerance import Tolerance, coarser_of
from speculative.errors import ConfigError
from speculative.model.config import ModelConfig
from speculative.model.fingerprint import ROUNDED_FORMS, has_plain_values, model_fingerprint

EngineName = Literal["torch", "transformers"]

_DTYPES = ("float32", "bfloat16")
_LONGEST_SHOWN = 200  # characters
_MEASURED = 32  # logprobs of an answer from which the noise between the engines is measured


@dataclass(frozen=True, slots=True)
class ReceiptVerdict:
    """On one receipt. reason: why it does not verify; "" = it does."""

    receipt: Receipt
    reason: str
    signature: str
    replayed_by: str = ""
    tolerance_nats: float = 0.0
    tolerance: str = ""  # where it comes from
    tme: float | None = None  # mean of exp|g - t| over the logprobs in the receipt
    max_drift_nats: float | None = None  # of them
    draws: DrawsChecked = NOT_REPLAYED

    def in_words(self) -> str:
        """As `truespec verify` prints it."""
        receipt, draws = self.receipt, self.draws
        lines = [
            f"{_shown(receipt.id)} by {_shown(receipt.model)}: "
            f"{len(receipt.token_ids)} tokens in {len(receipt.rounds)} rounds",
            f"  signature    {self.signature}",
        ]
        if self.replayed_by:
            others = f"; the others: {draws.reason}" if draws.reason else ""
            lines += [
                f"  replayed by  {self.replayed_by}",
                f"  tolerance    {self.tolerance_nats:.2g} nats, {self.tolerance}",
                f"  tokens       {draws.num_checked} checked{others}",
            ]
        lines += [f"  worst        token {one.token_index}: {one.kind}, {one.miss:.2g} nats off" for one in draws.worst]
        return "\n".join([*lines, f"NOT VERIFIED: {self.reason}." if self.reason else "VERIFIED"])

    def to_wire(self) -> dict[str, Any]:
        """As `truespec verify --json` prints it."""
        return {
            "id": self.receipt.id,
            "verified": not self.reason,
            "reason": self.reason or None,
            "signature": self.signature,
            "num_tokens": len(self.receipt.token_ids),
            "replayed_by": self.replayed_by or None,
            "tolerance_nats": self.tolerance_nats,
            "tolerance": self.tolerance or None,
            "tme": self.tme,
            "max_drift_nats": self.max_drift_nats,
            "first_wrong": self.draws.wrong,
            "draws": self.draws.to_wire(),
        }


def _shown(text: str) -> str:
    """What a receipt claims, on one line."""
    return "".join(one if one.isprintable() else "?" for one in text[:_LONGEST_SHOWN])


class Verifier:
    """Checks receipts against one model. Each form of the weights is read once, and let go when the block ends.

    Args:
        folder: the model's.
        engine: what computes the logits again.
        longest: tokens of prompt and answer of the longest receipt that will come.
        public_key: of whoever must have signed them; None = nobody.
    """

    def __init__(self, folder: Path, engine: EngineName, longest: int, public_key: PublicKey | None = None) -> None:
        self._folder = folder
        self._engine = engine
        self._longest = longest
        self._public_key = public_key
        self._fingerprints: dict[str, str] = {}  # by form of the weights
        self._replayers: dict[ReplayerOptions, LoadedReplayer] = {}

    async def __aenter__(self) -> "Verifier":
        return self

    async def __aexit__(self, *_: object) -> None:
        for replayer in self._replayers.values():
            await replayer.stop()

    async def check(self, receipt: Receipt) -> ReceiptVerdict:
        """Compute a receipt's answer again, and compare.

        Raises:
            TruespecError: it cannot be checked here; the message says why, and what to do.
        """
        reason, signature = _check_signature(receipt, self._public_key)
        reason = reason or self._wrong_contents(receipt)
        if reason:
            return ReceiptVerdict(receipt, reason, signature)
        tolerance = _tolerance(receipt, self._folder, self._engine)
        return _judge(receipt, await self._replayed(receipt), tolerance, signature, _name(receipt, self._engine))

    def _wrong_contents(self, receipt: Receipt) -> str:
        """What is wrong before anything is computed; "" = nothing."""
        if len(receipt.weight_versions) > 1:
            versions = ", ".join(receipt.weight_versions)
            raise ConfigError(
                f"The weights were changed while it was generated ({versions}); no one model gives it again."
            )
        if receipt.dtype not in _DTYPES:
            return f"its dtype is {_shown(receipt.dtype)}, and an engine computes in {' or '.join(_DTYPES)}"
        model = ModelConfig.from_folder(self._folder)
        beyond = next((id for id in receipt.prompt_token_ids + receipt.token_ids if id >= model.vocab_size), None)
        if beyond is not None:
            return f"it holds the token {beyond}, and the model has {model.vocab_size}"
        receipt.params.check_vocabulary(model.vocab_size)
        if reason := wrong_rounds(receipt, model.eos_token_ids):
            return reason
        if receipt.weights not in self._fingerprints:
            self._fingerprints[receipt.weights] = model_fingerprint(self._folder, weights=receipt.weights)
        found = self._fingerprints[receipt.weights]
        if found != receipt.fingerprint:
            return f"the weights' fingerprint is {receipt.fingerprint[:64]}, and that of {self._folder} is {found}"
        return ""

    async def _replayed(self, receipt: Receipt) -> Replayed:
        """By our engine, in float32 or in the form that the weights were rounded to; or by `transformers`."""
        rounded = receipt.weights in ROUNDED_FORMS
        options = ReplayerOptions(
            self._folder,
            self._engine,
            dtype="bfloat16" if rounded and receipt.dtype == "bfloat16" else "float32",
            quantization=receipt.weights if rounded else "auto",  # type: ignore[arg-type]  # `ROUNDED_FORMS` are some
            device="auto" if receipt.weights == "fp8" else "cpu",
            max_model_len=self._longest,
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


def verify(receipt: Receipt, folder: Path, engine: EngineName, public_key: PublicKey | None = None) -> ReceiptVerdict:
    """Check one receipt.

    Raises:
        TruespecError: it cannot be checked here; the message says why, and what to do.
    """

    async def check() -> ReceiptVerdict:
        async with Verifier(folder, engine, receipt.num_tokens, public_key) as verifier:
            return await verifier.check(receipt)

    return asyncio.run(check())


def _check_signature(receipt: Receipt, key: PublicKey | None) -> tuple[str, str]:
    """Why the signature is wrong ("" = it is not), and what is known of it."""
    own = receipt.signature
    if key is None:
        return "", "none" if own is None else f"ed25519 by key {own.key_id}, not checked: no public key was given"
    if own is None:
        return "it is not signed", "none"
    if not key.signed(receipt.canonical(), own):
        return f"the signature is not that of key {key.id} on this receipt", f"ed25519 by key {own.key_id}, wrong"
    return "", f"ed25519 by key {own.key_id}, valid"


def _tolerance(receipt: Receipt, folder: Path, engine: EngineName) -> Tolerance:
    """Between the engine that answered and the one that replays; `source` is what it goes by."""
    if receipt.weights == "fp8" or (engine == "transformers" and not has_plain_values(folder, receipt.weights)):
        return replace(Tolerance.against_float32("fp8"), source=f"for {receipt.weights} weights")
    rounded = receipt.weights in ROUNDED_FORMS
    form = receipt.weights if rounded or receipt.weights in _DTYPES else None  # it may claim anything
    own = Numerics("truespec", precision_of(receipt.dtype, form), receipt.weights if rounded else "plain")
    other = replace(own, precision="float32", weights=own.weights if engine == "torch" else "plain")
    return Tolerance.against_float32(coarser_of(own, other))


def _name(receipt: Receipt, engine: EngineName) -> str:
    if engine == "transformers":
        return "transformers in float32"
    return f"truespec with {receipt.weights} weights" if receipt.weights in ROUNDED_FORMS else "truespec in float32"


def _judge(receipt: Receipt, replay: Replayed, pair: Tolerance, signature: str, replayed_by: str) -> ReceiptVerdict:
    """By the rules of `Judge`; but a receipt's own logprobs may narrow the tolerance of its draws, and cannot widen it
    by much."""
    edge, rows = pair.edge_nats, replay.replayed or ()
    tolerance = DrawTolerance(edge, min_tokens=_MEASURED, most_edges=1.0)  # forged logprobs must not widen it
    served = receipt.logprobs if receipt.logprobs and receipt.logprobs_mode == "raw_logprobs" else ()
    drifts = [TokenDrift.between(*one) for one in zip(served, replay.logprobs, strict=False)]
    tolerance.add(drift for drift in drifts if drift.nats <= edge)
    num_tokens, greedy = len(receipt.token_ids), receipt.params.greedy
    # A token whose logprob drifts may be off by more, but not by much: whoever forges a token may forge that, too.
    bounded: list[TokenDrift | None] = [
        None if drift.nats > edge else replace(drift, nats=min(drift.nats, edge / 8)) for drift in drifts
    ]
    bounded += [None] * (num_tokens - len(drifts))
    checks = placement_checks(rows, receipt.params) + ([] if greedy else receipt.drawn.check(rows))
    draws = check_draws(num_tokens, checks, tolerance.judge_all(checks, bounded))
    wrong = []  # each with its place; of two at one place the draw comes first
    if (at := draws.wrong) is not None:
        kind = receipt.token_kinds[at].value
        wrong.append((at, f"token {at} ({kind}) is not the one that seed and weights demand"))
    if request_drifted(drifts, pair.max_tme - 1, pair.jump_nats):
        nats, at = max((drift.nats, -index) for index, drift in enumerate(drifts))
        wrong.append((-at, f"the logprob of token {-at} is {nats:.3g} nats from its own"))
    moves = moves_of(receipt.prompt_token_ids + receipt.token_ids[: len(drifts)], served, replay.logprobs)
    if shifted := why_shifted(moves, pair):
        wrong.append((num_tokens, shifted))
    if served and len(served) != num_tokens:
        wrong.append((num_tokens, f"{num_tokens} tokens have {len(served)} logprobs"))
    if alarm := distribution_alarm(rows, greedy, pair):
        wrong.append((num_tokens, f"its tokens do not follow the model's distribution ({alarm})"))
    reason = min(wrong, key=lambda one: one[0], default=(0, ""))[1]
    return ReceiptVerdict(
        receipt,
        reason,
        signature,
        replayed_by,
        tolerance.nats,
        f"measured by {len(drifts)} logprobs" if tolerance.is_measured else pair.source,
        DriftSums(drifts).tme if drifts else None,
        max((drift.nats for drift in drifts), default=None),
        draws,
    )
