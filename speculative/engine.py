"""The engine: token ids in, token ids out.

One step schedules, drafts, verifies and commits, and only then the next begins.
"""

import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from speculative.assembly import Assembly, use_device
from speculative.config import EngineConfig
from speculative.drafting.base import Drafter
from speculative.drafting.weights import Weights
from speculative.errors import EngineFault, HandoffRefused, InvalidRequest, SequenceTooLong
from speculative.model.arithmetic import Arithmetic, arithmetic_of
from speculative.request import Request, Speculation, Structure, TokenDelta
from speculative.state.batch import Batch, StepOutcome
from speculative.state.handoff import Blob, ComputedTokenState, allocate_blob, decode_state, seal
from speculative.state.sequence import Phase, Sequence
from speculative.state.token_constraint import ConstraintMaker, TokenConstraint
from speculative.stats import EngineUsage, StepStats
from speculative.step.runner import ModelRunner


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

    def insert(self, request: Request, blob: Blob) -> None:
        """Go on from a handoff.

        Raises:
            HandoffRefused: damaged, of another build, or of another request.
            InvalidRequest: it does not fit the model.
        """
        with _timed(self.stats, "check_s"):
            state = decode_state(blob, self.manifest)
        if state.token_ids[: state.num_prompt] != request.prompt_token_ids:
            raise HandoffRefused("request", "The handoff was computed for another prompt.")
        self.check(request, state.token_ids)
        sequence = Sequence(
            request,
            tokens=state.token_ids,
            imported_kv={"kv": state.kv},  # so that it owes no prompt logprobs; the drafter's part is checked below
            constraint=self.parts.constraint_of(request),
            num_cached=state.num_cached,
        )
        sequence.imported_kv = {"kv": state.kv, **self.drafter.check_state(sequence, state.extra)}
        self._admit(sequence)

    def export(self, request_id: str) -> Blob:
        """Take a held request out, as bytes that another engine can insert. Its blocks become free.

        Raises:
            EngineFault: the KV contains NaN or infinity; it is neither exported nor cached.
        """
        use_device(self.device)
        sequence = self.scheduler.find(request_id)
        if sequence is None or sequence.phase is not Phase.HELD:
            raise KeyError(f"{request_id} is not held for export.")
        with _timed(self.stats, "export_s"):
            extra = self.drafter.export_state(sequence)
            state = ComputedTokenState(
                tuple(sequence.tokens), sequence.num_prompt, sequence.reply.num_cached, torch.empty(0), extra
            )
            blob, kv = allocate_blob(state, self.manifest)  # `kv` lies in the blob: that saves a copy
            self.cache.read_all(self._slots(sequence, 0, sequence.num_computed), kv)
            # A position that is no number spoils every later one in the layers above: the last position shows all
            # layers but the last one, whose keys and values nothing here has read.
            sound = bool(kv[:, :, -1:].isfinite().all() and kv[-1].isfinite().all())
            if not sound:
                self.scheduler.pool.withdraw(sequence.blocks)  # before `_release` empties the list
            self._release(sequence)  # before the error, behind which nobody would free its blocks
            if not sound:
                raise EngineFault("The computed keys and values are not finite; nothing was handed off.")
            return seal(blob)

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

    def set_speculation(self, speculation: Speculation) -> None:
        """Set which requests may draft from the next step on; running requests go on, and keep their distribution."""
        self.scheduler.speculation = speculation

    def invalidate_cache(self) -> None:
        """Drop everything that was computed, as if it were damaged; running requests are computed again."""
        self.scheduler.invalidate_cache()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache: nothing that was computed before is found again. Running requests go on."""
        self.scheduler.pool.drop_prefixes()

    @property
    def arithmetic(self) -> Arithmetic:
        """Return how it computes on this machine."""
        return arithmetic_of(self.runner.decoder)

    @property
    def weight_version(self) -> str:
        """Return what the weights are called that it computes with; every delta says it."""
        return self.scheduler.weight_version

    @property
    def networks(self) -> dict[str, nn.Module]:
        """Return what it computes with, by the names of `Weights.networks`."""
        return self.parts.networks

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
        return self.scheduler.has_work

    @property
    def held_ids(self) -> tuple[str, ...]:
        """Requests that wait to be exported."""
        return tuple(sequence.request.request_id for sequence in self.scheduler.held)

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
        batch = self.scheduler.schedule()
        if batch is None:
            return []
        self._restore(batch.admitted)  # even if nothing is computed: their blocks are in the prefix cache already
        if not batch.entries:
            return []
        outcome = self.parts.executor.run(batch)
        deltas = self.scheduler.commit(batch, outcome)
        self._record(batch, outcome, deltas)
        return deltas

    # -- helpers ------------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        if not sequence.scores_only:  # a replay has its answer's seed, which would then look like a repeated one
            self.self_check.admit(sequence, self.stats)
        self.scheduler.add(sequence)

    def _restore(self, admitted: Tokens[Sequence]) -> None:
        """Write what was computed elsewhere into the blocks of sequences that came by handoff."""
        for sequence in admitted:
            if sequence.imported_kv is not None:
                with _timed(self.stats, "insert_s"):
                    start, stop = sequence.num_shared, len(sequence.tokens) - 1
                    self.cache.write_all(
                        self._slots(sequence, start, stop), sequence.imported_kv["kv"][:, :, start:stop]
                    )
                    if len(sequence.imported_kv) > 1:  # the drafter has sections of its own
                        self.drafter.import_state(sequence, sequence.imported_kv)
                    sequence.imported_kv = None

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
        self.drafter.forget(request_id)
        self.self_check.forget(request_id)

    def _slots(self, sequence: Sequence, start: int, stop: int) -> Tensor:
        return torch.from_numpy(sequence.slots(stop, self.config.block_size)[start:]).to(self.device)


@contextmanager
def _timed(stats: StepStats, name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(stats, name, getattr(stats, name) + time.perf_counter() - started)
