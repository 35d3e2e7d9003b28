"""For tests of the distribution only: the real engine over a model that is a table, so that every probability is known
exactly.

The table's model is a Markov chain: logits after a token are the token's row. Scheduler, batches, verification, commit
and random streams are the engine's own; only the forward pass is replaced. `TableDrafter` draws its drafts from another
chain.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deploy.audit import toy
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.base import Drafter
from speculative.engine import EngineCore
from speculative.model.config import ModelConfig
from speculative.model.loading import load_decoder
from speculative.request import Request, SamplingParams
from speculative.state.batch import Batch, Int64s
from tests.support.tiny_models import write_tiny_model


class TableDrafter(toy.TableDrafter):
    """As its base; with `vary`, draft lengths depend on the prefix, 0 included."""

    def __init__(self, q: Tensor, most: int, *, vary: bool = True) -> None:
        super().__init__(q, most)
        self.vary = vary

    def counts(self, batch: Batch) -> Int64s:
        counts = super().counts(batch)
        return np.array([sum(entry.sequence.tokens) for entry in batch.entries]) % (counts + 1) if self.vary else counts


def table_engine(
    folder: Path, table: Tensor, drafter: Drafter | None, engine_class: type[EngineCore] = EngineCore, **config: object
) -> EngineCore:
    """An engine over the table, with its own drafter unless one is given."""
    vocab_size = table.shape[0]
    if not (folder / "config.json").exists():
        write_tiny_model(folder, vocab_size=vocab_size, num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    settings = {
        "dtype": "float32",
        "device": "cpu",
        "max_num_seqs": 256,
        "max_batched_tokens": 4096,
        "kv_cache_tokens": 16384,
        "prefix_caching": False,
        "drafter": DrafterConfig(kind="ngram", num_draft_tokens=4, ngram_min=1),
    }
    model = ModelConfig.from_folder(folder)
    decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
    engine = engine_class(decoder, model, EngineConfig(**{**settings, **config}))  # type: ignore[arg-type]
    engine.eager.runner = toy.TableRunner(decoder, engine, table.float())
    if drafter is not None:
        engine.eager.drafter = drafter
    return engine


def sample(engine: EngineCore, prompt: tuple[int, ...], count: int, length: int, **params: object) -> np.ndarray:
    """[count, length] tokens of `count` requests with seeds of their own."""
    settings = SamplingParams(max_tokens=length, ignore_eos=True, **params)  # type: ignore[arg-type]
    out: dict[str, list[int]] = {}
    for number in range(count):
        engine.add(Request(str(number), prompt, settings, seed=number * 2654435761 + 1))
    while engine.has_work:
        for delta in engine.step():
            assert delta.error is None, delta.error
            out.setdefault(delta.request_id, []).extend(delta.token_ids)
    return np.array([out[str(number)] for number in range(count)])


def worst_window(samples: np.ndarray, distribution: np.ndarray, first: int) -> float:
    """The largest deviation, in standard deviations, of any three neighbouring tokens from the chain's distribution [V,
    V]."""
    marginal = distribution[first]
    worst = -np.inf
    for start in range(samples.shape[1] - 2):
        joint = marginal[:, None, None] * distribution[:, :, None] * distribution[None, :, :]
        worst = max(worst, sigmas(samples[:, start : start + 3], joint))
        marginal = marginal @ distribution
    return float(worst)


def sigmas(samples: np.ndarray, joint: np.ndarray) -> float:
    """How many standard deviations the chi-square of samples [N, length] lies above its mean.

    Cells that expect fewer than 10 are put together.
    """
    vocab_size, length = joint.shape[0], joint.ndim
    index = np.zeros(len(samples), np.int64)
    for position in range(length):
        index = index * vocab_size + samples[:, position]
    observed = np.bincount(index, minlength=joint.size).astype(float)
    expected = joint.reshape(-1) * len(samples)
    rare = expected < 10
    assert not observed[expected == 0].any(), "a token of probability 0 was emitted"
    observed = np.append(observed[~rare], observed[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    keep = expected > 0
    chi_square = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    return float((chi_square - freedom) / np.sqrt(2 * freedom))
