"""Small engines for tests, and what to compare them with: random tiny models, and hand-made Markov chains."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from speculative.assembly import Assembly
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.weightless import LookupDrafter
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.model.attention import attend_by_rule
from speculative.model.config import PLAIN, ModelConfig, ScoreRule
from speculative.model.decoder import Decoder
from speculative.model.rotary import Rope
from speculative.request import FinishReason, Request, Round, TokenDelta, TokenKind, TokenLogprobs
from speculative.state.handoff import Blob, ComputedTokenState, Export, Manifest
from speculative.state.token_constraint import ConstraintMaker
from tests.support.torch_operators import captured_on_a_cpu

NO_DRAFTS = DrafterConfig(kind="none")
NGRAM = DrafterConfig.of(kind="ngram", num_draft_tokens=4, ngram_max=4, ngram_min=1)


def settings(**changes: Any) -> EngineConfig:
    """Float32 on the CPU, small blocks, drafts wherever a token was seen before."""
    small = {
        "dtype": "float32", "device": "cpu", "max_num_seqs": 8, "max_batched_tokens": 64, "kv_cache_tokens": 1024,
        "block_size": 4, "drafter": NGRAM,
    }  # fmt: skip
    return EngineConfig(**{**small, **changes})  # type: ignore[arg-type]


def tiny_engine(folder: Path, **changes: Any) -> EngineCore:
    """An engine over a checkpoint written by `write_tiny_model`."""
    return load_engine(folder, settings(**changes))


def load_engine(folder: Path, config: EngineConfig, make_constraint: ConstraintMaker | None = None) -> EngineCore:
    """An engine over a checkpoint, which takes `cuda_graphs` on a CPU, too."""
    with captured_on_a_cpu() if config.cuda_graphs and config.device == "cpu" else nullcontext():
        return EngineCore.load(folder, config, make_constraint)


def encode_state(state: ComputedTokenState, manifest: Manifest) -> Blob:
    """A state as an engine with this manifest would export it."""
    sections = {"kv": state.kv, **state.extra}
    export = Export(manifest, len(state.token_ids), sum(one.nbytes for one in sections.values()))
    for values in sections.values():
        placed = export.place(values.shape).copy_(values)
        export.take(placed, of_target=False)
    extra = {name: tuple(one.shape) for name, one in state.extra.items()}
    export.describe(state.token_ids, state.num_prompt, state.num_cached, extra)
    return export.finish()


def exported(engine: EngineCore, request_id: str) -> Blob:
    """The handoff of a held request."""
    return engine.export(request_id).finish()


def insert(engine: EngineCore, request: Request, blob: Blob) -> None:
    """Go on from a handoff."""
    engine.insert(request, engine.unpack(blob))


def markov_engine(next_token: Tensor | Sequence[int], *, eos: tuple[int, ...] = (), **changes: Any) -> EngineCore:
    decoder = markov_decoder(next_token, eos=eos)
    return EngineCore(Assembly(Weights(decoder), settings(**changes)))


def markov_decoder(next_token: Tensor | Sequence[int], *, eos: tuple[int, ...] = (), num_layers: int = 1) -> Decoder:
    """A real decoder whose next token depends on the last one only; its layers add nothing.

    `next_token` is a table of probabilities [V, V], or for every token the one that surely follows it.
    """
    table = torch.as_tensor(next_token)
    if table.ndim == 1:
        table = functional.one_hot(table, len(table)).float()
    vocab_size = len(table)
    config = ModelConfig(
        architecture="LlamaForCausalLM", vocab_size=vocab_size, hidden_size=vocab_size, intermediate_size=2,
        num_layers=num_layers, num_heads=1, num_kv_heads=1, head_dim=2, rms_norm_eps=1e-12, rope=Rope.plain(10000.0, 2),
        max_position_embeddings=512, eos_token_ids=eos,
    )  # fmt: skip
    decoder = Decoder(config, dtype=torch.float32, device=torch.device("cpu"))
    for name, parameter in decoder.named_parameters():
        parameter.fill_(1.0 if "norm" in name else 0.0)
    decoder.embedding.copy_(torch.eye(vocab_size))
    decoder.lm_head.weight.copy_(table.clamp(min=1e-30).log().T / vocab_size**0.5)  # the norm scales a one-hot by √V
    return decoder


@dataclass
class Answer:
    """What a request got, its deltas put together."""

    token_ids: list[int] = field(default_factory=list)
    kinds: list[TokenKind] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_drafted: int = 0
    num_accepted: int = 0
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    error: str | None = None
    round_sizes: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)

    def take(self, delta: TokenDelta) -> None:
        assert self.finish_reason is None, "a delta after the last one"
        assert len(delta.kinds) == len(delta.token_ids)
        assert delta.num_accepted <= delta.num_drafted
        self.deltas.append(delta)
        self.token_ids += delta.token_ids
        self.kinds += delta.kinds
        self.logprobs += delta.logprobs or ()
        self.num_drafted += delta.num_drafted
        self.num_accepted += delta.num_accepted
        self.num_cached_tokens = delta.num_cached_tokens
        self.finish_reason, self.stop_token_id, self.error = delta.finish_reason, delta.stop_token_id, delta.error
        self.round_sizes.append(len(delta.token_ids))
        self.rounds += delta.rounds

    @property
    def values(self) -> list[float]:
        """The logprob of every emitted token."""
        return [entry.logprob for entry in self.logprobs]


def run(
    engine: EngineCore, answers: dict[str, Answer] | None = None, *, max_steps: int = 2000
) -> defaultdict[str, Answer]:
    """Step until nothing moves any more; what every request got, behind what it has in `answers`."""
    answers = defaultdict(Answer, answers or {})
    for _ in range(max_steps):
        if not engine.has_work:
            return answers
        take(answers, engine.step())
        assert_pool_is_whole(engine)
    raise AssertionError(f"still at work after {max_steps} steps: {engine.usage()}")


def answer_all(engine: EngineCore, requests: Iterable[Request], *, max_steps: int = 2000) -> dict[str, Answer]:
    """Answers of requests that run together; nothing is left of them in the engine."""
    for request in requests:
        engine.add(request)
    answers = run(engine, max_steps=max_steps)
    assert_idle(engine)
    return answers


def texts(answers: Mapping[str, Answer]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in answers.items()}


def hand_over(
    prefill: EngineCore, decode: EngineCore, requests: Iterable[Request], prefill_only_after: int = 1
) -> dict[str, Answer]:
    """Have one engine compute the prompts of these requests and so many tokens, and the other take in those that are
    not finished; what every request got so far."""
    wanted = list(requests)
    for request in wanted:
        prefill.add(request, prefill_only_after=prefill_only_after)
    answers = run(prefill)
    for request in wanted:
        if request.request_id in prefill.held_ids:
            insert(decode, request, exported(prefill, request.request_id))
    return answers


def take(answers: dict[str, Answer], deltas: Iterable[TokenDelta]) -> None:
    for delta in deltas:
        answers[delta.request_id].take(delta)


def live_sequences(engine: EngineCore) -> list[Any]:
    scheduler = engine.scheduler
    return [*scheduler._running, *scheduler._arriving, *scheduler._waiting, *scheduler.held]


def assert_pool_is_whole(engine: EngineCore) -> None:
    """Every block is free or held, as often as sequences hold it; what is not computed yet is nobody else's."""
    holders: dict[int, int] = defaultdict(int)
    for sequence in live_sequences(engine):
        for block in sequence.blocks:
            holders[block] += 1
    pool = engine.scheduler.pool
    assert [holders[block] for block in range(pool.num_blocks)] == pool._holders
    assert pool.num_free == sum(count == 0 for count in pool._holders)
    for sequence in live_sequences(engine):
        for block in sequence.blocks[sequence.num_computed // engine.config.block_size :]:
            assert holders[block] == 1, "a block that will be written to is shared"


def assert_idle(engine: EngineCore) -> None:
    assert not engine.has_work
    assert not engine.held_ids
    assert engine.usage().num_free_blocks == engine.usage().num_blocks
    if isinstance(engine.drafter, LookupDrafter):
        assert not getattr(engine.drafter.lookup, "_indexes", None)
    assert_pool_is_whole(engine)


@torch.inference_mode()
def naive_logits(decoder: Decoder, token_ids: Tensor) -> Tensor:
    """Logits [N, L, V] of whole sequences [N, L], without a cache: the forward pass one would write first."""
    num_sequences, length = token_ids.shape

    def attend(_layer: int, query: Tensor, key: Tensor, value: Tensor, scores: ScoreRule = PLAIN) -> Tensor:
        if scores != PLAIN:
            parts = zip(*(part.split(length) for part in (query, key, value)), strict=True)
            return torch.cat([attend_by_rule(*part, scores) for part in parts])
        query, key, value = (x.unflatten(0, (num_sequences, length)).transpose(1, 2) for x in (query, key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return attended.transpose(1, 2).flatten(0, 1)

    positions = torch.arange(length).repeat(num_sequences)
    hidden = decoder(token_ids.reshape(-1), positions, attend)
    return decoder.logits(hidden).unflatten(0, (num_sequences, length))


def decoder_of(engine: EngineCore) -> Decoder:
    return engine.runner.decoder


def teacher_forced(engine: EngineCore, prompt: Sequence[int], output: Sequence[int]) -> Tensor:
    """Raw log-probabilities [len(output), V] at each position of `output`, from whole-sequence forward passes."""
    logits = naive_logits(decoder_of(engine), torch.tensor([[*prompt, *output]]))[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)
