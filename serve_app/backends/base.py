"""The interface between the server and an engine. The server sees requests, deltas and sealed handoffs, never a
tensor."""

import contextlib
import enum
import hashlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from speculative.errors import ConfigError, EngineFault, TruespecError
from speculative.request import DEFAULT_VERSION, ReplayedToken, Request, Speculation, TokenDelta, TokenLogprobs
from speculative.stats import CheckState, EngineUsage, StepStats
from speculative.weight_formats import FORMATS, PRECISIONS

SHIPPED_HEADS = Path(__file__).parents[1] / "heads"
"""Draft heads that come with the package: as `drafter.model`, each is known by its folder's name."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class DeviceHandoff(NamedTuple):
    """A handoff whose values, a tensor of bytes, lie on a device; `sealed`: all else, and their checksum."""

    values: Any
    sealed: Bytes

    @property
    def nbytes(self) -> int:
        """Bytes of both."""
        return int(self.values.nbytes) + self.sealed.nbytes


Handoff = Bytes | DeviceHandoff
"""A computed-token state on its way from one engine to another, which only an engine opens."""


_OF_WEIGHTS_ALONE = ("auto", "awq", "gptq", "bitsandbytes", "gguf")
"""Beginnings of what vLLM calls quantizations that leave activations as they are."""


def precision_of(dtype: str, quantization: str | None) -> str:
    """Return what an engine computes in, one of `PRECISIONS`.

    Args:
        dtype: of activations, where the quantization leaves them as they are.
        quantization: the form of the weights, as a configuration or an engine names it. One that is not known counts as
            the coarsest, so that nobody is accused for it.
    """
    if quantization is None or quantization.startswith(_OF_WEIGHTS_ALONE):
        return dtype
    if quantization not in FORMATS:
        return PRECISIONS[-1]
    return max(dtype, quantization if quantization in PRECISIONS else dtype, key=PRECISIONS.index)


@dataclass(frozen=True, slots=True)
class Numerics:
    """The rounding of an engine.

    engine: whose code computes.
    precision: one of `PRECISIONS`.
    weights: "plain", as the checkpoint's files have them, or the form to which they were rounded. "" = not known.
    repeats: a row is rounded alike in any batch, so that two engines that are equal mostly make the same error.
    """

    engine: str = ""
    precision: str = ""
    weights: str = ""
    repeats: bool = False


UNKNOWN_NUMERICS = Numerics()


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The result of a prefill: the deltas it emitted, and the handoff to go on from.

    `handoff` is None when the request already ended (its first token was a stop, or it asked for one token only).
    """

    deltas: tuple[TokenDelta, ...]
    handoff: Handoff | None
    replica: str = ""  # that computed it
    attempt: int = 0  # above 0: replicas were asked before, and may have computed some of it


@dataclass(frozen=True, slots=True)
class Replayed:
    """The result of a teacher-forced request: of each scored token its raw logprob (nats), the distribution it was to
    follow, and its entry with the likeliest tokens and `Request.scored_ids` in its place; () = none were asked for."""

    logprobs: tuple[float, ...]
    replayed: tuple[ReplayedToken, ...] | None = None
    replica: str = ""  # that computed it
    weight_version: str = DEFAULT_VERSION  # it was computed with
    entries: tuple[TokenLogprobs, ...] = ()
    numerics: Numerics = UNKNOWN_NUMERICS  # of the engine that computed it

    @classmethod
    def reported(cls, delta: TokenDelta, replica: str = "") -> "Replayed":
        """Build it from the one delta of a teacher-forced request."""
        entries = delta.logprobs or ()
        return cls(
            tuple(entry.logprob for entry in entries),
            delta.replayed,
            replica,
            delta.weight_version,
            entries if any(entry.top or entry.scored for entry in entries) else (),
        )

    def after(self, prompt: "Replayed") -> "Replayed":
        """With what the replay of the prompt's own tokens gave before it. Two versions of the weights make none."""
        entries = () if not (prompt.entries or self.entries) else (*prompt.entries_of_each, *self.entries_of_each)
        version = self.weight_version if prompt.weight_version == self.weight_version else ""
        logprobs = (*prompt.logprobs, *self.logprobs)
        return replace(self, logprobs=logprobs, weight_version=version, entries=entries)

    @property
    def entries_of_each(self) -> tuple[TokenLogprobs, ...]:
        """One entry a logprob; where none were asked for, with nothing but the logprob."""
        return self.entries or tuple(TokenLogprobs(-1, logprob, 0) for logprob in self.logprobs)

    def last(self, num_tokens: int) -> "Replayed":
        """Return the replay of the last tokens alone."""
        first = len(self.logprobs) - num_tokens
        rows = None if self.replayed is None else self.replayed[len(self.replayed) - num_tokens :]
        return replace(self, logprobs=self.logprobs[first:], replayed=rows, entries=self.entries[first:])


@dataclass(frozen=True, slots=True)
class ServedWeights:
    """The weights that an independent referee must load to compute with those that a replica serves."""

    source: str | None  # a folder, a catalogue name, or a hub id; None = they came over the wire, as `shards`
    tokenizer_folder: str  # the folder with the model's tokenizer, and the configuration beside which shards are read
    form: str  # as `Computing.weights`
    fingerprint: str  # as `ModelInfo.fingerprint`
    version: str  # of the weights
    shards: tuple["Shard", ...] = ()


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a checkpoint that came over the wire: a whole safetensors file, and its checksum."""

    content: Any  # where it lies; opaque here
    digest: str
    num_bytes: int


class ReplayFailed(TruespecError):
    """A replica did not complete a replay: which one, and what it raised."""

    def __init__(self, replica: str, why: Exception) -> None:
        super().__init__(replica, why)
        self.replica, self.why = replica, why

    def __str__(self) -> str:
        return f"{self.replica}: {self.why}"


@contextlib.contextmanager
def naming(field: str) -> Iterator[None]:
    """Have what cannot be found or fetched within the block reported under the configuration's field that asked for it.
    Raises ConfigError: instead of whatever was raised."""
    try:
        yield
    except TruespecError as error:
        raise ConfigError(f"{field}: {error}") from error


async def replayed(deltas: AsyncGenerator[TokenDelta, None]) -> Replayed:
    """Return what a teacher-forced request gave, from its deltas. Raises EngineFault: the engine failed on it."""
    async with contextlib.aclosing(deltas):
        async for delta in deltas:
            if delta.error is not None:
                raise EngineFault(delta.error)
            if delta.logprobs is not None:
                return Replayed.reported(delta)
    raise EngineFault("The replay ended without a result.")


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of the model: the name clients use, and where its files lie."""

    name: str
    root: str


@dataclass(frozen=True, slots=True)
class Computing:
    """The hardware and kernels of a replica's engine.

    kernels: those made for its device, as the metrics name them; "" = it has none of ours.
    kernels_off: why they are not used, and what to do about it; "" = they are used.
    unrepeatable: why a request may get another text when it is asked again, whatever it says; "" = it does not.
    drafts_shift_draws: whether drafts change which text a seed gives a sampled request that is not reproducible.
    couples_seeds: whether a sampled request that names a seed is reproducible unless it says otherwise.
    name: two replicas of one name and the same weights round alike.
    device: what it computes on.
    weights: the form of the weights: a dtype, or what they were rounded to as they were loaded.
    dtype: of activations.
    numerics: how far it rounds.
    logprobs_mode: which logprobs are returned.
    keeps_rounds: whether deltas come with the rounds that made them.
    """

    kernels: str = ""
    kernels_off: str = ""
    unrepeatable: str = ""
    drafts_shift_draws: bool = False
    couples_seeds: bool = True
    name: str = ""
    device: str = ""
    weights: str = ""
    dtype: str = ""
    numerics: Numerics = UNKNOWN_NUMERICS
    logprobs_mode: str = ""
    keeps_rounds: bool = False


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The model that is served: the name clients use, sizes, and fingerprints of configuration and weights."""

    model_name: str
    max_model_len: int
    vocab_size: int
    fingerprint: str  # of configuration and weights, those of the adapters included
    folder: str  # where the checkpoint and its tokenizer lie on this machine
    eos_token_ids: tuple[int, ...]
    device_bytes: int = 0  # memory of the GPU that vLLM computes on; 0 = it uses none
    drafter_folder: str = ""  # where the drafter's weights lie, "" = it has none
    held_out_acceptance: tuple[tuple[float, ...], tuple[float, ...]] = (), ()
    """Acceptance by position that the drafter's training measured, if any: at temperature 1, and of greedy answers."""
    adapters: tuple[Adapter, ...] = ()
    computing: Computing = Computing()
    quantization: str | None = (
        None  # of the weights, whoever rounded them: "w4a8", "gguf" or another name; None = not rounded
    )

    @property
    def system_fingerprint(self) -> str:
        """OpenAI's: the beginning of `fingerprint`, then a hash of how the weights are computed with."""
        weights = f"fp_{self.fingerprint[:12]}"
        if not self.computing.name:
            return weights
        return f"{weights}_{hashlib.blake2b(self.computing.name.encode(), digest_size=3).hexdigest()}"

    @property
    def names(self) -> tuple[str, ...]:
        """All that a request may ask for: the model, then its adapters."""
        return (self.model_name, *(one.name for one in self.adapters))

    def adapter_of(self, name: str) -> str:
        """The adapter that requests for a model of this name use; "" = none, the model itself."""
        return name if any(one.name == name for one in self.adapters) else ""


class PauseMode(enum.StrEnum):
    """The fate of the requests that run when an engine is paused."""

    WAIT = "wait"  # they run to their end
    ABORT = "abort"  # they end at once
    KEEP = "keep"  # they stand still, and go on afterwards; with other weights, from their tokens


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """One chat request as the model sees it: the conversation, and what may be answered.

    use: of the tools: `none`, `auto` (as the model likes), `required` (one call or more), `named` (one of `function`).
    """

    messages: tuple[Mapping[str, Any], ...] = ()
    tools: tuple[Mapping[str, Any], ...] = ()  # as chat templates know them
    use: Literal["none", "auto", "required", "named"] = "none"
    function: str = ""
    parallel: bool = True  # whether one answer may hold several calls
    variables: Mapping[str, Any] = field(default_factory=dict)  # further ones of the chat template


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a tool call. The first part of a call names it; each adds to its arguments."""

    index: int  # of the call within its answer
    arguments: str = ""
    name: str | None = None  # None = a further part
    call_id: str | None = None


class ParsedDelta(NamedTuple):
    """The fields of a part of an answer's text.

    parts: the same in the order of the text, where that is another than reasoning, content, calls.
    """

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallPart, ...] = ()
    parts: "tuple[ParsedDelta, ...]" = ()


class ReplyParser(Protocol):
    """Tells in which field the text of one answer belongs. Each answer has one of its own."""

    def push(self, text: str, token_ids: Sequence[int], *, last: bool) -> ParsedDelta:
        """Return what the next part of the text says; `last` = it ends here."""


class Reading(Protocol):
    """The way in which the answers to one request are to be read."""

    keeps_special: bool
    """True if the text must keep special tokens for that."""
    thought_end: str | None
    """Text that ends the reasoning at the beginning of an answer: "" = it begins with none, None = unknown."""

    def parser(self) -> ReplyParser:
        """A parser of one answer."""


class Parsers(Protocol):
    """Reads reasoning and tool calls out of the text of a model's answers."""

    reads_tools: bool
    reads_reasoning: bool

    def reading(self, chat: ChatPrompt, prompt: Sequence[int]) -> Reading:
        """Return how answers to a conversation are to be read, whose prompt has these tokens. Raises InvalidRequest:
        the parser cannot do what is asked."""


FEW_STREAMS, FEW_BESIDE_A_GPU = 4, 16
"""Streams of a replica that are sent as often as they may: an engine on CPUs shares their cores with the messages."""
_LONGEST_S = 0.2  # to which the interval grows


@dataclass(slots=True)
class Pace:
    """The pace of the streams that share it: the more there are, the longer each waits until its next message, as every
    message takes its part of a core."""

    least_s: float = 0.0  # between a stream's messages, while there are few; 0 = a message for each event, always
    few_streams: int = FEW_STREAMS  # up to which it does not grow
    num_streams: int = 0  # that are being sent

    @property
    def interval_s(self) -> float:
        """The interval now: it grows with the number of streams, if it is not long already."""
        return max(self.least_s, min(_LONGEST_S, self.least_s * self.num_streams / self.few_streams))


class Backend(Protocol):
    """An engine that runs on its own thread or process. All methods are called from one asyncio loop."""

    async def start(self) -> ModelInfo:
        """Load and warm up; returns when requests may come."""

    async def stop(self) -> None:
        """Abort what runs and let everything go."""

    async def check(self, request: Request) -> None:
        """Refuse a request before anything waits for it.

        Raises:
            InvalidRequest: it can never be served.
            EngineFault: the engine does not run.
        """

    def generate(self, request: Request, emitted: Sequence[int] = ()) -> AsyncGenerator[TokenDelta, None]:
        """Prefill and decode here. Closing the iterator aborts the request and frees what it held.

        `emitted` are tokens that another engine has already emitted for it: they are computed again, are not repeated
        in the deltas, and generation goes on after them.
        """

    async def prefill(self, request: Request, *, first_token: bool) -> Prefilled:
        """Compute the prompt and hand it off.

        With `first_token` the first token is sampled here and is the handoff's pending token; without it the last
        prompt token stays pending, so that several choices with seeds of their own may go on from one handoff.
        """

    def resume(self, request: Request, handoff: Handoff) -> AsyncGenerator[TokenDelta, None]:
        """Go on from a handoff. The deltas do not repeat what the prefill emitted. Raises HandoffRefused: the handoff
        is damaged or belongs to another model, build or request."""

    def abort(self, request_id: str) -> None:
        """End a running request; its stream ends with a last delta (`FinishReason.ABORT`)."""

    async def replay(self, request: Request) -> Replayed:
        """Compute a teacher-forced request (`score_from`), on fresh KV and without speculation."""

    def set_speculation(self, speculation: Speculation) -> None:
        """Set which requests may draft from now on. Running requests go on, and their distribution does not change."""

    def invalidate_cache(self) -> None:
        """Drop what was computed, as if it were damaged: running requests are computed again, the prefix cache is
        empty, and the self-checks start again."""

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: nothing that was computed before is found again. Running requests go on."""

    async def load_weights(self, source: str, drafter: str | None = None) -> str:
        """Load other weights of the same model beside those that are served, in place of any loaded so before.

        Args:
            source: a model folder, a catalogue name, or a hub id.
            drafter: the drafter's weights; None = the configured ones, for the new target.

        Returns:
            their fingerprint.

        Raises:
            ConfigError: they cannot be had, are damaged, or are of another model.
        """

    async def switch_weights(self, version: str) -> ModelInfo:
        """Go on with the weights loaded last. Nothing that the old ones computed is kept; requests that run are
        computed again from their tokens."""

    def drop_weights(self) -> None:
        """Let go of weights that were loaded and are not to be served."""

    async def pause(self, mode: PauseMode) -> None:
        """Begin no request from now on; returns when none runs any more, or with `keep` when none moves.

        What comes in the meantime waits. Cancelled, it goes on as if it had not been paused.
        """

    async def unpause(self) -> None:
        """Go on, with what stood still and with what came meanwhile."""

    def usage(self) -> EngineUsage:
        """Return what the engine holds right now."""

    def cached_blocks(self, most: int) -> list[bytes]:
        """Names of the blocks in the prefix cache (`speculative.state.prefix`), the newest last, at most so many."""

    def take_stats(self) -> StepStats:
        """Counts since the last call."""

    def self_checks(self) -> tuple[CheckState, ...]:
        """Return how the engine's self-checks stand; none where it has none."""

    def check_health(self) -> None:
        """Raises:
        EngineFault: the engine thread died or stands still.
        """


def taken_in(request_id: str) -> TokenDelta:
    """The empty delta of a request that was taken in, and waits for its first token."""
    return TokenDelta(request_id)


def is_taken_in(delta: TokenDelta) -> bool:
    """Return whether a delta says only that its request was taken in."""
    return not delta.token_ids and delta == TokenDelta(delta.request_id)


class TokenSource(Protocol):
    """A source of tokens: a local engine, or replicas behind handles."""

    def stream(self, requests: Sequence[Request]) -> AsyncGenerator[TokenDelta, None]:
        """Generate for requests that share one prompt and its parameters, each with a seed of its own.

        Only the first may ask for prompt_logprobs, which then come with its first delta that has tokens. A delta of
        `taken_in` may come before: from then on the requests are refused no more.

        The deltas of all requests come interleaved, each request's in order. Closing the generator (`aclose`, or
        cancelling the task that waits in it) aborts every request that still runs.
        """

    async def abort(self, request_id: str) -> None:
        """End one of the requests; the others go on. What it still emits is ignored. It may have ended already."""
