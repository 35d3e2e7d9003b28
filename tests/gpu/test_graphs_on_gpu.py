"""CUDA graphs against the same code run eagerly, and the engine with graphs against the engine without."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from speculative.config import DrafterConfig
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.engine import EngineCore
from speculative.gpu.capture import Capturer, Outputs
from speculative.gpu.memory import graph_bytes
from speculative.gpu.paged_attention import AttentionSizes
from speculative.gpu.prompt_graph import prompt_sizes
from speculative.model.formats.fp8 import FORMAT
from speculative.request import Request, SamplingParams
from tests.support.engines import NO_DRAFTS, Answer, decoder_of, run, settings
from tests.support.graph_scenes import LONG, PROMPTS, answers, late_prompts
from tests.support.tiny_models import write_tiny_model

pytestmark = pytest.mark.gpu
DTYPES = ("float32", "bfloat16")
NEAR_TIE = 0.125  # nats: of logits below 16, two units in the last place of bfloat16
NGRAM = DrafterConfig.of(kind="ngram", num_draft_tokens=3, ngram_min=1)


def gpu_engine(folder: Path, **changes: Any) -> EngineCore:
    sizes = {"device": "cuda", "kv_cache_tokens": 4096, "max_num_seqs": 8, "max_batched_tokens": 256, "block_size": 16}
    return EngineCore.load(folder, settings(**{**sizes, **changes}))


def drafter(kind: str, folder: Path) -> DrafterConfig:
    if kind == "none":
        return NO_DRAFTS
    model = folder.parent / "head" if kind == "eagle3" else folder
    return NGRAM if kind == "ngram" else DrafterConfig(kind=kind, model=str(model), num_draft_tokens=3)


def test_graphs_that_share_a_pool_do_not_write_over_one_anothers_results(cuda: torch.device) -> None:
    capturer = Capturer(cuda)
    source = torch.arange(1 << 16, device=cuda, dtype=torch.float32)
    first = capturer.capture(lambda: source * 2)
    second = capturer.capture(lambda: (source * 3).sort(descending=True).values)
    kept = first()
    second()
    assert torch.equal(kept, source * 2)


class EagerCapturer(Capturer):
    """Never captures: what a replay should give, on the same device and the same buffers."""

    def capture(self, function: Callable[[], Outputs]) -> Callable[[], Outputs]:
        return function


PLAIN = [
    SamplingParams(max_tokens=40, ignore_eos=True, temperature=temperature, logprobs=0)
    for temperature in (0, 1, 1, 0.7, 0, 1)
]
FILTERED = [
    SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, top_p=0.9),
    SamplingParams(max_tokens=40, ignore_eos=True, logprobs=0, top_k=20, min_p=0.01),
]


LATE = LONG | {"dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {"dtype": dtype}) for kind in ("none", "ngram", "draft_model", "eagle3") for dtype in DTYPES),
        *(("eagle3", LATE | more) for more in ({}, {"quantization": "fp8"})),
    ],
)
def test_replayed_steps_give_the_bits_of_eager_ones(
    cuda: torch.device, gpu_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any]
) -> None:
    """Prompts come together, or late beside long contexts, in FP8, too."""
    if "quantization" in changes and (why := FORMAT.why_not(cuda, "bfloat16", None)):
        pytest.skip(why)

    def served() -> dict[str, tuple[list[int], list[float]]]:
        engine = gpu_engine(gpu_folder, drafter=drafter(kind, gpu_folder), **changes)
        found = late_prompts(engine) if "block_size" in changes else answers(engine, PLAIN)
        return {name: (one.token_ids, one.values) for name, one in found.items()}

    replayed = served()
    monkeypatch.setattr("speculative.gpu.graph_step.Capturer", EagerCapturer)
    assert replayed == served()


@pytest.mark.parametrize(
    ("family", "kind", "is_late"),
    [
        *(("llama", kind, False) for kind in ("none", "ngram", "draft_model", "eagle3")),
        *(("gemma2", "draft_model", False), ("gemma3", "ngram", False), ("olmo2", "draft_model", False)),
        *(("phi3", "draft_model", False), ("llama", "draft_model", True), ("llama", "eagle3", True)),
    ],
)
def test_graphs_emit_what_the_plain_path_emits(
    cuda: torch.device, gpu_folder: Path, tmp_path: Path, family: str, kind: str, is_late: bool
) -> None:
    """Prompts that arrive late beside long contexts, too."""
    folder = gpu_folder if family == "llama" else write_tiny_model(tmp_path / family, family)

    def served(**changes: Any) -> dict[str, Answer]:
        engine = gpu_engine(folder, drafter=drafter(kind, folder), **(LONG if is_late else {}), **changes)
        return late_prompts(engine) if is_late else answers(engine, [*PLAIN, *FILTERED])

    graphed, plain = served(), served(cuda_graphs=False)
    for name, answer in graphed.items():
        assert answer.token_ids == plain[name].token_ids
        assert answer.values == pytest.approx(plain[name].values, abs=1e-3)


def test_reproducible_requests_say_the_same_with_and_without_speculation(cuda: torch.device, gpu_folder: Path) -> None:
    params = [SamplingParams(max_tokens=40, ignore_eos=True, reproducible=True)] * 4
    texts = [
        {name: one.token_ids for name, one in answers(gpu_engine(gpu_folder, drafter=own), params).items()}
        for own in (NO_DRAFTS, NGRAM, drafter("draft_model", gpu_folder), drafter("eagle3", gpu_folder))
    ]
    assert all(one == texts[0] for one in texts)


@pytest.mark.parametrize("kind", ["ngram", "draft_model"])
def test_greedy_texts_in_bfloat16_part_at_near_ties_only(
    cuda: torch.device, gpu_folder: Path, record_property: Callable[[str, object], None], kind: str
) -> None:
    """With speculation and without: cuBLAS chooses another kernel for another number of rows."""
    params = [SamplingParams(max_tokens=100, ignore_eos=True, temperature=0, logprobs=2)] * 24
    with_drafts, plain = (
        answers(gpu_engine(gpu_folder, dtype="bfloat16", drafter=own), params)
        for own in (drafter(kind, gpu_folder), NO_DRAFTS)
    )
    partings = {name: parting(one, plain[name]) for name, one in with_drafts.items()}
    share = sum(gap is None for gap in partings.values()) / len(partings)
    record_property("share_of_equal_texts", share)
    assert max((gap for gap in partings.values() if gap is not None), default=0.0) <= NEAR_TIE


def parting(one: Answer, other: Answer) -> float | None:
    """Nats between the likeliest two tokens where the texts part; None where they are equal."""
    for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
        if ours.token_id != theirs.token_id:
            assert {ours.token_id, theirs.token_id} == {token for token, _ in theirs.top}, "they are the likeliest two"
            return theirs.top[0][1] - theirs.top[1][1]
    return None


def test_all_rounds_find_their_graphs_captured_and_the_memory_estimate_holds(
    cuda: torch.device, gpu_folder: Path
) -> None:
    before = gpu_engine(gpu_folder, drafter=drafter("draft_model", gpu_folder), cuda_graphs=False)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    del before
    engine = gpu_engine(gpu_folder, drafter=drafter("draft_model", gpu_folder))
    torch.cuda.empty_cache()
    sizes = AttentionSizes(16, 4, -(-engine.max_model_len // 16))
    assert engine.parts.graphs is not None and isinstance(engine.drafter, ModelDrafter)
    prompts = prompt_sizes(engine.config.max_batched_tokens)
    estimate = graph_bytes(decoder_of(engine), engine.parts.graphs.buckets, sizes, engine.drafter.model, prompts)
    # Libraries keep workspaces of their own, and the allocator's segments are not full.
    assert torch.cuda.memory_reserved() - reserved < estimate + (256 << 20)
    assert engine.parts.graphs is not None
    captured = engine.parts.graphs.capturer.num_captured
    assert captured > 0
    answers(engine, [SamplingParams(max_tokens=23, ignore_eos=True, temperature=0)] * 8 + FILTERED)
    assert engine.parts.graphs.capturer.num_captured == captured


def test_sampled_tokens_follow_the_distribution_on_the_gpu(
    cuda: torch.device, gpu_folder: Path, stranger_folder: Path
) -> None:
    """Self-checks over thousands of positions raise no alarm, and none of their means is far from 0."""
    own = drafter("draft_model", stranger_folder)
    engine = gpu_engine(gpu_folder, drafter=own, self_check_sample_rate=1.0, max_num_seqs=32)
    for index in range(64):
        params = SamplingParams(max_tokens=200, ignore_eos=True)
        engine.add(Request(f"r{index}", PROMPTS[index % len(PROMPTS)], params, seed=1000 + index))
    run(engine)
    stats = engine.take_stats()
    assert not stats.alarms
    assert stats.checks["d"].num > 5000
    for check in ("d", "a", "g"):
        assert abs(stats.checks[check].z) < 5
