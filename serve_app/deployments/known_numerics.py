"""The rounding of a service's engines by its configuration and its checkpoint, whatever they say of themselves.

What a replica reports may narrow the tolerance for its answers, and never widens it.
"""

import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from serve_app.backends.base import UNKNOWN_NUMERICS, Computing, Numerics, Replayed, precision_of
from serve_app.config.app_config import AppConfig
from serve_app.config.base import PoolName
from serve_app.referee.judge.answer import Answer
from speculative.config import models_folder
from speculative.model.end_tokens import read_json
from speculative.model.forms import format_held, quantization_of
from speculative.weight_formats import FORMATS, PRECISIONS, Device, coarsest_held, format_wanted, is_rounded

_logger = logging.getLogger("truespec.referee")


class _Checkpoint(NamedTuple):
    """The facts about a checkpoint: as `format_held` and `quantization_of` say, and whether CPUs repeat its rows."""

    held: str | None
    quantization: str | None
    repeats: bool


@dataclass
class KnownNumerics:
    """Holds replicas to the numerics of their pools.

    misreported: called with a replica, each time that it reports others which would widen a tolerance.
    """

    config: AppConfig
    misreported: Callable[[str], None] = lambda replica: None

    def __post_init__(self) -> None:
        self._replicas: dict[str, tuple[PoolName, bool]] = {}  # their pools, and whether they say they lack kernels
        self._logged: set[tuple[str, Numerics]] = set()

    def observe(self, replica: str, pool: str, computing: Computing) -> None:
        """Take in what a replica says of itself."""
        own = next(name for name in self.config.pool_names if name == pool)
        self._replicas[replica] = own, bool(computing.kernels_off)
        self._held(replica, computing.numerics, self.of(own))

    def served(self, answer: Answer) -> Answer:
        """The answer, its engine's numerics and longest sequence held to what is known of them."""
        pool, _ = self._replicas.get(answer.replica, (self.config.decoding_pool, False))
        longest = min(answer.max_model_len, self.config.engine.max_model_len or answer.max_model_len)
        return replace(
            answer, numerics=self._held(answer.replica, answer.numerics, self.of(pool)), max_model_len=longest
        )

    def replayed(self, replayed: Replayed) -> Replayed:
        """The replay of a replica, its engine's numerics held to what is known of them."""
        pool, claimed = self.config.pool_names[0], replayed.numerics
        known = self.of(pool)
        if claimed.engine == "truespec" and known.engine == "vllm" and self.config.may_replay_vllm(pool):
            dtype = self.config.replay_config(pool).dtype
            known = Numerics("truespec", dtype, "plain", self._repeats(pool))
        return replace(replayed, numerics=self._held(replayed.replica, claimed, known))

    def of(self, pool: PoolName) -> Numerics:
        """Those of a pool; where this node lacks the checkpoint, the coarsest that `auto` may give there."""
        engine, found = self.config.engine, self._checkpoint
        device: Device = "cuda" if self.config.pool(pool).num_gpus > 0 else "cpu"
        if engine.kind == "vllm":
            form = self.config.vllm.engine_args.get("quantization") or (found and found.quantization)
            if form is None and found is None:
                return Numerics("vllm", PRECISIONS[-1])
            return Numerics("vllm", precision_of(engine.dtype, form), form or "plain")
        held = found.held if found else coarsest_held(device)
        form = format_wanted(engine.quantization, held, engine.dtype, device)
        weights = form if is_rounded(form) else "plain"
        repeats = FORMATS[form].packed and self._repeats(pool)
        return Numerics("truespec", precision_of(engine.dtype, form), weights, repeats)

    def _held(self, replica: str, claimed: Numerics, known: Numerics) -> Numerics:
        """What is reported where it widens no tolerance; else what is known."""
        if claimed == UNKNOWN_NUMERICS:
            return known
        _, lacks_kernels = self._replicas.get(replica, (None, True))  # before its first report it may lack them
        no_coarser = claimed.precision in PRECISIONS[: PRECISIONS.index(known.precision) + 1]
        as_known = claimed.engine == known.engine and claimed.weights.startswith(("plain", known.weights))
        if no_coarser and as_known and (claimed.repeats or not known.repeats or lacks_kernels):
            return claimed
        self.misreported(replica)
        if (replica, claimed) not in self._logged:
            self._logged.add((replica, claimed))
            _logger.error("%s says that it computes as %s, and is judged as %s, as configured", replica, claimed, known)
        return known

    def _repeats(self, pool: PoolName) -> bool:
        """Return whether rows are rounded alike in any batch, as far as this node can say."""
        return self._checkpoint is not None and self._checkpoint.repeats and self.config.pool(pool).num_gpus == 0

    @cached_property
    def _checkpoint(self) -> "_Checkpoint | None":
        """The checkpoint, where this node has it."""
        folder = _folder_here(self.config.model.source)
        if folder is None:
            return None
        shape = read_json(folder / "config.json")
        head_dim = shape.get("head_dim") or shape.get("hidden_size", 1) // (shape.get("num_attention_heads") or 1)
        repeats = head_dim % 16 == 0  # what the CPU kernels' attention needs
        return _Checkpoint(format_held(folder), quantization_of(folder), repeats)


def _folder_here(source: str) -> Path | None:
    for folder in (Path(source).expanduser(), models_folder() / source):
        if (folder / "config.json").is_file():
            return folder
    repository, _, revision = source.partition("@")
    with contextlib.suppress(LocalEntryNotFoundError, HFValidationError, OSError):
        return Path(snapshot_download(repository, revision=revision or None, local_files_only=True))
    return None
