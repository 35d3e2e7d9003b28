"""Padded, bucketed steps against the plain path, on the CPU: a replay calls there what a GPU would have captured."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.gpu.buckets import PackedBucket
from speculative.gpu.logit_edits import FOLLOWED, MAX_CELLS, EditSizes, LogitEdits
from speculative.gpu.verify_graph import Extras
from speculative.request import FinishReason, Request, SamplingParams
from tests.support.engines import Answer, load_engine, run, settings, tiny_engine
from tests.support.graph_scenes import (
    EDITED,
    MIXED,
    NUM_DRAFTS,
    PLAIN,
    PROMPTS,
    VOCABULARY,
    Alternating,
    answers,
    assert_same,
    assert_same_evidence,
)
from tests.support.step_inputs import HIDDEN_TOLERANCE, Twins, input_of

# -- the forward pass, bucket by bucket -----------------------------------------------------------------------------


@torch.inference_mode()
def test_every_bucket_gives_what_the_plain_path_gives_at_any_fill(target: Path) -> None:
    twins = Twins(target, max_model_len=256, max_num_seqs=9)
    graphs = twins.graphs
    for number, (most_seqs, num_rows) in enumerate(graphs.buckets.packed):
        for num_seqs in {1, (most_seqs + 1) // 2, most_seqs}:
            counts = [1] * num_seqs
            for index in range(num_rows - most_seqs):  # one after another gets all that a sequence can have
                counts[-1 - index // 4 % num_seqs] += index < 4 * num_seqs
            lengths = [(index * 17 + number) % 60 for index in range(num_seqs)]
            step_input = input_of(lengths, counts, twins.block_size, seed=number)
            graphs.buffers.hidden.fill_(torch.nan)
            twins.cache.data[:, :, twins.live :] = torch.nan
            graphs.runner.target.run(PackedBucket(most_seqs, num_rows), step_input, None)
            expected, _ = twins.plain.forward_with_features(step_input, ())
            assert (graphs.buffers.hidden[: len(expected)] - expected).abs().max() < HIDDEN_TOLERANCE
            assert not graphs.buffers.hidden[:num_rows].isnan().any(), "padding computes numbers"
            twins.assert_same_cache(step_input)
    assert graphs.capturer.num_captured == len(graphs.buckets.packed), "each bucket once"


# -- the engine -----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def poison(engine: EngineCore) -> None:
    """NaN wherever a step may not look: the statics, the trash blocks, and blocks that nobody holds."""
    assert engine.parts.graphs is not None
    buffers, next_round = engine.parts.graphs.buffers, engine.parts.graphs.next_round
    begun = next_round is not None and next_round._begun is not None  # drafts that the step may read
    for tensor in (
        buffers.hidden,
        buffers.draft_hidden,
        *(() if begun else (buffers.drafts.probs, buffers.drafts.mass_before)),
    ):
        tensor.fill_(torch.nan)
    unread = torch.ones(len(buffers.features.rows), dtype=torch.bool)
    for state in engine.drafter._in_buffer if isinstance(engine.drafter, ModelDrafter) else ():
        if state.in_buffer is not None:
            unread[state.in_buffer.row : state.in_buffer.row + state.in_buffer.num_rows] = False
    buffers.features.rows[unread] = torch.nan
    for tensor in () if begun else (buffers.drafts.tokens, buffers.drafts.columns):
        tensor.fill_(0)
    pool, size = engine.scheduler.pool, engine.config.block_size
    unheld = [block for block in pool._free if block not in pool._hash_of] + [pool.num_blocks]
    caches = [engine.cache, *([engine.drafter.cache] if hasattr(engine.drafter, "cache") else [])]
    for block in unheld:
        for cache in caches:
            cache.data[:, :, block * size : (block + 1) * size] = torch.nan


@pytest.mark.parametrize(
    ("name", "limit", "value"),
    [
        *((name, "MAX_CELLS", MAX_CELLS) for name in ("ngram", "draft_model", "eagle3")),
        ("eagle3", "FOLLOWED", FOLLOWED - {"logit_bias"}),
        ("eagle3", "MAX_CELLS", 30),
    ],
)
def test_graphs_emit_what_the_plain_path_emits(
    target: Path, drafters: dict[str, DrafterConfig], name: str, limit: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that no graph can hold are among them: with a parameter that captured steps do not know, and with more
    edits than they take."""
    changes: dict[str, Any] = {"drafter": drafters[name], "self_check_sample_rate": 1.0, "max_num_seqs": 12}
    params = PLAIN if value is MAX_CELLS else [*MIXED, *EDITED[:4]]
    monkeypatch.setattr(f"speculative.gpu.logit_edits.{limit}", value)
    plain, graphed = tiny_engine(target, **changes), tiny_engine(target, **changes, cuda_graphs=True)
    assert graphed.parts.graphs is not None
    replayed, eager = Mock(wraps=graphed.parts.graphs.verify), Mock(wraps=graphed.parts.eager.verify)
    monkeypatch.setattr(graphed.parts.graphs, "verify", replayed)
    monkeypatch.setattr(graphed.parts.eager, "verify", eager)
    assert_same(answers(graphed, params, before_step=poison), answers(plain, params))
    assert replayed.call_count > 5 and (eager.call_count > 6) == (params is not PLAIN), "prefills are not replayed"
    assert_same_evidence(graphed.take_stats(), plain.take_stats())


HALF_BANNED = SamplingParams(bad_words=tuple((token,) for token in range(0, VOCABULARY, 2)))
HALF_BANNED_BY_PHRASES = SamplingParams(bad_words=tuple(itertools.product(range(VOCABULARY), range(0, VOCABULARY, 2))))


@pytest.mark.parametrize(
    ("name", "params"), [("none", HALF_BANNED), ("ngram", HALF_BANNED_BY_PHRASES), ("draft_model", EDITED[6])]
)
def test_a_token_that_was_not_kept_out_breaks_an_invariant(
    target: Path, drafters: dict[str, DrafterConfig], name: str, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogitEdits, "apply", lambda self, logits, rows, sizes: logits)
    config = settings(drafter=drafters[name], cuda_graphs=True)
    engine = load_engine(target, config, make_constraint=lambda _: Alternating())
    found = answers(engine, [dataclasses.replace(params, max_tokens=60)] * 4)
    assert FinishReason.ERROR in {answer.finish_reason for answer in found.values()}
    assert engine.take_stats().violations["support"] > 0


def test_a_row_that_is_no_number_ends_its_request_and_no_other(target: Path) -> None:
    params = [SamplingParams(max_tokens=12, ignore_eos=True, temperature=0)] * 4
    engine = tiny_engine(target, cuda_graphs=True, prefix_caching=False)
    for index, own in enumerate(params):
        engine.add(Request(f"r{index}", PROMPTS[index + 1], own, seed=index))
    found: dict[str, Answer] = {f"r{index}": Answer() for index in range(4)}
    for delta in engine.step():
        found[delta.request_id].take(delta)
    victim = engine.scheduler.find("r2")
    assert victim is not None
    with torch.inference_mode():
        engine.cache.data[:, :, victim.blocks[0] * engine.config.block_size] = torch.nan
    for name, answer in run(engine).items():
        assert (answer.finish_reason is FinishReason.ERROR) == (name == "r2")
        assert (answer.error is not None) == (name == "r2")


# -- what a capture runs first: padding -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_padding_alone_can_be_judged_in_every_bucket(
    target: Path, drafters: dict[str, DrafterConfig], name: str
) -> None:
    graphs = tiny_engine(target, drafter=drafters[name], cuda_graphs=True, max_num_seqs=5).parts.graphs
    assert graphs is not None
    graphs.capture_all()
    for bucket in graphs.buckets.packed:
        for edits in (None, EditSizes(16, 1024)):
            vector, _ = graphs.judge.prepare(bucket, Extras(edits=edits)).replay()
            accepted, token_ids = vector[: 2 * bucket.num_seqs].split(bucket.num_seqs)
            assert (accepted == 0).all()
            assert ((token_ids >= 0) & (token_ids < VOCABULARY)).all()
            drafts, broken = vector[2 * bucket.num_seqs :][: 2 * bucket.num_rows].split(bucket.num_rows)
            assert (drafts == -1).all()
            assert (broken == 0).all()


# -- settings -------------------------------------------------------------------------------------------------------


def test_an_engine_on_a_cpu_refuses_graphs(target: Path) -> None:
    with pytest.raises(ConfigError, match=r"cuda_graphs is true, and this engine computes on a CPU.* remove it"):
        EngineCore.load(target, settings(cuda_graphs=True))


def test_graphs_are_off_without_a_gpu(target: Path) -> None:
    assert EngineConfig().cuda_graphs is None
    plain, graphed = tiny_engine(target), tiny_engine(target, cuda_graphs=True)
    assert plain.parts.graphs is None
    assert graphed.cache.data.shape[2] == plain.cache.data.shape[2] + plain.config.block_size
    assert graphed.usage().num_blocks == plain.usage().num_blocks, "nobody is given the trash block"


def test_passages_that_are_longer_than_a_models_drafts_take_no_room_of_q(
    target: Path, drafters: dict[str, DrafterConfig]
) -> None:
    drafter, room = dataclasses.replace(drafters["eagle3"], length="dynamic"), []
    for one, num_queries in ((drafter, NUM_DRAFTS + 1), (dataclasses.replace(drafter, suffix_first=12), 13)):
        graphs = tiny_engine(target, cuda_graphs=True, drafter=one, max_batched_tokens=128).parts.graphs
        assert graphs is not None and graphs.buckets.largest.num_queries == num_queries
        room.append(graphs.buffers.drafts.probs.shape)
    assert room[0] == room[1]
