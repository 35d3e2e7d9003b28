"""The engine: token ids in, token ids out.

One step schedules, drafts, verifies and commits, and only then is the next one scheduled.
"""

import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from speculative.assembly import Assembly, use_device
from speculative.config import EngineConfig
from speculative.drafting.base import Drafter
from speculative.drafting.weights import Weights
from speculative.errors import HandoffRefused, InvalidRequest, SequenceTooLong
from speculative.model.arithmetic import Arithmetic, arithmetic_of
from speculative.request import FinishReason, Request, Structure, TokenDelta
from speculative.state.batch import Batch, StepOutcome
from speculative.state.handoff import Arrival, Blob, ComputedTokenState, Export, check_manifest, decode_state
from speculative.state.kv_cache import KVCache
from speculative.state.sequence import Phase, Sequence
from speculative.state.token_constraint import ConstraintMaker, TokenConstraint
from speculative.stats import EngineUsage, Evidence, StepStats
from speculative.step.runner import ModelRunner

_MOST_EVIDENCE = 32  # requests of a step


class EngineCore:
    """Generates for many requests at once, with speculative decoding that leaves the model's distribution as it is.

    Not thread-safe: one thread owns it. A request enters by `add` (a prompt) or `insert` (a handoff), moves with every
    `step`, and leaves finished, aborted, or exported.
    """

    def __init__(self, parts: Assembly) -> None:
        self.parts = parts
        self.model, self.config, self.device = parts.model, parts.config, parts.device
        self.max_model_len, self.stats, self.cache = parts.max_model_len, parts.stats, parts.cache
        self.scheduler, self.self_check = parts.scheduler, parts.self_check
        self.manifest = parts.manifest()
        self.scheduler.bring_in = self._bring_in
        self.copies = None
        if self.device.type == "cuda":
            from speculative.gpu.handoff_copies import HandoffCopies  # a CPU's engine loads nothing of speculative.gpu

            self.copies = HandoffCopies(self.cache, self._caches, self._new_export, self.config)

    @classmethod
    def load(cls, folder: Path, config: EngineConfig, make_constraint: ConstraintMaker | None = None) -> "EngineCore":
        """Load a checkpoint folder; raises what `Assembly.load` does."""
        return cls(Assembly.load(folder, config, make_constraint))

    @property
    def drafter(self) -> Drafter:
        """Return what makes the drafts of eager steps; captured ones run it, too."""
        return self.parts.eager.drafter

    @property
    def runner(self) -> ModelRunner:
        """The target, with its cache."""
        return self.parts.eager.runner

    # -- requests come and go -----------------------------------------------------------------------------------

    def add(self, request: Request, *, prefill_only_after: int | None = None, emitted: Tokens[int] = ()) -> None:
        """Queue a request.

        Args:
            request: what to generate.
            prefill_only_after: stop and wait for `export` once so many tokens are emitted; 0 holds it with its last
                prompt token pending.
            emitted: tokens that another engine has already emitted for it; they are computed again, and generation
                goes on after them as if it had never moved.

        Raises:
            InvalidRequest: it does not fit the model.
        """
        tokens = (*request.prompt_token_ids, *emitted)
        self.check(request, tokens)
        constraint = self.parts.constraint_of(request)
        self._admit(Sequence(request, prefill_only_after=prefill_only_after, tokens=tokens, constraint=constraint))

    def unpack(self, blob: Blob) -> ComputedTokenState:
        """Check a handoff, and read it without a copy. Any thread may call it.

        Raises:
            HandoffRefused: damaged, or of another build.
        """
        return decode_state(blob, self.manifest)

    def insert(self, request: Request, state: ComputedTokenState) -> None:
        """Go on from a handoff. Its tensors are read until the request has begun, and then let go.

        Raises:
            HandoffRefused: of other weights than are computed with by now, or of another request.
            InvalidRequest: it does not fit the model.
        """
        check_manifest(asdict(state.manifest), self.manifest)
        if state.token_ids[: state.num_prompt] != request.prompt_token_ids:
            raise HandoffRefused("request", "The handoff was computed for another prompt.")
        self.check(request, state.token_ids)
        constraint = self.parts.constraint_of(request)
        sequence = Sequence(
            request, tokens=state.token_ids, imported=state, constraint=constraint, num_cached=state.num_cached
        )
        sequence.imported = replace(state, extra=self.drafter.check_state(sequence, state.extra))
        self._admit(sequence)

    def export(self, request_id: str) -> Export:
        """Take a held request out; its blocks become free. What other engines can insert is `finish`ed elsewhere."""
        use_device(self.device)
        sequence = self.scheduler.find(request_id)
        if sequence is None or sequence.phase is not Phase.HELD:
            raise KeyError(f"{request_id} is not held for export.")
        with _timed(self.stats, "export_s"):
            extra = self.drafter.export_state(sequence)
            num_computed, caches = sequence.num_computed, self._caches(sequence)
            shapes: dict[str, tuple[int, ...]] = {
                name: (num_computed, *cache.shape.of_position) for name, cache in caches.items()
            }
            shapes |= {name: tuple(section.shape) for name, section in extra.items()}
            if self.copies is not None:
                export = self.copies.finish(sequence, extra)
            else:
                export, slots = self._new_export(sequence), self._slots(sequence, 0, num_computed)
                for name, shape in shapes.items():
                    values = export.place(shape)
                    if name in caches:
                        caches[name].read_all(slots, values)
                    else:
                        values.copy_(extra[name])
                    export.left.append(partial(Export.take, values=values, of_target=name == "kv"))
            del shapes["kv"]
            export.describe(sequence.tokens, sequence.num_prompt, sequence.reply.num_cached, shapes)
            export.block_names = sequence.block_hashes(num_computed, self.config.block_size)
            self._release(sequence)
            return export

    def withdraw(self, export: Export) -> None:
        """Have nobody find in the prefix cache what could not be handed off."""
        pool = self.scheduler.pool
        pool.withdraw([block for name in export.block_names for block in pool.find([name])])

    def abort(self, request_id: str) -> bool:
        """Let a request go, wherever it stands; False when it is not here."""
        sequence = self.scheduler.find(request_id)
        if sequence is not None:
            self._release(sequence)
        return sequence is not None

    def make_constraint(self, structure: Structure) -> TokenConstraint:
        """Compile a structure. The one method that any thread may call: what it compiled, `add` finds compiled.

        Raises:
            InvalidRequest: the structure makes no sense, or this engine was started without the means.
        """
        return self.parts.make_constraint(structure)

    def check(self, request: Request, tokens: Tokens[int]) -> None:
        """Refuse a request that has these tokens by now. Any thread may ask.

        Raises:
            InvalidRequest: it does not fit the model.
        """
        if self.scheduler.find(request.request_id) is not None:
            raise InvalidRequest("request_id", f"A request {request.request_id!r} is already running.")
        if len(tokens) + (request.score_from is None) > self.max_model_len:  # one more must fit if any is drawn
            raise SequenceTooLong(
                "prompt",
                f"The prompt has {len(tokens)} tokens; this model takes at most {self.max_model_len} of prompt and "
                "output together.",
            )
        num_emitted = len(tokens) - len(request.prompt_token_ids)
        if num_emitted >= request.params.max_tokens:
            raise InvalidRequest(
                "max_tokens",
                f"max_tokens is {request.params.max_tokens}, and {num_emitted} tokens were already generated.",
            )
        if max(tokens) >= self.model.vocab_size or min(tokens) < 0:
            raise InvalidRequest("prompt", f"Token ids must be between 0 and {self.model.vocab_size - 1}.")
        request.params.check_vocabulary(self.model.vocab_size)
        request.check_scored_ids(self.model.vocab_size)
        if request.adapter:
            raise InvalidRequest("model", f"This engine has no adapters; {request.adapter!r} was asked for.")

    @property
    def arithmetic(self) -> Arithmetic:
        """Return how it computes on this machine."""
        return arithmetic_of(self.runner.decoder)

    @property
    def weight_version(self) -> str:
        """Return what the weights are called that it computes with; every delta says it."""
        return self.scheduler.weight_version

    def switch(self, weights: Weights, version: str) -> None:
        """Go on with other weights of the same model.

        Nothing is left of what the old ones computed: the prefix cache is empty, running and held requests are computed
        again from their tokens, and handoffs of the old weights are refused from now on. The self-checks go on: each of
        their terms has mean 0 by the weights that it was drawn with.

        On a GPU they are copied over the old ones, and have to be of the same form. An engine whose switch raises is
        neither; it must not go on.
        """
        use_device(self.device)
        self.scheduler.reset()
        self.parts.change_weights(weights)
        self.manifest = self.parts.manifest()
        self.scheduler.weight_version = version

    @property
    def has_work(self) -> bool:
        """Return whether a step would do something."""
        return self.scheduler.has_work or self.is_copying

    @property
    def is_copying(self) -> bool:
        """Return whether something held cannot be exported yet."""
        return len(self.held_ids) < len(self.scheduler.held)

    @property
    def held_ids(self) -> tuple[str, ...]:
        """Requests that wait to be exported, and can be at once."""
        held = [one for one in self.scheduler.held if self.copies is None or self.copies.can_finish(one)]
        return tuple(sequence.request.request_id for sequence in held)

    def usage(self) -> EngineUsage:
        """Return what is held right now."""
        return self.scheduler.usage()

    def take_stats(self) -> StepStats:
        """Counts since the last call."""
        return self.stats.take()

    # -- the hot loop -------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[TokenDelta]:
        """Advance every scheduled sequence: draft, verify, commit."""
        use_device(self.device)
        num_found = self.stats.num_found
        batch, deltas = self.scheduler.schedule(), list[TokenDelta]()
        if batch is not None:
            outcome = self.parts.executor.run(batch)
            deltas = self.scheduler.commit(batch, outcome)
            self._record(batch, outcome, deltas)
            if self.stats.num_found > num_found:
                self.stats.evidence += _evidence(batch, outcome, deltas)
        if self.copies is not None:
            with _timed(self.stats, "export_s"):
                self.copies.send(self.scheduler.leaving)
            if batch is None:
                self.copies.wait()
        return deltas

    # -- helpers ------------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        if not sequence.scores_only:  # a replay has its answer's seed, which would then look like a repeated one
            self.self_check.admit(sequence, self.stats)
        self.scheduler.add(sequence)

    def _bring_in(self, sequence: Sequence) -> Arrival | None:
        """Write what was computed elsewhere into the blocks of a sequence; on a GPU, begin to."""
        state = sequence.imported
        assert state is not None
        with _timed(self.stats, "insert_s"):
            values = {"kv": state.kv, **state.extra}
            arrival = None if self.copies is None else self.copies.arrival()
            for name, cache in self._caches(sequence).items():
                start = sequence.num_shared if name == "kv" else 0  # shared blocks may lack the drafter's rows
                slots = sequence.slots(state.num_computed, self.config.block_size)[start:]
                if arrival is None:
                    cache.write_all(torch.from_numpy(slots), values[name][start:])
                else:
                    arrival.bring(cache, slots, values[name][start:])
            self.drafter.import_state(sequence, state.extra)
            return arrival

    def _new_export(self, sequence: Sequence) -> Export:
        """Room for the handoff of a sequence that is still being computed."""
        num_tokens = max(len(sequence.tokens), sequence.num_prompt + (sequence.prefill_only_after or 0))
        num_values = num_tokens * sum(cache.shape.num_values for cache in self._caches(sequence).values())
        make = Export if self.copies is None else self.copies.make_export
        return make(self.manifest, num_tokens, num_values * self.cache.data.itemsize)

    def _caches(self, sequence: Sequence) -> dict[str, KVCache]:
        """The caches whose rows a handoff of a sequence has, by section."""
        of_drafter = self.drafter.cache_of(sequence)
        return {"kv": self.cache} if of_drafter is None else {"kv": self.cache, "drafter_kv": of_drafter}

    def _record(self, batch: Batch, outcome: StepOutcome, deltas: list[TokenDelta]) -> None:
        self.stats.num_steps += 1
        self.stats.expected_accepted += outcome.expected_accepted
        if outcome.terms is not None:
            self.self_check.take(outcome.terms, self.stats)
        prefilled = [entry.num_known for entry in batch.entries if not entry.samples or entry.num_known > 1]
        self.stats.num_prompt_tokens += sum(prefilled)
        paired = zip(batch.entries, outcome.results, strict=True)
        sampled = [result for entry, result in paired if entry.samples and result.fault is None]
        drafted = self.stats.num_drafted + sum([result.num_drafted for result in sampled])
        accepted = self.stats.num_accepted + sum([result.num_accepted for result in sampled])
        rounds = Counter([(result.num_drafted, result.num_accepted) for result in sampled])
        for (num_drafted, num_accepted), times in rounds.items():
            self.stats.count_round(num_drafted, num_accepted, times)
        # The metrics are made of counts by position: these must add up to what the results say.
        if (drafted, accepted) != (self.stats.num_drafted, self.stats.num_accepted):
            self.stats.count_violation("metrics")
        reporting = [result.num_drafted for result in sampled if result.logprobs is not None]
        self.stats.num_rounds_with_logprobs += len(reporting)
        self.stats.num_drafted_with_logprobs += sum(reporting)
        self.stats.num_emitted += sum([len(delta.token_ids) for delta in deltas])
        for request_id in [delta.request_id for delta in deltas if delta.finish_reason is not None]:
            self._forget(request_id)

    def _release(self, sequence: Sequence) -> None:
        self.scheduler.release(sequence)
        self._forget(sequence.request.request_id)

    def _forget(self, request_id: str) -> None:
        if self.copies is not None:
            self.copies.forget(request_id)
        self.drafter.forget(request_id)
        self.self_check.forget(request_id)

    def _slots(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        return torch.from_numpy(sequence.slots(stop, self.config.block_size)[start:]).to(self.device)


def _evidence(batch: Batch, outcome: StepOutcome, deltas: list[TokenDelta]) -> tuple[Evidence, ...]:
    """The requests that a step ended for what it found; all of its requests where it ended none."""
    ended = {delta.request_id for delta in deltas if delta.finish_reason is FinishReason.ERROR}
    made = [(entry.sequence, result.token_ids) for entry, result in zip(batch.entries, outcome.results, strict=True)]
    shown = [one for one in made if not ended or one[0].request.request_id in ended][:_MOST_EVIDENCE]
    return tuple(Evidence(one.request, tuple(one.tokens[one.num_prompt :]), refused) for one, refused in shown)


@contextmanager
def _timed(stats: StepStats, name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(stats, name, getattr(stats, name) + time.perf_counter() - started)
