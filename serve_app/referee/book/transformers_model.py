"""A model computed independently of our engine: `transformers` on the CPU, in float32, one sequence at a time.

Of our code it shares what turns logits into draws: the rules of a request's parameters, its structure, and its random
numbers. docs/detection.md says what that leaves unseen.
"""

import asyncio
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from serve_app.backends.base import ModelInfo, Numerics, Replayed, ServedWeights
from serve_app.cluster.weight_transfer import lay_out
from serve_app.text.grammar import StructureCompiler
from speculative.errors import ConfigError, InvalidRequest, SequenceTooLong, UnsupportedModel
from speculative.model.end_tokens import end_tokens
from speculative.model.fingerprint import model_fingerprint
from speculative.model.formats import LM_HEAD, format_of
from speculative.model.loading import checkpoint_files, resolve_model
from speculative.model.new_weights import free_host_bytes
from speculative.model.served_tensors import ServedTensors
from speculative.model.tensor_files import check_tensors
from speculative.request import ReplayedToken, Request, TokenLogprobs
from speculative.selfcheck.replayed_tokens import replayed_tokens
from speculative.state.token_constraint import ConstraintMaker
from speculative.step.vocabulary_ops import VocabularyOps
from speculative.weight_formats import is_rounded

T = TypeVar("T")

_PIECE = 128  # tokens whose logits are in memory at once
_BLOCK = 2048  # positions of a prefix that are computed at once
_FLOAT32_SHARE = 2.5  # bytes needed for each byte of a 16-bit checkpoint, with some to compute in
_ROUNDED_SHARE = 3.0  # the same, with the numbers of four-bit weights and an LM head apart from the embedding
_GIB = 2**30


class TransformersModel:
    """The logits of a model folder, in float32. Loads on construction.

    Args:
        folder: the model's.
        form: that of the engine; one that rounds has the numbers that it then serves, all others the folder's own.

    Raises:
        ConfigError: transformers cannot load a model from the folder.
    """

    def __init__(self, folder: Path, form: str = "plain") -> None:
        disable_progress_bar()
        check_tensors(sorted(folder.glob("*.safetensors")))
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(f"cannot load a model from {folder}: {error}") from error
        self._model = loaded.eval()
        if is_rounded(form):
            # Each product gets the numbers that its weights stand for in this form.
            lm_head, served = loaded.get_output_embeddings(), ServedTensors(folder, format_of(form), torch.float32)
            for name, linear in loaded.named_modules():
                if isinstance(linear, nn.Linear):
                    weight = served.floats(LM_HEAD if linear is lm_head else f"{name}.weight")
                    linear.weight = nn.Parameter(weight, requires_grad=False)
        self._numerics = Numerics("transformers", "float32", form if is_rounded(form) else "plain")
        self.vocab_size = int(loaded.config.vocab_size)
        self.max_model_len = int(loaded.config.max_position_embeddings)
        self.eos_token_ids = tuple(end_tokens(folder))
        self._prefix: tuple[tuple[int, ...], Any] = ((), None)

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], start: int) -> Tensor:
        """[n, V] float32 that predict tokens[start:]. The KV cache of a long prefix is kept for the next call."""
        known, cache = self._prefix
        reused = min(_common(known, tokens), start - 1, len(tokens) - 1)
        if cache is None or reused < len(tokens) // 2:
            reused, cache = 0, DynamicCache()  # of all positions: one that follows windows cannot be cropped
        elif reused < len(known):
            cache.crop(reused - len(known))
        while len(tokens) - reused > _BLOCK and reused + _BLOCK < start:  # a long prefix, with bounded memory
            ids = torch.tensor([list(tokens[reused : reused + _BLOCK])])
            body = self._model.base_model(ids, past_key_values=cache, use_cache=True, return_dict=True)
            reused, cache = reused + _BLOCK, body.past_key_values
        ids = torch.tensor([list(tokens[reused:])])
        output = self._model(
            ids, past_key_values=cache, use_cache=True, logits_to_keep=len(tokens) - start + 1, return_dict=True
        )
        self._prefix = (tuple(tokens), output.past_key_values)
        rows: Tensor = output.logits[0, :-1].float()
        return rows

    @torch.inference_mode()
    def replay(self, request: Request, compile_structure: ConstraintMaker) -> Replayed:
        """Compute a teacher-forced request (`score_from`)."""
        structure, tokens = request.params.structure, request.prompt_token_ids
        num_top, first = request.params.prompt_logprobs or 0, request.score_from or 0
        logprobs: list[float] = []
        rows: list[ReplayedToken] = []
        entries: list[TokenLogprobs] = []
        for start in range(first, len(tokens), _PIECE):
            until = min(start + _PIECE, len(tokens))
            logits = self.logits(tokens[:until], start)
            values, served = logits.log_softmax(-1), tokens[start:until]
            logprobs += values.gather(1, torch.tensor(served)[:, None])[:, 0].tolist()
            asked = request.scored_ids[start - first : until - first] or ((),) * len(served)
            if num_top or any(asked):
                places = zip(values, served, asked, strict=True)
                entries += [_entry(row, token, num_top, ids) for row, token, ids in places]
            constraint = None if structure is None else compile_structure(structure)
            rows += replayed_tokens(logits, request, start, constraint, self.eos_token_ids, VocabularyOps())
        return Replayed(tuple(logprobs), tuple(rows), "transformers", entries=tuple(entries), numerics=self._numerics)


@dataclass(slots=True)
class TransformersReplayer:
    """A `Replayer` with the weights of a folder, on a thread of its own."""

    folder: Path  # the model's, with its tokenizer
    max_model_len: int | None = None  # tokens of prompt and answer; None, and at most, the model's own limit
    num_threads: int = 0  # of the CPU; 0 = as many as torch takes
    form: str = "plain"  # of the weights, as `TransformersModel` takes it
    at_once: int = 1
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "truespec-referee"))
    _model: TransformersModel = field(init=False)
    _compiler: StructureCompiler = field(init=False)
    _info: ModelInfo = field(init=False)

    async def start(self) -> ModelInfo:
        """Load the model. Raises ConfigError: transformers cannot load it."""
        return await self._call(self._load)

    def _load(self) -> ModelInfo:
        if self.num_threads:
            torch.set_num_threads(self.num_threads)
        self._model = model = TransformersModel(self.folder, self.form)
        self._compiler = StructureCompiler(self.folder, model.vocab_size, model.eos_token_ids)
        longest = min(self.max_model_len or model.max_model_len, model.max_model_len)
        self._info = ModelInfo("watched", longest, model.vocab_size, "", str(self.folder), model.eos_token_ids)
        return self._info

    async def replay(self, request: Request) -> Replayed:
        """Compute a teacher-forced request."""
        tokens, info = request.prompt_token_ids, self._info
        if len(tokens) > info.max_model_len:
            raise SequenceTooLong(
                "prompt", f"Prompt and answer have {len(tokens)} tokens; the limit is {info.max_model_len}."
            )
        if not all(0 <= token < info.vocab_size for token in tokens):
            raise InvalidRequest("prompt", f"Token ids must be between 0 and {info.vocab_size - 1}.")
        request.check_scored_ids(info.vocab_size)
        return await self._call(lambda: self._model.replay(request, self._compiler))

    async def stop(self) -> None:
        """Let the thread end; what waits is not computed."""
        self._thread.shutdown(cancel_futures=True)

    async def _call(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)


class TransformersReferee:
    """Replays answers with the weights that are served, one model at a time, loaded when first needed.

    Args:
        get: gets the content of a shard of weights that came over the wire, a buffer of bytes, from where it lies.
        background: give way to everything else on the machine: one thread, which runs while a core is idle, and the
            first process to be killed where memory runs out.
    """

    def __init__(self, get: Callable[[Any], Any], *, background: bool = False) -> None:
        self._get = get
        self._loaded: tuple[ServedWeights, TransformersModel, StructureCompiler] | None = None
        if background:
            torch.set_num_threads(1)
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))  # nice(19) would still delay whoever wakes up
            Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")

    def replay(self, request: Request, weights: ServedWeights) -> Replayed:
        """Compute a teacher-forced request with these weights. Raises ConfigError: they cannot be had here; the message
        says why."""
        if self._loaded is None or self._loaded[0] != weights:
            self._loaded = None  # there may be no room for both
            with self._folder(weights) as folder:
                model = _load(folder, weights)
            compiler = StructureCompiler(Path(weights.tokenizer_folder), model.vocab_size, model.eos_token_ids)
            self._loaded = weights, model, compiler
        _, model, compiler = self._loaded
        return replace(model.replay(request, compiler), weight_version=weights.version)

    @contextlib.contextmanager
    def _folder(self, weights: ServedWeights) -> Iterator[Path]:
        """The folder of some weights, for as long as they are read."""
        if weights.source is not None:
            yield resolve_model(weights.source)
            return

        async def pull(content: Any) -> Any:
            return self._get(content)

        with tempfile.TemporaryDirectory(prefix="truespec-weights-") as scratch:
            like, folder = Path(weights.tokenizer_folder), Path(scratch) / "model"
            yield asyncio.run(lay_out(weights.shards, like, folder, pull))


def _entry(row: Tensor, token: int, num_top: int, ids: Sequence[int]) -> TokenLogprobs:
    """Read log-probabilities [V]: the token's, the likeliest, and those of ids."""
    best = row.topk(min(num_top, len(row)))
    value = row[token]
    return TokenLogprobs(
        token,
        value.item(),
        1 + int((row > value).sum()),
        tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True)),
        tuple(zip(ids, row[list(ids)].tolist(), strict=True)),
    )


def _load(folder: Path, weights: ServedWeights) -> TransformersModel:
    found = model_fingerprint(folder, weights=weights.form)
    if found != weights.fingerprint:
        raise ConfigError(f"{folder} no longer holds what is served: fingerprint {found}, not {weights.fingerprint}.")
    share = _ROUNDED_SHARE if is_rounded(weights.form) else _FLOAT32_SHARE
    needed = share * sum(file.stat().st_size for file in checkpoint_files(folder))
    if needed > (free := free_host_bytes()):
        raise UnsupportedModel(f"{folder} in float32 takes {needed / _GIB:.1f} GiB; only {free / _GIB:.1f} are free.")
    return TransformersModel(folder, weights.form)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(first, second, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
