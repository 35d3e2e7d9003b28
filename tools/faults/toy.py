"""Engines small enough to audit in seconds: the real loop over a model that is a table, or over a tiny random decoder.

Scheduler, batches, verification, commit, self-checks and random streams are the engine's own. Their texts mean nothing.
"""

import json
from collections.abc import Sequence as Tokens
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from speculative.assembly import Assembly
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.base import Drafter, DraftOutput
from speculative.drafting.draft_model import DecoderDraftModel
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.model.attention import prepare_by
from speculative.model.config import ModelConfig
from speculative.model.decoder import Decoder
from speculative.model.rotary import Rope
from speculative.sampling.draft_probs import Drawn, PointMass
from speculative.sampling.rng import Purpose, uniforms
from speculative.state.batch import Batch, Int64s, StepInput
from speculative.state.sequence import Sequence
from speculative.state.token_constraint import Bools
from speculative.step.runner import ModelRunner

NUM_DRAFTS = 3
EOS = 1

SPREAD = 3.0  # a table's distributions are then about as peaked as a language model's
DRAFT_NOISE = 1.0
_WEIGHT_NOISE = 0.005  # of a draft model: nearly all of its drafts are accepted
_STRUCTURED = 12  # tokens of an answer that keeps to a structure


class TableRunner(ModelRunner):
    """A model whose next token depends on the last one only: logits are rows of a table [V, V]."""

    def __init__(self, decoder: Decoder, engine: EngineCore, table: Tensor) -> None:
        super().__init__(decoder, engine.cache, engine.device, prepare_by(None))
        self.table = table

    def forward_with_features(self, step_input: StepInput, capture: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """The tokens themselves, [N, 1], and no features."""
        del capture
        hidden = torch.from_numpy(step_input.input_ids)[:, None].float()
        return hidden, hidden[:, :0]

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] float32."""
        return self.table[hidden[:, 0].long()]


class TableDrafter(Drafter):
    """Samples up to `most` tokens from a chain whose rows are q [V, V]."""

    def __init__(self, q: Tensor, most: int = NUM_DRAFTS) -> None:
        self.q = q.float()
        self.cdf = q.double().cumsum(-1).numpy()
        self.most = most

    def counts(self, batch: Batch) -> Int64s:
        """[E] how many drafts each entry gets; may depend on its prefix."""
        return np.array([min(entry.max_drafts, self.most) for entry in batch.entries])

    def propose(self, batch: Batch) -> DraftOutput:
        """Draft as many tokens as fit, each with the row it was drawn from."""
        sequences = [entry.sequence for entry in batch.entries]
        counts = self.counts(batch)
        seeds = np.array([sequence.request.seed for sequence in sequences], np.uint64)
        rounds = np.array([len(sequence.tokens) for sequence in sequences], np.uint64)
        path = [np.array([sequence.tokens[-1] for sequence in sequences])]
        for offset in range(int(counts.max(initial=0))):
            key = (seeds, rounds, np.full_like(seeds, offset), np.full_like(seeds, Purpose.DRAFT))
            path.append(draw_rows(self.cdf[path[-1]], uniforms(*key)))
        chains = np.stack(path, axis=1)  # the pending token, then the drafts
        drafts = [chain[1 : count + 1].tolist() for chain, count in zip(chains, counts.tolist(), strict=True)]
        before = np.concatenate([chain[:count] for chain, count in zip(chains, counts.tolist(), strict=True)])
        return DraftOutput.pack(drafts, Drawn(self.q[torch.from_numpy(before)]))

    def logits_again(self, sequence: Sequence, places: Tokens[tuple[int, int]]) -> Tensor | None:
        """The rows of q; None where parameters that q does not follow would change them."""
        params = sequence.params
        if params.filtered or params.temperature != 1:
            return None
        return self.q[[sequence.tokens[start + offset - 1] for start, offset in places]].log()


class LikeliestDrafter(Drafter):
    """Drafts what the table most likely says next, as point masses: long runs are accepted."""

    def __init__(self, table: Tensor) -> None:
        self._next = table.argmax(-1).tolist()

    def propose(self, batch: Batch) -> DraftOutput:
        """Draft as many tokens as fit."""
        drafts = []
        for entry in batch.entries:
            chain = [entry.sequence.tokens[-1]]
            while len(chain) <= entry.max_drafts:
                chain.append(self._next[chain[-1]])
            drafts.append(chain[1:])
        return DraftOutput.pack(drafts, PointMass())


def draw_rows(cdf: Any, uniform: Any) -> Any:
    """One column per row of cumulated masses [B, V], by uniforms [B]."""
    return np.minimum((cdf <= (uniform * cdf[:, -1])[:, None]).sum(-1), cdf.shape[1] - 1)


class EvenAndOdd:
    """A structure for any vocabulary: even and odd tokens by turns, and then the end (a `TokenConstraint`)."""

    def __init__(self, vocab_size: int) -> None:
        tokens = np.arange(vocab_size)
        self._masks: list[Bools] = [(tokens % 2 == rest) & (tokens != EOS) for rest in range(2)]
        self._end: Bools = tokens == EOS

    def allowed(self, output: Tokens[int], drafts: Tokens[int]) -> list[Bools]:
        """Masks [vocab_size], up to the first draft that is not allowed."""
        masks = [self._mask(len(output))]
        for place, draft in enumerate(drafts, len(output) + 1):
            if not masks[-1][draft]:
                break
            masks.append(self._mask(place))
        return masks

    def _mask(self, place: int) -> Bools:
        return self._end if place >= _STRUCTURED else self._masks[place % 2]


def table_engine(
    vocab_size: int,
    *,
    deterministic: bool = False,
    spread: float = SPREAD,
    draft_noise: float = DRAFT_NOISE,
    seed: int = 1,
    **changes: Any,
) -> EngineCore:
    """An engine over a random table, with sampled drafts of one like it, or its likeliest tokens.

    spread, draft_noise: standard deviations of the table's logits, and of what the drafter's differ from them by.
    """
    noise = torch.Generator().manual_seed(seed)
    table = torch.randn(vocab_size, vocab_size, generator=noise) * spread
    near = table + torch.randn(vocab_size, vocab_size, generator=noise) * draft_noise
    drafter = LikeliestDrafter(table) if deterministic else TableDrafter(near.softmax(-1))
    return engine_over(table, drafter, seed=seed, **changes)


def engine_over(
    table: Tensor, drafter: Drafter | None = None, *, num_drafts: int = NUM_DRAFTS, seed: int = 1, **changes: Any
) -> EngineCore:
    """An engine whose model is this table [V, V] of logits; where no drafter is given, it drafts by n-grams.

    num_drafts: the most that a round may have.
    """
    settings = {"max_num_seqs": 256, "max_batched_tokens": 4096, "kv_cache_tokens": 32768, "prefix_caching": False}
    weights = tiny_weights(table.shape[0], seed=seed)
    engine = _engine(weights, {**settings, **changes}, num_drafts)
    engine.parts.eager.runner = TableRunner(weights.decoder, engine, table.float())
    if drafter is not None:
        engine.parts.eager.drafter = drafter
    return engine


def tiny_engine(vocab_size: int = 64, *, seed: int = 1, own_drafts: bool = False, **changes: Any) -> EngineCore:
    """An engine over a real decoder with random weights, drafting by n-grams; with `own_drafts` by another that
    nearly equals it.
    """
    settings = {"max_num_seqs": 8, "max_batched_tokens": 64, "kv_cache_tokens": 4096, "block_size": 8}
    return _engine(tiny_weights(vocab_size, seed=seed, own_drafts=own_drafts), {**settings, **changes})


def tiny_weights(vocab_size: int = 64, *, seed: int = 1, own_drafts: bool = False) -> Weights:
    """A tiny decoder with random weights; with `own_drafts` one that nearly equals it drafts."""
    model = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        rms_norm_eps=1e-6,
        rope=Rope.plain(10000.0, 16),
        max_position_embeddings=512,
        eos_token_ids=(EOS,),
    )
    noise = torch.Generator().manual_seed(seed)
    decoder = Decoder(model, dtype=torch.float32, device=torch.device("cpu"))
    for name, parameter in decoder.named_parameters():
        values = torch.randn(parameter.shape, generator=noise)
        parameter.copy_(1 + 0.2 * values if "norm" in name else 0.25 * values)
    if not own_drafts:
        return Weights(decoder, f"toy {seed}", None)
    drafter = Decoder(model, dtype=torch.float32, device=torch.device("cpu"))
    for own, parameter in zip(drafter.parameters(), decoder.parameters(), strict=True):
        own.copy_(parameter + _WEIGHT_NOISE * torch.randn(parameter.shape, generator=noise))
    return Weights(decoder, f"toy {seed}", DecoderDraftModel(drafter, "toy"))


def write_checkpoint(decoder: Decoder, folder: Path) -> None:
    """Write a tiny decoder as others can load it."""
    model = decoder.config
    known = {
        "model_type": "llama",
        "architectures": [model.architecture],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "rms_norm_eps": model.rms_norm_eps,
        "rope_theta": model.rope.theta,
        "max_position_embeddings": model.max_position_embeddings,
        "eos_token_id": EOS,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(known), encoding="utf-8")
    tensors = {name: slot.clone() for name, slot in decoder.checkpoint_slots().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _engine(weights: Weights, settings: dict[str, Any], num_drafts: int = NUM_DRAFTS) -> EngineCore:
    drafter = DrafterConfig.of(kind="ngram", num_draft_tokens=num_drafts, ngram_max=3, ngram_min=1)
    fixed = {"dtype": "float32", "device": "cpu", "drafter": drafter}
    structure = EvenAndOdd(weights.decoder.config.vocab_size)
    return EngineCore(Assembly(weights, EngineConfig(**{**fixed, **settings}), lambda _: structure))
