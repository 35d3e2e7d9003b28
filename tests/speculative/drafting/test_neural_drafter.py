"""Drafting with a model: in step with its target through every way a sequence can go."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from speculative.assembly import Assembly
from speculative.config import DrafterConfig
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.drafting.weights import Weights
from speculative.engine import EngineCore
from speculative.errors import ConfigError, HandoffRefused
from speculative.model.layers import Attend
from speculative.model.loading import load_decoder
from speculative.request import Request, SamplingParams
from speculative.sampling.verification import VerifyInput, VerifyOutput
from speculative.selfcheck.monitor import SelfCheck
from speculative.state.handoff import decode_state
from speculative.state.kv_cache import KVShape
from tests.support.engines import (
    NO_DRAFTS,
    Answer,
    assert_idle,
    encode_state,
    exported,
    hand_over,
    insert,
    live_sequences,
    run,
    settings,
    take,
    tiny_engine,
)
from tests.support.tiny_models import padded, write_tiny_model
from tests.support.torch_operators import captured_on_a_cpu

VOCABULARY = 64
GREEDY = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
SAMPLED = SamplingParams(max_tokens=30, ignore_eos=True)
REPRODUCIBLE = SamplingParams(max_tokens=30, ignore_eos=True, reproducible=True)
PROMPTS = [tuple(3 + (7 * i * j) % 41 for j in range(1 + 9 * i)) for i in range(6)]
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drafting") / "stranger"
    return write_tiny_model(folder, vocab_size=VOCABULARY, seed=5, num_hidden_layers=1)


@pytest.fixture(scope="module")
def drafters(target: Path, stranger: Path, head: Path) -> dict[str, DrafterConfig]:
    head_drafter = DrafterConfig(kind="eagle3", model=str(head), num_draft_tokens=NUM_DRAFTS)
    return {"same_model": draft_model(target), "draft_model": draft_model(stranger), "eagle3": head_drafter}


class EchoModel:
    """Reads the target's embeddings as features and stores what it was given, so that a test can look it up.

    For a row it keeps the token in its key, and in its value the token whose features it was given. Its next hidden
    state is the embedding of its own token: that is what the row after it should have been given.
    """

    name = "echo"
    capture = (0,)
    kv_shape = KVShape(num_layers=1, num_kv_heads=1, head_dim=1)
    ids: Tensor | None = None
    held_out_rates = (), ()
    fused = None
    network = nn.Module()  # without layers

    def __init__(self, embedding: Tensor, ids: Tensor | None = None) -> None:
        self.embedding = embedding
        self.num_features = self.hidden_size = embedding.shape[1]
        self.ids = ids

    def fuse(self, features: Tensor) -> Tensor:
        return features

    def run(self, token_ids: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        given = torch.cdist(hidden, self.embedding).argmin(dim=-1)
        assert (positions >= 0).all()
        attend(0, token_ids.float()[:, None, None], token_ids.float()[:, None, None], given.float()[:, None, None])
        return self.embedding[token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        width = VOCABULARY if self.ids is None else len(self.ids)
        return (hidden @ self.embedding[:width].T).float()


def echo_engine(folder: Path, ids: Tensor | None = None, **changes: Any) -> EngineCore:
    decoder = load_decoder(folder, dtype=torch.float32, device="cpu")
    config = settings(drafter=DrafterConfig(num_draft_tokens=NUM_DRAFTS), **changes)
    model = EchoModel(decoder.embedding.detach(), ids)
    with captured_on_a_cpu():
        return EngineCore(Assembly(Weights(decoder, "tiny", model), config))


def same_model_engine(folder: Path, **changes: Any) -> EngineCore:
    return tiny_engine(folder, drafter=draft_model(folder), **changes)


def draft_model(folder: Path) -> DrafterConfig:
    return DrafterConfig(kind="draft_model", model=str(folder), num_draft_tokens=NUM_DRAFTS)


def assert_rows_are_true(engine: EngineCore) -> None:
    """Every row the drafter counts as computed holds its own token and was given the features of the one before."""
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    stored = drafter.cache.data[0, :, :, 0, 0]  # [2, slots]
    for sequence in live_sequences(engine):
        state = drafter._states.get(sequence.request.request_id)
        if state is None or not sequence.blocks or state.admission != sequence.admission:
            continue
        slots = engine._slots(sequence, 1, state.num_computed)
        tokens = torch.tensor(sequence.tokens)
        assert torch.equal(stored[0, slots].long(), tokens[1 : state.num_computed])
        assert torch.equal(stored[1, slots].long(), tokens[: state.num_computed - 1])


def requests(params: SamplingParams) -> list[Request]:
    return [Request(f"r{i}", prompt, params, seed=i) for i, prompt in enumerate(PROMPTS)]


def texts(engine: EngineCore, wanted: list[Request]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in answers_to(engine, wanted).items()}


def answers_to(
    engine: EngineCore, wanted: list[Request], check: Callable[[EngineCore], None] | None = None
) -> dict[str, Answer]:
    for request in wanted:
        engine.add(request)
    answers: dict[str, Answer] = {request.request_id: Answer() for request in wanted}
    while engine.has_work:
        take(answers, engine.step())
        if check is not None:
            check(engine)
    return answers


@pytest.mark.parametrize("params", [GREEDY, REPRODUCIBLE], ids=["greedy", "reproducible"])
@pytest.mark.parametrize("sampled", [True, False])
def test_text_is_the_plain_one(
    target: Path, drafters: dict[str, DrafterConfig], params: SamplingParams, sampled: bool
) -> None:
    plain = texts(tiny_engine(target, drafter=NO_DRAFTS), requests(params))
    engines = [tiny_engine(target, drafter=dataclasses.replace(own, sampled=sampled)) for own in drafters.values()]
    for engine in (*engines, echo_engine(target), echo_engine(target, torch.arange(0, VOCABULARY, 3))):
        assert texts(engine, requests(params)) == plain
        assert engine.take_stats().num_drafted > 0


@pytest.mark.parametrize("params", [GREEDY, SAMPLED, REPRODUCIBLE], ids=["greedy", "sampled", "reproducible"])
@pytest.mark.parametrize("prefill_only_after", [0, 1])
def test_a_drafter_that_is_the_target_is_always_right_through_handoff_preemption_and_prefix_hits(
    target: Path, prefill_only_after: int, params: SamplingParams
) -> None:
    prefill, decode = same_model_engine(target), same_model_engine(target, kv_cache_tokens=240, max_model_len=128)
    for _ in range(2):  # the second time prompts are found in the caches
        hand_over(prefill, decode, requests(params), prefill_only_after)
        run(decode)
    stats = decode.take_stats()
    assert stats.num_preemptions > 0
    assert prefill.take_stats().prefix_cache_hits > 0
    assert stats.num_accepted == stats.num_drafted > 100
    assert stats.expected_accepted == pytest.approx(stats.num_accepted, rel=1e-5)


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("chunk", [64, 24])
def test_rows_get_the_features_of_the_token_before(target: Path, block_size: int, chunk: int, graphs: bool) -> None:
    small = {"max_num_seqs": 6, "kv_cache_tokens": 240, "max_model_len": 128, "cuda_graphs": graphs}
    engine = echo_engine(target, block_size=block_size, max_batched_tokens=chunk, **small)
    for _ in range(2):
        answers_to(engine, requests(SAMPLED), assert_rows_are_true)
    stats = engine.take_stats()
    assert stats.num_preemptions > 0
    assert stats.prefix_cache_hits > 0
    assert 0 < stats.num_accepted < stats.num_drafted


@pytest.mark.parametrize("graphs", [False, True])
def test_rows_stay_true_where_a_prompt_goes_on_after_a_cached_answer(target: Path, graphs: bool) -> None:
    engine = echo_engine(target, cuda_graphs=graphs)
    first = answers_to(engine, requests(SAMPLED))
    engine.take_stats()
    longer = [
        dataclasses.replace(request, prompt_token_ids=(*request.prompt_token_ids, *first[request.request_id].token_ids))
        for request in requests(SAMPLED)
    ]
    answers_to(engine, longer, assert_rows_are_true)
    uncached = sum(len(request.prompt_token_ids) for request in longer) - engine.take_stats().prefix_cache_hits
    assert uncached <= len(longer) * 2 * engine.config.block_size


def test_features_outlive_the_steps_of_others(target: Path) -> None:
    """Canaries take turns with the rest: the features of those who wait must not be lost to a replay."""
    engine = echo_engine(target, cuda_graphs=True)
    wanted = [dataclasses.replace(request, canary=index % 2 == 1) for index, request in enumerate(requests(SAMPLED))]
    answers_to(engine, wanted, assert_rows_are_true)
    assert engine.take_stats().num_accepted > 0


def test_features_that_were_overwritten_are_never_read(target: Path) -> None:
    engine = echo_engine(target, cuda_graphs=True)
    engine.add(requests(SAMPLED)[3])
    for _ in range(4):
        engine.step()
    assert engine.parts.graphs is not None
    assert engine.parts.graphs.next_round is not None
    engine.parts.graphs.next_round._begun = None  # drafts that were made of them before
    engine.parts.graphs.buffers.features.version += 1
    with pytest.raises(RuntimeError, match="overwritten"):
        engine.step()


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("prefill_only_after", [0, 1, 5])
def test_rows_stay_true_through_a_handoff(target: Path, prefill_only_after: int, graphs: bool) -> None:
    prefill = echo_engine(target, max_batched_tokens=32, cuda_graphs=graphs)
    decode = echo_engine(target, block_size=8, cuda_graphs=graphs)
    hand_over(prefill, decode, requests(SAMPLED), prefill_only_after)
    while decode.has_work:
        decode.step()
        assert_rows_are_true(decode)
    assert_idle(prefill)
    assert not decode.drafter._states  # type: ignore[attr-defined]


def test_a_long_prompt_is_caught_up_on_in_pieces(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculative.drafting.neural_drafter._MAX_BUFFERED", 40)
    engine = echo_engine(target, max_batched_tokens=40)
    engine.add(Request("long", tuple(3 + i % 50 for i in range(300)), SAMPLED, seed=1))
    drafter = engine.drafter
    assert isinstance(drafter, ModelDrafter)
    while engine.has_work:
        engine.step()
        kept = [sum(len(features) for _, features in state.features) for state in drafter._states.values()]
        assert all(count <= 80 for count in kept)
        assert_rows_are_true(engine)


def test_requests_that_decline_speculation_cost_the_drafter_nothing(target: Path) -> None:
    engine = echo_engine(target)
    texts(engine, requests(SamplingParams(max_tokens=10, speculate=False)))
    assert engine.take_stats().num_drafted == 0
    answers_to(engine, requests(SAMPLED), assert_rows_are_true)  # prompts are cached now, without the drafter's rows


def test_a_handoff_without_the_drafters_state_is_refused(target: Path, stranger: Path) -> None:
    request = Request("r", PROMPTS[3], GREEDY)
    for prefill in (tiny_engine(target), tiny_engine(target, drafter=draft_model(stranger))):
        prefill.add(request, prefill_only_after=1)
        run(prefill)
        blob = exported(prefill, "r")
        with pytest.raises(HandoffRefused, match="drafter_state"):
            insert(same_model_engine(target), request, blob)
    declining = Request("r", PROMPTS[3], SamplingParams(max_tokens=9, speculate=False, ignore_eos=True))
    prefill = same_model_engine(target)
    prefill.add(declining, prefill_only_after=1)
    run(prefill)
    with pytest.raises(HandoffRefused, match="sections"):
        insert(same_model_engine(target), request, exported(prefill, "r"))


@pytest.mark.parametrize("sizes", [(64, 80), (80, 64), (64, 60)], ids=str)
def test_a_draft_model_may_be_padded_to_another_size(target: Path, tmp_path: Path, sizes: tuple[int, int]) -> None:
    """Ids of its padding, likely as they are, are never proposed, and the target's padding may be emitted."""
    ours, other = (padded(target, tmp_path / str(size), size, num_tokens=60) for size in sizes)
    for params in (GREEDY, REPRODUCIBLE):
        engine = tiny_engine(ours, drafter=draft_model(other))
        assert engine.drafter.model.ids.tolist() == [*range(60)]  # type: ignore[attr-defined]
        said = texts(engine, requests(params))
        assert said == texts(tiny_engine(ours, drafter=NO_DRAFTS), requests(params))
        assert max(itertools.chain(*said.values())) >= 60
        assert engine.take_stats().num_accepted > 0


def test_a_draft_model_that_cannot_be_is_refused(target: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", vocab_size=80)
    with pytest.raises(ConfigError, match=r"drafter\.model .* vocabulary .*without a tokenizer\.json of each"):
        tiny_engine(target, drafter=draft_model(other))
    ours, other = (padded(target, tmp_path / str(size), size, num_tokens=size) for size in (64, 80))
    with pytest.raises(ConfigError, match=r"drafter\.model .* \(80 ids\) than the model \(64\); take"):
        tiny_engine(ours, drafter=draft_model(other))
    with pytest.raises(ConfigError, match=r"drafter\.model"):
        DrafterConfig(kind="draft_model")
    short = write_tiny_model(tmp_path / "short", vocab_size=VOCABULARY, max_position_embeddings=64)
    with pytest.raises(ConfigError, match=r"model .* 64 positions, and requests may have \d+; set max_model_len"):
        tiny_engine(target, drafter=draft_model(short))
    engine = tiny_engine(target, drafter=draft_model(short), max_model_len=64)
    assert texts(engine, requests(dataclasses.replace(GREEDY, max_tokens=8)))


@pytest.mark.parametrize("kind", ["eagle3", "draft_model"])
def test_a_request_that_fails_takes_nothing_from_one_that_shares_its_prefix(
    target: Path, drafters: dict[str, DrafterConfig], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other was admitted on the shared blocks, and has not begun to compute when they are withdrawn."""
    monkeypatch.setattr("speculative.step.checked_sampler.ROW_KINDS", ("not_finite",) * 6)  # a fault of the engine's
    engine = tiny_engine(target, drafter=drafters[kind], max_num_seqs=4, max_batched_tokens=16)
    prefix, params = tuple(range(3, 23)), dataclasses.replace(GREEDY, max_tokens=8)
    engine.add(Request("warm", (*prefix, 7), params))
    run(engine)
    dead_end = SamplingParams(max_tokens=8, allowed_token_ids=(5,), bad_words=((5, 5),))
    engine.add(Request("failing", (*prefix, 30), dead_end))
    engine.step()
    engine.add(Request("long", tuple(range(3, 60)), params))
    sharing = Request("sharing", (*prefix, 9, 9, 9), params)
    engine.add(sharing)
    answers = run(engine)
    assert {name: str(answer.finish_reason) for name, answer in answers.items()} == {
        "failing": "error",
        "long": "length",
        "sharing": "length",
    }
    plain = texts(tiny_engine(target, drafter=NO_DRAFTS), [sharing])
    assert answers["sharing"].token_ids == plain["sharing"]
    assert_idle(engine)


def test_a_dead_end_of_a_clients_own_leaves_the_prefix_to_others(target: Path) -> None:
    engine = tiny_engine(target, drafter=NO_DRAFTS)
    prefix = tuple(range(3, 40))
    engine.add(Request("warm", (*prefix, 7), dataclasses.replace(GREEDY, max_tokens=2)))
    run(engine)
    dead_end = SamplingParams(max_tokens=8, allowed_token_ids=(5,), bad_words=((5, 5),))
    engine.add(Request("failing", (*prefix, 30), dead_end))
    assert str(run(engine)["failing"].finish_reason) == "error"
    engine.add(Request("next", (*prefix, 9), dataclasses.replace(GREEDY, max_tokens=2)))
    deltas = engine.step()
    assert [delta.num_cached_tokens for delta in deltas] == [len(prefix) // 4 * 4]


def test_sections_of_a_handoff_are_not_read_where_nothing_is_drafted(
    target: Path, drafters: dict[str, DrafterConfig]
) -> None:
    declining = Request("r", PROMPTS[3], dataclasses.replace(GREEDY, speculate=False))
    prefill, plain = (tiny_engine(target, drafter=drafters["eagle3"]) for _ in range(2))
    prefill.add(dataclasses.replace(declining, params=GREEDY), prefill_only_after=1)
    run(prefill)
    state = decode_state(exported(prefill, "r"), prefill.manifest)
    wrong = dataclasses.replace(state, extra={"renamed": state.extra["drafter_kv"]})
    insert(plain, declining, encode_state(wrong, plain.manifest))
    answer = run(plain)["r"]
    whole = texts(tiny_engine(target, drafter=NO_DRAFTS), [declining])["r"]
    assert [*state.token_ids[len(PROMPTS[3]) :], *answer.token_ids] == whole


def test_a_last_token_that_equals_its_rejected_draft_is_computed_again(target: Path) -> None:
    """What is left of p behind a rejection is no draft, or, in the rounding of p = q, it may be."""

    def reject(step: VerifyInput) -> VerifyOutput:
        first = step.drafts[step.first_rows]
        reported = torch.where(first >= 0, first, step.probs[step.first_rows].argmax(dim=-1))
        none = torch.zeros_like(step.counts)
        return VerifyOutput(none, reported, none.float())

    plain = texts(tiny_engine(target, drafter=NO_DRAFTS), requests(GREEDY))
    engine = same_model_engine(target)
    engine.parts.sampler.verify_uncoupled, engine.self_check = reject, SelfCheck(0.0)
    engine.parts.checked_sampler.self_check = engine.self_check  # else the engine's own checks end the requests
    assert texts(engine, requests(GREEDY)) == plain
    stats = engine.take_stats()
    assert stats.num_drafted > 0 and stats.num_accepted == 0
