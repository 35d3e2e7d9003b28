"""A request in the engine: its tokens, and how many of them are computed.

The pending-token invariant: between steps a sequence that can be decoded has len(tokens) == num_computed + 1: all
tokens but the last have their keys and values in the cache, the last one is pending. During a prefill (of a new prompt,
or of all tokens after a preemption) num_computed is smaller, and nothing is emitted.
"""

import enum
import time
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from speculative.request import ReplayedToken, Request, TokenLogprobs
from speculative.state.logit_constraints import Int64s, rules_of
from speculative.state.prefix import chain_root, hash_block
from speculative.state.token_constraint import TokenConstraint

if TYPE_CHECKING:
    from speculative.state.handoff import Arrival, ComputedTokenState  # which need torch


class Phase(enum.Enum):
    """State of a sequence."""

    WAITING = "waiting"  # holds no blocks
    ARRIVING = "arriving"  # a handoff is being copied into its blocks
    RUNNING = "running"
    HELD = "held"  # computed, keeps its blocks until exported or aborted
    FINISHED = "finished"


@dataclass(slots=True)
class ReplyState:
    """Kept beside a sequence until a delta takes it along; no step reads it but to know what is to be scored.

    returns_prompt: the prompt's logprobs are requested, and still to be returned.
    num_cached: prompt tokens found in a prefix cache where they were computed.
    queue_s: seconds from arrival to the first blocks; None before that.
    prompt_logprobs: so far.
    replayed: tokens of a scoring request, so far.
    """

    returns_prompt: bool
    num_cached: int = 0
    queue_s: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    replayed: list[ReplayedToken] = field(default_factory=list)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The prompt's logprobs, returned once; None if not requested, or already returned."""
        if not self.returns_prompt:
            return None
        self.returns_prompt = False
        reported, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return reported

    def recompute(self) -> None:
        """Drop the scores: a preempted sequence is computed, and scored, from its first token again."""
        self.prompt_logprobs.clear()
        self.replayed.clear()


class Sequence:
    """One request's state inside the engine.

    Args:
        request: what to generate.
        prefill_only_after: stop and hold for export once this many tokens are emitted (0: as soon as only the last
            prompt token is pending); None: run to the end.
        tokens: prompt and output so far, when it continues from a handoff.
        imported: what was computed elsewhere for those tokens.
        constraint: which tokens may come next, if the request asks for a structure.
        num_cached: prompt tokens that were found in a prefix cache where they were computed.
    """

    def __init__(
        self,
        request: Request,
        *,
        prefill_only_after: int | None = None,
        tokens: Tokens[int] | None = None,
        imported: "ComputedTokenState | None" = None,
        constraint: TokenConstraint | None = None,
        num_cached: int = 0,
    ) -> None:
        self.request = request
        self.params = request.params
        self.changed_params = request.params.changed  # once: GPU steps ask for these in every step
        self.prefill_only_after = prefill_only_after
        self.imported = imported  # None once it is written into the cache
        self.arrival: Arrival | None = None  # while it is being written there
        self.tokens = list(request.prompt_token_ids if tokens is None else tokens)
        self.num_prompt = len(request.prompt_token_ids)
        self.num_computed = 0
        self.num_advances = 0  # steps whose results it has got
        self.phase = Phase.WAITING
        self.blocks: list[int] = []
        self.constraint = constraint
        self.rules = rules_of(self.params, request.prompt_token_ids)  # None if the request has none
        self.admission = 0  # how often it got its first blocks; what is kept about them is valid for one admission
        self.num_shared = 0  # leading positions whose blocks were found in this engine's prefix cache
        self.arrived_at = time.monotonic()
        self.num_published = 0  # leading blocks already offered to the prefix cache
        # Returned once, by the engine that computes the prompt; of a one-token prompt there is nothing to compute.
        computes_prompt = self.num_output == 0 and (imported is None or self.num_prompt == 1)
        returns_prompt = self.params.prompt_logprobs is not None and computes_prompt
        self.reply = ReplyState(returns_prompt, num_cached)
        self._hashes: list[bytes] = []  # tokens are only ever added, so no preemption or update changes a name
        self._slots: tuple[list[int], Int64s] = ([], np.empty(0, np.int64))  # of all positions in these blocks

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, {self.phase.value}, tokens={len(self.tokens)}, "
            f"computed={self.num_computed}, blocks={len(self.blocks)})"
        )

    @property
    def num_output(self) -> int:
        """Tokens emitted so far."""
        return len(self.tokens) - self.num_prompt

    @property
    def scores_only(self) -> bool:
        """Return whether the request is teacher-forced: its tokens are scored, and none is drawn."""
        return self.request.score_from is not None

    @property
    def scored_positions(self) -> range:
        """Known tokens whose logprobs are to be returned: of a scoring request, or of a prompt being computed."""
        if self.request.score_from is not None:
            return range(self.request.score_from, len(self.tokens))
        return range(1, self.num_prompt if self.reply.returns_prompt else 1)

    @property
    def reads_cache(self) -> bool:
        """Return whether it may use the prefix cache: rows that are not computed cannot be scored."""
        return not (self.scores_only or self.reply.returns_prompt)

    @property
    def num_to_compute(self) -> int:
        """Known tokens to run through the model before a token is sampled, decoding goes on, or it is held for export.

        A prompt is computed whole, and the first token drawn at its end without drafts. A recomputation after a
        preemption or a move leaves the last token pending, so that the next round is the one it would have been: the
        same drafts, the same random numbers. Nothing follows a scored sequence's last token, so it stays pending, too.
        """
        leave_pending = self.scores_only or self.num_output > 0 or self.prefill_only_after == 0
        return len(self.tokens) - self.num_computed - leave_pending

    @property
    def ready_to_hold(self) -> bool:
        """Return whether it has reached the point where it is held for export."""
        return (
            self.prefill_only_after is not None
            and self.prefill_only_after <= self.num_output
            and self.num_to_compute == 0
        )

    @property
    def decoding(self) -> bool:
        """Return whether only the pending token is left to compute."""
        return len(self.tokens) == self.num_computed + 1 and self.request.score_from is None

    def num_drafts_that_fit(self, wanted: int, max_model_len: int) -> int:
        """Return how many drafts the length limits leave room for: one more token must fit after all of them.

        0 before the first token, wherever it is drawn: prefill and decode replicas then draw the same one.
        """
        num_tokens = len(self.tokens)
        num_output = num_tokens - self.num_prompt
        if num_output == 0:
            return 0
        last = self.params.max_tokens
        if self.prefill_only_after is not None:
            last = min(self.prefill_only_after, last)
        room = min(max_model_len - num_tokens, last - num_output)
        return max(0, min(wanted, room - 1))

    def advance(self, num_computed: int, emitted: Tokens[int] = ()) -> None:
        """Add a step's tokens; nothing else adds any.

        The last one stays pending, also where a stop cut off accepted drafts whose keys and values are in the cache:
        hence `min`.
        """
        self.num_advances += 1
        self.tokens.extend(emitted)
        self.num_computed = min(num_computed, len(self.tokens) - 1)

    def slots(self, length: int, block_size: int) -> Int64s:
        """Slots of the first `length` positions, which must have blocks; not to be written to."""
        blocks, slots = self._slots  # a list of blocks grows, or is replaced; it is never changed
        if blocks is not self.blocks or len(slots) < length:
            blocks = self.blocks
            slots = (np.array(blocks, np.int64)[:, None] * block_size + np.arange(block_size)).reshape(-1)
            self._slots = blocks, slots
        return slots[:length]

    def block_hashes(self, num_tokens: int, block_size: int) -> list[bytes]:
        """Names of the blocks that the first `num_tokens` tokens fill."""
        count = num_tokens // block_size
        for index in range(len(self._hashes), count):
            parent = self._hashes[-1] if self._hashes else chain_root(self.request.cache_scope)
            self._hashes.append(hash_block(parent, self.tokens[index * block_size : (index + 1) * block_size]))
        return self._hashes[:count]
