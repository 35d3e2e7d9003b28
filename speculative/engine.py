"""The engine: token ids in, token ids out.

One step schedules, drafts, verifies and commits, and only then the next begins.
"""

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Tokens
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from speculative.config import EngineConfig, why_no_triton
from speculative.drafting.base import Drafter, NoDrafter
from speculative.drafting.cpu_loop import FusedDraftLoop
from speculative.drafting.draft_sampler import DraftSampler
from speculative.drafting.neural_drafter import DraftModel, ModelDrafter
from speculative.drafting.tree_drafter import TreeDrafter
from speculative.drafting.weightless import make_weightless
from speculative.drafting.weights import Weights, load_weights, longest_sequence
from speculative.errors import ConfigError, EngineFault, HandoffRefused, InvalidRequest, SequenceTooLong
from speculative.model.arithmetic import Arithmetic, arithmetic_of
from speculative.model.attention import prepare_by
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.request import Request, Speculation, Structure, TokenDelta
from speculative.sampling.logprob_checks import LogprobContract
from speculative.scheduling.draft_length import make_draft_length
from speculative.scheduling.scheduler import Scheduler
from speculative.selfcheck.monitor import SelfCheck
from speculative.state.batch import Batch, StepOutcome
from speculative.state.handoff import Blob, ComputedTokenState, Manifest, allocate_blob, decode_state, seal
from speculative.state.kv_cache import KVCache, KVShape
from speculative.state.sequence import Phase, Sequence
from speculative.state.token_constraint import ConstraintMaker, TokenConstraint
from speculative.stats import EngineUsage, StepStats
from speculative.step.checked_sampler import CheckedSampler
from speculative.step.eager_step import EagerStep
from speculative.step.executor import StepExecutor
from speculative.step.kernel_ops import choose_ops
from speculative.step.prompt_scorer import PromptScorer
from speculative.step.runner import ModelRunner
from speculative.step.sampler import Sampler


class EngineCore:
    """Generates for many requests at once, with speculative decoding that leaves the model's distribution as it is.

    Not thread-safe: one thread owns it. A request enters by `add` (a prompt) or `insert` (a handoff), moves with every
    `step`, and leaves finished, aborted, or exported.
    """

    def __init__(
        self,
        decoder: Decoder,
        model: ModelConfig,
        config: EngineConfig,
        fingerprint: str = "",
        make_constraint: ConstraintMaker | None = None,
        draft_model: DraftModel | None = None,
    ) -> None:
        self.model = model
        self.device = next(decoder.parameters()).device
        use_device(self.device)
        if self.device.type == "cuda":
            require_triton(self.device)
            torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for every new shape, of prompts above all
            # Else cuBLAS may add up parts of a product in 16 bits, by the size of the batch.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
        self.config = config = self._with_cache_size(config, decoder, draft_model)
        self.max_model_len = longest_sequence(model, config)
        self.stats = StepStats()
        self._make_constraint = make_constraint
        contract = LogprobContract(config.logprobs_mode, model.vocab_size)
        length = make_draft_length(config.drafter, self.stats)
        self.scheduler = Scheduler(config, self.max_model_len, model.eos_token_ids, self.stats, contract, length)
        self.self_check = SelfCheck(config.self_check_sample_rate)
        self._prepare = prepare_by(decoder.kernels.model)
        self.operators = None
        if self._uses_graphs:  # an engine on a CPU loads nothing of speculative.gpu
            from speculative.gpu.operators import GraphOperators

            self.operators = GraphOperators.on(self.device, decoder.kernels)
        self.ops = choose_ops(decoder.kernels) if self.operators is None else self.operators.vocabulary
        self.sampler = Sampler(config, self.device, model.eos_token_ids, self.ops)
        self.checked_sampler = CheckedSampler(config, self.sampler, self.self_check)
        self.cache = self._make_cache(model.kv_shape)
        self._make_executor(decoder, draft_model, NoDrafter() if draft_model else make_weightless(config.drafter))
        self.manifest = Manifest(
            fingerprint=fingerprint,
            dtype=config.dtype,
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            logprobs_mode=config.logprobs_mode,
            drafter_state=self.drafter.state_name,
        )

    def _make_executor(self, decoder: Decoder, draft_model: DraftModel | None, weightless: Drafter) -> None:
        """Build the steps and their executor, drafting by a model or else by `weightless`; drop all old weights."""
        neural = None if draft_model is None else self._model_drafter(draft_model)
        drafter = neural or weightless
        self.graphs = None
        runner = ModelRunner(decoder, self.cache, self.device, self._prepare)
        if self.operators is not None:
            from speculative.gpu.graph_step import GraphStep

            sampler, longest = self.checked_sampler, self.max_model_len
            self.graphs = GraphStep(self.config, decoder, self.cache, drafter, sampler, longest, self.operators)
            runner = self.graphs.runner
            if self.device.type == "cuda":
                self.graphs.capture_all()
        scorer = PromptScorer(self.config.logprobs_mode, self.sampler, self._constraint)
        self.eager = EagerStep(self.config, runner, drafter, self.checked_sampler, scorer)
        steps = (self.eager,) if self.graphs is None else (self.graphs, self.eager)
        self.executor = StepExecutor(steps, self.stats)

    @property
    def drafter(self) -> Drafter:
        """Return what makes the drafts of eager steps; captured ones run it, too."""
        return self.eager.drafter

    @property
    def runner(self) -> ModelRunner:
        """The target, with its cache."""
        return self.eager.runner

    @property
    def _uses_graphs(self) -> bool:
        wanted = self.config.cuda_graphs
        return self.device.type == "cuda" if wanted is None else wanted

    def _with_cache_size(self, config: EngineConfig, decoder: Decoder, draft_model: DraftModel | None) -> EngineConfig:
        if self.device.type == "cpu" or config.kv_cache_tokens is not None:
            return config.on_cpu()
        from speculative.gpu.memory import tokens_that_fit

        return dataclasses.replace(config, kv_cache_tokens=tokens_that_fit(config, decoder, draft_model))

    def _make_cache(self, shape: KVShape) -> KVCache:
        num_blocks = self.config.num_blocks + self._uses_graphs  # the last one is for rows that stand for nothing
        num_slots = num_blocks * self.config.block_size
        return KVCache(shape, num_slots, dtype=getattr(torch, self.config.dtype), device=self.device)

    def _model_drafter(self, model: DraftModel) -> ModelDrafter:
        config = self.config
        sampler = DraftSampler(
            model.ids,
            self.model.vocab_size,
            self.ops,
            sampled=config.drafter.sampled,
            all_coupled=config.verifier == "coupled",
        )
        self.scheduler.drafter_reads_features = bool(model.capture)
        self.scheduler.draft_length.restart(model.held_out_rates)
        cache = self._make_cache(model.kv_shape)
        parts = (model, cache, self.scheduler.pool, sampler, config.block_size, self._prepare)
        if config.drafter.tree:
            return TreeDrafter(*parts, widths=config.drafter.widths)
        drafter = ModelDrafter(*parts)
        if model.fused and config.drafter.sampled:
            drafter.draft_loop = FusedDraftLoop(model.fused, sampler, cache, config.block_size)
        return drafter

    @classmethod
    def load(cls, folder: Path, config: EngineConfig, make_constraint: ConstraintMaker | None = None) -> "EngineCore":
        """Load a checkpoint folder and set the process's CPU threads to the engine's share.

        Raises:
            ConfigError: the settings do not fit the model or the machine.
            UnsupportedModel: the checkpoint needs what this engine does not do.
        """
        torch.set_num_threads(config.num_threads)
        model = ModelConfig.from_folder(folder)
        device = resolve_device(config.device)
        require_triton(device)  # before minutes of loading
        weights = load_weights(folder, config, device)
        return cls(weights.decoder, model, config, weights.fingerprint, make_constraint, weights.draft_model)

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
        constraint = self._constraint(request)
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
            imported_kv={"kv": state.kv},
            constraint=self._constraint(request),
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
            blob, kv = allocate_blob(state, self.manifest)
            self.cache.read_all(self._slots(sequence, 0, sequence.num_computed), kv)
            # A position that is no number spoils every later one in the layers above: the last position shows all
            # layers but the last one, whose keys and values nothing here has read.
            sound = bool(kv[:, :, -1:].isfinite().all() and kv[-1].isfinite().all())
            if not sound:
                self.scheduler.pool.withdraw(sequence.blocks)
            self._release(sequence)
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
        if self._make_constraint is None:
            raise InvalidRequest("response_format", "This engine was started without support for structured output.")
        return self._make_constraint(structure)

    def check(self, request: Request, tokens: Tokens[int]) -> None:
        """Refuse a request that has these tokens by now. Any thread may ask.

        Raises:
            InvalidRequest: it does not fit the model.
        """
        if self.scheduler.find(request.request_id) is not None:
            raise InvalidRequest("request_id", f"A request {request.request_id!r} is already running.")
        if len(tokens) + (request.score_from is None) > self.max_model_len:
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
        model = self.drafter.model.network if isinstance(self.drafter, ModelDrafter) else None
        return {"model": self.runner.decoder} | ({} if model is None else {"drafter": model})

    def switch(self, weights: Weights, version: str) -> None:
        """Go on with other weights of the same model.

        Nothing is left of what the old ones computed: the prefix cache is empty, running and held requests are computed
        again from their tokens, and handoffs of the old weights are refused from now on. The self-checks go on: each of
        their terms has mean 0 by the weights that it was drawn with.

        The old makes room before the new is complete. An engine whose switch raises is neither; it must not go on.
        """
        use_device(self.device)
        self.scheduler.reset()
        weightless = self.drafter if weights.draft_model is None else NoDrafter()
        del self.graphs, self.eager, self.executor  # frees the old graphs and the old drafter's cache
        self._make_executor(weights.decoder, weights.draft_model, weightless)
        self.manifest = dataclasses.replace(  # last: nothing says that it is of the new weights before it is
            self.manifest, fingerprint=weights.fingerprint, drafter_state=self.drafter.state_name
        )
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
        self._restore(batch.admitted)
        if not batch.entries:
            return []
        outcome = self.executor.run(batch)
        deltas = self.scheduler.commit(batch, outcome)
        self._record(batch, outcome, deltas)
        return deltas

    # -- helpers ------------------------------------------------------------------------------------------------

    def _admit(self, sequence: Sequence) -> None:
        if not sequence.scores_only:
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
                    if len(sequence.imported_kv) > 1:
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

    def _constraint(self, request: Request) -> TokenConstraint | None:
        structure = request.params.structure
        return None if structure is None else self.make_constraint(structure)


def use_device(device: torch.device) -> None:
    """Have this thread launch kernels on a GPU of its own. Each thread has its own current device, at first GPU 0, and
    Triton's launches go there whatever the device of their tensors."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def resolve_device(name: str) -> torch.device:
    """The device a setting means; `auto` takes a GPU when this process sees one. Whoever shares GPUs out, as a server
    does among its replicas, names the device.

    Raises:
        ConfigError: there is no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device {name!r} is not known; use auto, cpu, cuda or cuda:N.") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            f"device {name!r}: torch {torch.__version__} can use no CUDA device here; use cpu (for a replica, num_gpus "
            "of its pool set to 0), or install a CUDA build of torch and the driver."
        )
    if device.type == "cuda" and device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(
            f"device {name!r}: this process sees {torch.cuda.device_count()} CUDA devices, counted from 0; use cuda."
        )
    return device


def require_triton(device: torch.device) -> None:
    """Refuse a GPU whose kernels cannot be compiled here.

    Raises:
        ConfigError: why, and what to do.
    """
    if device.type == "cuda" and (why := why_no_triton()):
        raise ConfigError(
            f"device {str(device)!r}: an engine computes on a GPU with Triton's kernels, of which there are none here: "
            f"{why}, or set device to cpu (for a replica, num_gpus of its pool to 0)."
        )


@contextmanager
def _timed(stats: StepStats, name: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        setattr(stats, name, getattr(stats, name) + time.perf_counter() - started)
