"""The parts of an engine, put together from configuration, weights and device.

                        on a CPU                                    captured: on a GPU, or by `cuda_graphs: true`
decoding sequences      EagerStep                                   GraphStep; what it does not take: EagerStep
prompts                 EagerStep                                   EagerStep, which replays captured lengths
the vocabulary          KernelOps in C++, or VocabularyOps (torch)  GraphOperators.vocabulary (Triton)
drafts by a model       ModelDrafter, with FusedDraftLoop where     ModelDrafter, with GraphStep's DraftLoop
                        our kernels can and drafts are sampled
trees of drafts         TreeDrafter                                 refused
drafts without weights  LookupDrafter                               LookupDrafter
"""

import dataclasses
from functools import partial
from pathlib import Path

import torch

from speculative.config import EngineConfig
from speculative.drafting.base import Drafter
from speculative.drafting.cpu_loop import FusedDraftLoop
from speculative.drafting.draft_sampler import DraftSampler
from speculative.drafting.neural_drafter import DraftModel, ModelDrafter
from speculative.drafting.tree_drafter import TreeDrafter
from speculative.drafting.weightless import make_weightless
from speculative.drafting.weights import Weights, load_weights, longest_sequence
from speculative.errors import ConfigError, InvalidRequest
from speculative.model.attention import prepare_by
from speculative.model.new_weights import overwrite
from speculative.request import Request, Structure
from speculative.sampling.logprob_checks import LogprobContract
from speculative.scheduling.draft_length import DraftLength, DynamicLength
from speculative.scheduling.scheduler import Scheduler
from speculative.selfcheck.monitor import SelfCheck
from speculative.state.handoff import Manifest
from speculative.state.kv_cache import KVCache, KVShape
from speculative.state.token_constraint import ConstraintMaker, TokenConstraint
from speculative.stats import StepStats
from speculative.step.checked_sampler import CheckedSampler
from speculative.step.eager_step import EagerStep
from speculative.step.executor import StepExecutor
from speculative.step.kernel_ops import choose_ops
from speculative.step.prompt_scorer import PromptScorer
from speculative.step.runner import ModelRunner
from speculative.step.sampler import Sampler


class Assembly:
    """The parts that an engine has from its start (scheduler, cache, sampler), and those of its weights (the steps)."""

    def __init__(self, weights: Weights, config: EngineConfig, make_constraint: ConstraintMaker | None = None) -> None:
        decoder, model = weights.decoder, weights.decoder.config
        self.weights, self.model = weights, model
        self.device = next(decoder.parameters()).device
        use_device(self.device)
        if self.device.type == "cuda":
            from speculative.gpu.memory import cache_tokens  # a CPU's engine loads nothing of speculative.gpu
            from speculative.gpu.triton_here import require_triton

            require_triton(self.device)
            torch.backends.cuda.enable_cudnn_sdp(False)  # it builds a plan for every new shape, of prompts above all
            # Else cuBLAS may add up parts of a product in 16 bits, by the size of the batch.
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
            torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
            config = dataclasses.replace(config, kv_cache_tokens=cache_tokens(config, decoder, weights.draft_model))
        self.config = config = config.on_cpu() if self.device.type == "cpu" else config
        self.max_model_len = longest_sequence(model, config)
        self.stats = StepStats()
        self.make_constraint = make_constraint or _no_structure
        contract = LogprobContract(config.logprobs_mode, model.vocab_size)
        drafter, length = config.drafter, DraftLength()
        if drafter.length == "dynamic":
            length = DynamicLength(drafter.num_draft_tokens, drafter.suffix_first, drafter.rows_of_drafts, self.stats)
        self.scheduler = Scheduler(config, self.max_model_len, model.eos_token_ids, self.stats, contract, length)
        self.self_check = SelfCheck(config.self_check_sample_rate)
        self._prepare = prepare_by(decoder.kernels.model)
        self.operators = None
        if self.device.type == "cuda" if config.cuda_graphs is None else config.cuda_graphs:
            from speculative.gpu.operators import GraphOperators

            self.operators = GraphOperators.on(self.device, decoder.kernels)
            self.scheduler.looks_ahead = True
        self.ops = choose_ops(decoder.kernels) if self.operators is None else self.operators.vocabulary
        self.sampler = Sampler(config, self.device, model.eos_token_ids, self.ops)
        self.checked_sampler = CheckedSampler(self.sampler, self.self_check)
        self.cache = self._make_cache(model.kv_shape)
        self._make_steps(Drafter() if weights.draft_model else make_weightless(config.drafter))

    @classmethod
    def load(cls, folder: Path, config: EngineConfig, make_constraint: ConstraintMaker | None = None) -> "Assembly":
        """Load a checkpoint folder and set the process's CPU threads to the engine's share.

        Raises:
            ConfigError: the settings do not fit the model or the machine.
            UnsupportedModel: the checkpoint needs what this engine does not do.
        """
        torch.set_num_threads(config.num_threads)
        device = resolve_device(config.device)
        if device.type == "cuda":
            from speculative.gpu.triton_here import require_triton

            require_triton(device)  # before minutes of loading
        return cls(load_weights(folder, config, device), config, make_constraint)

    def change_weights(self, weights: Weights) -> None:
        """Copy weights over those on a GPU, for which graphs were captured; on a CPU, build the steps again."""
        drafter = self.eager.drafter
        if self.device.type == "cuda":
            overwrite(self.weights.networks, weights.networks)
            self.weights = dataclasses.replace(self.weights, fingerprint=weights.fingerprint)
            if isinstance(drafter, ModelDrafter) and weights.draft_model is not None:
                drafter.rename(weights.draft_model)
                self.scheduler.draft_length.restart(weights.draft_model.held_out_rates)
            if self.graphs is not None:
                self.graphs.judge.follow_ids()
        else:
            del self.graphs, self.eager, self.executor  # frees the old drafter's cache
            self.weights = weights
            # A drafter without weights goes on with the texts that it has seen.
            self._make_steps(Drafter() if weights.draft_model else drafter)

    def manifest(self) -> Manifest:
        """Return what a handoff has to agree with."""
        return Manifest(
            fingerprint=self.weights.fingerprint,
            dtype=self.config.dtype,
            num_layers=self.model.num_layers,
            num_kv_heads=self.model.num_kv_heads,
            head_dim=self.model.head_dim,
            logprobs_mode=self.config.logprobs_mode,
            drafter_state=self.eager.drafter.state_name,
        )

    def constraint_of(self, request: Request) -> TokenConstraint | None:
        """Compile the structure of a request; None where it has none."""
        structure = request.params.structure
        return None if structure is None else self.make_constraint(structure)

    def _make_steps(self, weightless: Drafter) -> None:
        """Build the steps and their executor, drafting by a model or else by `weightless`; drop all old weights."""
        decoder, draft_model = self.weights.decoder, self.weights.draft_model
        drafter = weightless if draft_model is None else self._model_drafter(draft_model)
        self.graphs = None
        runner = ModelRunner(decoder, self.cache, self.device, self._prepare)
        if self.operators is not None:
            from speculative.gpu.graph_step import GraphStep

            sampler, longest = self.checked_sampler, self.max_model_len
            self.graphs = GraphStep(self.config, decoder, self.cache, drafter, sampler, longest, self.operators)
            runner = self.graphs.runner
            if self.device.type == "cuda":
                self.graphs.capture_all()
        scorer = PromptScorer(self.config.logprobs_mode, self.sampler, self.constraint_of)
        self.eager = EagerStep(runner, drafter, self.checked_sampler, scorer, self.config.block_size)
        steps = (self.eager,) if self.graphs is None else (self.graphs, self.eager)
        self.executor = StepExecutor(steps, self.stats)

    def _make_cache(self, shape: KVShape) -> KVCache:
        padding = self.operators is not None  # captured steps have a block for rows that stand for nothing
        num_slots = (self.config.num_blocks + padding) * self.config.block_size
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
        make = partial(TreeDrafter, widths=config.drafter.widths) if config.drafter.tree else ModelDrafter
        drafter = make(model, cache, self.scheduler.pool, sampler, config.block_size, self._prepare)
        if model.fused and config.drafter.sampled and not config.drafter.tree:
            drafter.draft_loop = FusedDraftLoop(model.fused, sampler, cache, config.block_size)
        return drafter


def _no_structure(_: Structure) -> TokenConstraint:
    raise InvalidRequest("response_format", "This engine was started without support for structured output.")


def use_device(device: torch.device) -> None:
    """Have this thread launch kernels on a GPU of its own. Each thread has its own current device, at first GPU 0, and
    Triton's launches go there whatever the device of their tensors."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def resolve_device(name: str) -> torch.device:
    """The device a setting means; `auto` takes a GPU when this process sees one. Whoever shares GPUs out, as a server
    does among its replicas, names the device. Raises ConfigError: there is no such device here."""
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
