"""The scheduler: it chooses the sequences of a step, and applies the step's results.

Synchronous: nothing is scheduled on tokens that the host has not seen. Each step computes the one pending token of
every decoding sequence whose turn it is; the rest of the token budget goes to drafts, then to prefill chunks in queue
order (by priority and age), and to scoring last.
Every pending token gets a block first. Where none is left, the sequence that was admitted last is preempted: its blocks
are freed and its tokens are computed again later. Drafts get no more than what is left.
"""

import functools
import itertools
import time
from collections.abc import Callable, Iterable

from speculative.config import EngineConfig
from speculative.request import DEFAULT_VERSION, FinishReason, Request, Round, Speculation, TokenDelta, TokenKind
from speculative.sampling.logprob_checks import LogprobContract
from speculative.scheduling.draft_length import DraftLength, DraftPlan
from speculative.scheduling.request_queue import RequestQueue
from speculative.state.batch import Batch, Entry, SequenceResult, StepOutcome
from speculative.state.handoff import Arrival
from speculative.state.kv_cache import BlockPool
from speculative.state.sequence import Phase, Sequence
from speculative.stats import DEAD_END, INVARIANTS, LOGPROB_RULES, EngineUsage, StepStats

_NO_TOKENS = frozenset[int]()
_MOST_SCORED = 256  # tokens of a step in which others decode; fewer would hardly share the reading of the weights


class Scheduler:
    """Owns the queue, the running sequences and their blocks.

    Args:
        config: sizes.
        max_model_len: the longest sequence, prompt and output together.
        eos_token_ids: tokens that end a request unless it ignores them.
        stats: counts preemptions, prefix-cache hits and broken contracts.
        contract: checked for every delta's logprobs; None = no check.
        draft_length: how many drafts each sequence gets; None = as many as configured.
    """

    def __init__(
        self,
        config: EngineConfig,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        stats: StepStats,
        contract: LogprobContract | None = None,
        draft_length: DraftLength | None = None,
    ) -> None:
        self.pool = BlockPool(config.num_blocks, caching=config.prefix_caching)
        self.stats = stats
        self._config = config
        self._max_model_len = max_model_len
        self._eos = frozenset(eos_token_ids)
        self._contract = contract
        self.draft_length = draft_length or DraftLength()
        self._plan = DraftPlan()
        self._most_drafts = config.drafter.max_drafts
        self._rows = config.drafter.rows_of_drafts
        self.drafter_reads_features = False  # set by `Assembly`, which makes drafters after this
        self.looks_ahead = False  # set by `Assembly`, where a device begins on the next step before this one is known
        self.bring_in: Callable[[Sequence], Arrival | None] = lambda _: None  # a handoff, into its blocks; None = it is
        self.speculation = Speculation.ON  # which requests may draft, from the next step on
        self.weight_version = DEFAULT_VERSION
        self._canaries_turn = False
        self._live: dict[str, Sequence] = {}  # everything below, by request id
        self._waiting = RequestQueue(config.priority_ageing_s)
        self._running: list[Sequence] = []  # oldest first
        self._arriving: list[Sequence] = []
        self._held: dict[str, Sequence] = {}

    # -- what comes and goes ------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self._live[sequence.request.request_id] = sequence
        self._waiting.append(sequence)

    def find(self, request_id: str) -> Sequence | None:
        """The live sequence of a request."""
        return self._live.get(request_id)

    def release(self, sequence: Sequence) -> None:
        """Drop a sequence, whatever its state, and free its blocks."""
        if sequence.phase is Phase.RUNNING:
            self._running.remove(sequence)
        elif sequence.phase is Phase.WAITING:
            self._waiting.remove(sequence)
        elif sequence.phase is Phase.ARRIVING:
            self._arriving.remove(sequence)
        elif sequence.phase is Phase.HELD:
            del self._held[sequence.request.request_id]
        del self._live[sequence.request.request_id]
        sequence.phase = Phase.FINISHED
        self.draft_length.forget(sequence.request.request_id)
        self._free(sequence)

    @property
    def has_work(self) -> bool:
        """Return whether a step would have anything to do."""
        return bool(self._running or self._arriving or len(self._waiting))

    @property
    def is_running(self) -> bool:
        """Return whether anything is admitted: computed, or on its way into its blocks."""
        return bool(self._running or self._arriving)

    @property
    def leaving(self) -> list[Sequence]:
        """Sequences to be exported: those that are held, and then those that are still being computed."""
        return [one for one in (*self._held.values(), *self._running) if one.prefill_only_after is not None]

    @property
    def held(self) -> tuple[Sequence, ...]:
        """Sequences waiting to be exported."""
        return tuple(self._held.values())

    def usage(self) -> EngineUsage:
        """Current usage. Callable from any thread."""
        running, replays_waiting = (*self._running, *self._arriving), self._waiting.num_replays
        replays_running = sum(sequence.request.replay for sequence in running)
        return EngineUsage(
            num_running=len(running) - replays_running,
            num_waiting=len(self._waiting) - replays_waiting,
            num_replays=replays_running + replays_waiting,
            num_held=len(self._held),
            num_free_blocks=self.pool.num_free,
            num_blocks=self.pool.num_blocks,
            block_size=self._config.block_size,
        )

    # -- before the step ----------------------------------------------------------------------------------------

    def schedule(self) -> Batch | None:
        """Choose this step's work and allocate its blocks. None when there is nothing to compute."""
        self._make_room()  # first, so that nobody new takes the block that a running sequence needs
        self._admit()
        running = self._turn()
        decoding, prefilling = list[Sequence](), list[Sequence]()
        for sequence in running:
            (decoding if sequence.decoding else prefilling).append(sequence)
        self._plan = self.draft_length.choose(decoding)
        budget = self._config.max_batched_tokens - len(decoding)  # `EngineConfig.check` keeps it from falling below 0
        entries = []
        for sequence in decoding:
            max_drafts, num_rows = self._fit_drafts(sequence, budget) if self._most_drafts else (0, 0)
            budget -= num_rows
            repeated = self._plan.repeated.get(sequence.request.request_id, ())[:max_drafts]
            entries.append(Entry(sequence, 1, max_drafts, True, repeated))
        most_scored = _MOST_SCORED if decoding else budget
        for sequence in sorted(prefilling, key=lambda seq: (seq.scores_only, self._waiting.due_at(seq))):
            room = min(budget, most_scored) if sequence.scores_only else budget
            if room > 0:
                chunk = min(sequence.num_to_compute, room)
                budget -= chunk
                most_scored -= chunk if sequence.scores_only else 0
                samples = sequence.num_computed + chunk == len(sequence.tokens)
                entries.append(Entry(sequence, num_known=chunk, max_drafts=0, samples=samples))
        if self.looks_ahead:
            self._take_blocks_ahead(entries)
        return Batch(tuple(entries)) if entries else None

    def _take_blocks_ahead(self, entries: Iterable[Entry]) -> None:
        """Allocate what the next step will need of decoding sequences, where nobody can miss it."""
        for sequence, _, max_drafts, _, _ in entries:
            if len(self._waiting) or 2 * self.pool.num_free < self.pool.num_blocks:
                break
            if sequence.decoding:
                ahead = 2 + 2 * max_drafts  # the pending token and its drafts, all of which may survive, and as many
                self._grow(sequence, min(ahead, self._max_model_len - sequence.num_computed))

    def _turn(self) -> list[Sequence]:
        """The sequences to compute in this step. Canaries and other requests alternate: if speculation is faulty, a
        shared step could corrupt all of them."""
        canaries = [sequence for sequence in self._running if sequence.request.canary]
        if not canaries or len(canaries) == len(self._running):
            return self._running
        self._canaries_turn = not self._canaries_turn
        return canaries if self._canaries_turn else [seq for seq in self._running if not seq.request.canary]

    def _admit(self) -> None:
        for arriving in tuple(self._arriving):
            assert arriving.arrival is not None
            if arriving.arrival.proceed():
                self._arriving.remove(arriving)
                self._begin(arriving)
            elif arriving.arrival.is_lost:
                self._preempt(arriving)  # to be computed from its tokens
        most = self._config.max_num_seqs
        while (sequence := self._waiting.first) is not None and len(self._running) + len(self._arriving) < most:
            if not self._take_first_blocks(sequence):
                break  # smaller ones behind it would take every block that becomes free, and it would never run
            self._waiting.remove(sequence)
            sequence.arrival = None if sequence.imported is None else self.bring_in(sequence)
            if sequence.arrival is None:
                self._begin(sequence)
            else:
                sequence.phase = Phase.ARRIVING
                self._arriving.append(sequence)

    def _begin(self, sequence: Sequence) -> None:
        """Compute a sequence that has its first blocks, with its handoff in them if it came with one."""
        sequence.phase = Phase.RUNNING
        self._running.append(sequence)
        if sequence.imported is not None:
            sequence.imported = sequence.arrival = None
            sequence.num_computed = len(sequence.tokens) - 1
            self.publish(sequence)  # from now on others may share its blocks
        elif sequence.ready_to_hold:  # the prefix cache held all of it
            self._hold(sequence)

    def _take_first_blocks(self, sequence: Sequence) -> bool:
        """Allocate blocks for all known tokens at once, so that a running prefill never waits for one."""
        cached = self._find_prefix(sequence)
        needed = -(-len(sequence.tokens) // self._config.block_size) - len(cached)
        if needed + self.pool.num_free_of(cached) > self.pool.num_free:
            return False
        self.pool.hold(cached)  # before `take`, which may hand out a cached block that nobody holds
        sequence.blocks = cached + (self.pool.take(needed, sequence.request.cache_scope) or [])
        sequence.num_published = len(cached)
        sequence.num_shared = sequence.num_computed = len(cached) * self._config.block_size
        sequence.admission += 1
        first_time = sequence.reply.queue_s is None
        if first_time and sequence.reads_cache and sequence.imported is None:  # what was emitted may be cached, too
            sequence.reply.num_cached = min(sequence.num_shared, sequence.num_prompt)
            self.stats.prefix_cache_queries += sequence.num_prompt
            self.stats.prefix_cache_hits += sequence.reply.num_cached
        if first_time:
            sequence.reply.queue_s = time.monotonic() - sequence.arrived_at
        return True

    def _find_prefix(self, sequence: Sequence) -> list[int]:
        """Cached blocks to share. At least the pending token is left to compute; a scored sequence shares none.

        Names keep scopes apart. Should a block of another scope be found all the same, nobody shares it any more.
        """
        if not sequence.reads_cache or not self._config.prefix_caching:
            return []
        found = self.pool.find(sequence.block_hashes(len(sequence.tokens) - 1, self._config.block_size))
        if not self.pool.lie_within(found, sequence.request.cache_scope):
            self.stats.count_violation("isolation")
            self.pool.withdraw(found)
            return []
        if self.drafter_reads_features and sequence.params.speculate and sequence.imported is None:
            # A hidden-state drafter cannot rebuild missing rows: the features they need are not computed. A handoff
            # brings all of its rows.
            return list(itertools.takewhile(self.pool.is_marked, found))
        return found

    def _make_room(self) -> None:
        """Allocate a block for every decoding sequence's pending token, preempting the last admitted ones if needed."""
        for sequence in tuple(self._running):
            while sequence.phase is Phase.RUNNING and sequence.decoding and not self._grow(sequence, 1):
                # Which may be this one: then its phase ends the loop.
                self._preempt((self._arriving or self._running)[-1])

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` more positions; False, with nothing allocated, if there are too few."""
        needed = -(-(sequence.num_computed + num_tokens) // self._config.block_size) - len(sequence.blocks)
        if needed <= 0:
            return True
        blocks = self.pool.take(needed, sequence.request.cache_scope)
        sequence.blocks.extend(blocks or ())
        return blocks is not None

    def _fit_drafts(self, sequence: Sequence, budget: int) -> tuple[int, int]:
        """Return how many drafts fit, and their rows. The one place that combines, per sequence, the drafter's setting,
        the request's own choice, what pays, the length limits, the token budget and the free blocks."""
        on_trial = self.speculation is Speculation.CANARY and sequence.request.canary
        if not sequence.params.speculate or not (self.speculation is Speculation.ON or on_trial):
            return 0, 0
        wanted = self._plan.most(sequence.request.request_id, self._most_drafts)
        is_repeated = sequence.request.request_id in self._plan.repeated
        rows = range(wanted + 1) if is_repeated else self._rows
        fits = sequence.num_drafts_that_fit(wanted, self._max_model_len)
        while fits > 0 and (rows[fits] > budget or not self._grow(sequence, 1 + rows[fits])):
            fits -= 1
        return fits, rows[fits]

    def invalidate_cache(self) -> None:
        """Drop what was computed: all running sequences restart from their tokens, and the prefix cache is emptied.

        Held ones stay: they only wait for their export.
        """
        for sequence in reversed((*self._running, *self._arriving)):  # each goes to the front, at last the oldest
            self._preempt(sequence)
        self.pool.drop_prefixes()

    def reset(self) -> None:
        """Drop everything computed, for new weights: as `invalidate_cache`, but held and handed-off sequences are
        recomputed as well."""
        for sequence in self.held:
            del self._held[sequence.request.request_id]
            self._running.append(sequence)  # so that it is preempted with the others
            sequence.phase = Phase.RUNNING
        self.invalidate_cache()
        for sequence in self._waiting:
            sequence.imported = None

    def _preempt(self, sequence: Sequence) -> None:
        (self._arriving if sequence.phase is Phase.ARRIVING else self._running).remove(sequence)
        self._free(sequence)
        sequence.reply.recompute()
        sequence.phase = Phase.WAITING
        self._waiting.push_in(sequence)
        self.stats.num_preemptions += 1

    def _free(self, sequence: Sequence) -> None:
        if sequence.arrival is not None:
            sequence.arrival.cancel()  # before others get the blocks
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = 0
        sequence.num_published = 0
        sequence.imported = sequence.arrival = None

    def _hold(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.phase = Phase.HELD
        self._held[sequence.request.request_id] = sequence

    # -- after the step -----------------------------------------------------------------------------------------

    def commit(self, batch: Batch, outcome: StepOutcome) -> list[TokenDelta]:
        """Apply the step's results to its sequences, and let the draft length learn from them."""
        # First: it reads lengths as they were when the step was planned, and knows no request that has ended.
        self.draft_length.observe(batch.entries, outcome.results, outcome.step_s)
        deltas = []
        for entry, result in zip(batch.entries, outcome.results, strict=True):
            if result.prompt_logprobs or result.replayed:
                entry.sequence.reply.prompt_logprobs += result.prompt_logprobs
                entry.sequence.reply.replayed += result.replayed
            delta = self._advance(entry, result)
            if delta is not None:
                delta = self._checked(delta, entry.sequence.request)
                deltas.append(delta)
            self._settle(entry.sequence, delta)
        return deltas

    def _advance(self, entry: Entry, result: SequenceResult) -> TokenDelta | None:
        sequence = entry.sequence
        num_computed = sequence.num_computed + entry.num_known
        if not entry.samples:
            sequence.advance(num_computed)
            name, reply, version = sequence.request.request_id, sequence.reply, self.weight_version
            if sequence.scores_only and sequence.num_to_compute == 0:
                return TokenDelta(
                    name,
                    logprobs=tuple(reply.prompt_logprobs),
                    replayed=tuple(reply.replayed),
                    finish_reason=FinishReason.STOP,
                    weight_version=version,
                )
            # Of one held before its first token the prompt logprobs go out here: whoever continues it returns none.
            known = reply.take_prompt_logprobs() if sequence.ready_to_hold else None
            return None if known is None else TokenDelta(name, prompt_logprobs=known, weight_version=version)
        if result.fault is not None:
            return self._broken(sequence, result.fault)
        reply, length = sequence.reply, len(sequence.tokens)
        kept, reason = self._until_stop(sequence, result.token_ids)
        token_ids, num_drafted, num_accepted = result.token_ids[:kept], result.num_drafted, result.num_accepted
        kinds = _kinds(num_accepted, num_accepted == num_drafted, length == sequence.num_prompt)
        verifier = "coupled" if sequence.params.reproducible else self._config.verifier
        delta = TokenDelta(  # by position: names would take as long as all the rest
            sequence.request.request_id,
            token_ids,
            kinds[:kept],
            None if result.logprobs is None else result.logprobs[:kept],
            reply.take_prompt_logprobs() if reply.returns_prompt else None,
            num_drafted,
            min(num_accepted, kept),
            (Round(verifier, kept, num_drafted, result.drafts, result.draft_probs, result.last_prob),),
            reply.num_cached,
            reply.queue_s or 0.0,
            sequence.admission > 1,
            reason,
            token_ids[-1] if reason is not None and reason is FinishReason.STOP else None,
            None,  # nothing is replayed, wrong or broken
            None,
            None,
            self.weight_version,
        )
        sequence.advance(num_computed + num_accepted, token_ids)
        kind = self._breach(sequence, delta, length)
        return delta if kind is None else self._broken(sequence, kind)

    def _breach(self, sequence: Sequence, delta: TokenDelta, length: int) -> str | None:
        """The invariant violated by a sequence that had `length` tokens before this delta; None if none is."""
        if len(delta.token_ids) > 1 and not self._ends(sequence).isdisjoint(delta.token_ids[:-1]):
            return "stop"
        num_tokens = len(sequence.tokens)
        if num_tokens > self._max_model_len:
            return "length"
        adds_up = (
            num_tokens == length + len(delta.token_ids)
            and sequence.num_computed == num_tokens - 1
            and sequence.num_computed <= len(sequence.blocks) * self._config.block_size
            and num_tokens - sequence.num_prompt <= sequence.params.max_tokens
        )
        return None if adds_up else "conservation"

    def _broken(self, sequence: Sequence, kind: str) -> TokenDelta:
        """The last delta of a request that violated an invariant, or whose own rules left it no token; nothing of the
        round is returned."""
        if kind == DEAD_END and sequence.rules is None and sequence.constraint is None:
            kind = "not_finite"  # what else took every token away is at fault
        if kind == DEAD_END:
            error = "The request's constraints left no token to generate; the request ends here."
        else:
            self.stats.count_violation(kind)
            error = f"The engine broke one of its invariants ({INVARIANTS[kind]}); the request ends here."
        return TokenDelta(sequence.request.request_id, finish_reason=FinishReason.ERROR, error=error, broken=kind)

    def _until_stop(self, sequence: Sequence, token_ids: tuple[int, ...]) -> tuple[int, FinishReason | None]:
        """Return how many of the emitted tokens count, and why the request ends there, if it does.

        A limit inside an accepted run is no error: the tokens after it were never emitted.
        """
        length, ends = len(sequence.tokens), self._ends(sequence)
        room = min(sequence.params.max_tokens - (length - sequence.num_prompt), self._max_model_len - length)
        if not ends.isdisjoint(token_ids) and not ends.isdisjoint(token_ids[:room]):  # most steps need no slice
            return next(count for count, token in enumerate(token_ids, 1) if token in ends), FinishReason.STOP
        return (len(token_ids), None) if len(token_ids) < room else (room, FinishReason.LENGTH)

    def _ends(self, sequence: Sequence) -> frozenset[int]:
        """The tokens that end the answer."""
        ends = _NO_TOKENS if sequence.params.ignore_eos else self._eos
        return ends.union(sequence.params.stop_token_ids) if sequence.params.stop_token_ids else ends

    def _checked(self, delta: TokenDelta, request: Request) -> TokenDelta:
        """The delta, or the end of its request if its logprobs violate their contract."""
        kind = None if self._contract is None else self._contract.first_violation(delta, request)
        if kind is None:
            return delta
        violations = self.stats.logprob_violations
        violations[kind] = violations.get(kind, 0) + 1
        error = f"Logprobs broke their contract ({LOGPROB_RULES[kind]}); the request ends here, and none is returned."
        return TokenDelta(request.request_id, finish_reason=FinishReason.ERROR, error=error)

    def _settle(self, sequence: Sequence, delta: TokenDelta | None) -> None:
        """Publish what is newly computed, then drop, hold or keep running the sequence."""
        if delta is None or delta.finish_reason is not FinishReason.ERROR:
            self.publish(sequence)
        elif delta.broken != DEAD_END:  # what it computed may be wrong, or what it found in the cache
            self.pool.withdraw(sequence.blocks)
        if delta is not None and delta.finish_reason is not None:
            self.release(sequence)
        elif sequence.prefill_only_after is not None and sequence.ready_to_hold:
            self._hold(sequence)

    def publish(self, sequence: Sequence) -> None:
        """Offer the sequence's full blocks of verified tokens to the prefix cache. A canary's are never shared:
        speculation is on trial there, and may damage them."""
        num_full = sequence.num_computed // self._config.block_size
        if num_full <= sequence.num_published:
            return
        if self._config.prefix_caching and not (sequence.scores_only or sequence.request.canary):
            hashes = sequence.block_hashes(sequence.num_computed, self._config.block_size)
            for index in range(sequence.num_published, num_full):
                self.pool.publish(sequence.blocks[index], hashes[index])
            sequence.num_published = num_full


@functools.cache
def _kinds(num_accepted: int, all_accepted: bool, is_first: bool) -> tuple[TokenKind, ...]:
    """Kinds of a round's tokens."""
    if is_first:
        return (TokenKind.FIRST,)
    return (TokenKind.ACCEPTED,) * num_accepted + (TokenKind.BONUS if all_accepted else TokenKind.RECOVERED,)
