"""Engines on a pretended CUDA device against the plain ones on the CPU, token for token."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.config import DrafterConfig
from speculative.drafting.neural_drafter import ModelDrafter
from speculative.drafting.weights import load_weights
from speculative.engine import EngineCore
from speculative.errors import ConfigError
from speculative.gpu import verify_graph
from speculative.gpu.memory import NUM_PIECES, PIECE_BYTES, graph_bytes
from speculative.gpu.operators import GraphOperators
from speculative.gpu.packed_attention import sending_packed
from speculative.gpu.paged_attention import AttentionSizes
from speculative.gpu.prompt_graph import prompt_sizes
from speculative.gpu.staged_inputs import Field
from speculative.kernels import chosen
from speculative.kernels.chosen import ChosenKernels
from speculative.model.applied import digests
from speculative.model.formats.fp8 import Fp8, Fp8Linear
from speculative.request import Request, SamplingParams
from speculative.sampling.verification import VerifyOutput
from speculative.state.batch import Entry, StepInput, StepOutcome
from speculative.step.host_copy import Verdicts
from tests.support.engines import (
    Answer,
    assert_idle,
    decoder_of,
    hand_over,
    load_engine,
    run,
    settings,
    take,
    texts,
    tiny_engine,
)
from tests.support.graph_scenes import (
    EDITED,
    LONG,
    PLAIN,
    PROMPTS,
    Alternating,
    add_all,
    answers,
    assert_same,
    assert_same_evidence,
    late_prompts,
)
from tests.support.graph_scenes import MIXED as ALL_WISHES
from tests.support.pretended_cuda import GARBAGE_ID, PretendedCuda
from tests.support.tiny_heads import write_tiny_head
from tests.support.tiny_models import write_tiny_model
from tests.support.torch_operators import torch_operators
from tests.support.triton_interpreter import needs_triton

pytestmark = [pytest.mark.slow, needs_triton]
PIECES = NUM_PIECES * PIECE_BYTES  # of handoffs, which steps have beside them
ALL = ("none", "ngram", "suffix", "draft_model", "eagle3")
SHORT, MIXED = ([dataclasses.replace(one, max_tokens=10) for one in many] for many in (PLAIN, ALL_WISHES))

Load = Callable[..., EngineCore]
Scene = Callable[[Load], dict[str, Answer]]


in_both_forms = pytest.mark.parametrize("load", ["plain", "fp8"], indirect=True)
"""With plain weights, and with FP8's, whose steps the CPU runs on the same buffers: what rounds the last bit otherwise
can round FP8 to the next number."""


def torch_operators_alone(_: ChosenKernels) -> GraphOperators:
    """Those of captured steps on a CPU, with prompts as the pretended device computes them."""
    operators = torch_operators(ChosenKernels())
    return replace(operators, prepare=lambda size, first: sending_packed(size, first, operators.attend_packed))


@pytest.fixture
def load(target: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Load:
    given: dict[str, Any] = {"max_num_seqs": 4, "self_check_sample_rate": 1.0}
    is_fp8 = getattr(request, "param", "plain") == "fp8"
    if is_fp8:
        monkeypatch.setattr(Fp8, "why_not", lambda *_: "")
        monkeypatch.setattr(chosen, "cpu_kernels", lambda: None)
        monkeypatch.setattr("tests.support.torch_operators.torch_operators", torch_operators_alone)
        given |= {"quantization": "fp8", "dtype": "bfloat16", "cuda_graphs": True}

    def load(**changes: Any) -> EngineCore:
        engine = load_engine(target, settings(**given | changes), make_constraint=lambda _: Alternating())
        num_fp8 = sum(isinstance(one, Fp8Linear) for one in decoder_of(engine).modules())
        assert num_fp8 == is_fp8 * 4 * engine.model.num_layers
        return engine

    return load


def on_both(
    scene: Scene, load: Load, *, capture_beforehand: bool = False, by_the_clock: bool = False
) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """Run a scene on the pretended device, and on the CPU, with the same evidence, but by_the_clock."""
    made: dict[str, list[EngineCore]] = {"cpu": [], "cuda": []}

    def load_on(place: str, **changes: Any) -> EngineCore:
        made[place].append(load(device=place, **changes))
        return made[place][-1]

    expected = scene(partial(load_on, "cpu"))
    with PretendedCuda(capture_beforehand=capture_beforehand) as device:
        found = scene(partial(load_on, "cuda"))
        assert device.num_replays > 5
        assert len(device.pool_bytes) <= 2 * len(made["cuda"]), "one for an engine, and one for its next weights"
    for own, other in zip(made["cuda"], made["cpu"], strict=True):
        if not by_the_clock:
            assert_same_evidence(own.take_stats(), other.take_stats())
    return found, expected


# -- token for token ------------------------------------------------------------------------------------------------


@in_both_forms
@pytest.mark.parametrize("name", ALL)
def test_every_drafter_with_plain_requests_all_others_and_those_that_change_logits(
    load: Load, drafters: dict[str, DrafterConfig], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scene(load: Load) -> dict[str, Answer]:
        engine = load(drafter=drafters[name], max_num_seqs=7)
        found = answers(engine, SHORT)
        add_all(engine, MIXED, prefix="mixed")
        found |= run(engine)
        if engine.parts.graphs is not None:
            only_prompts_may_be_eager(engine, monkeypatch)
        add_all(engine, [*EDITED, *SHORT[:3]], prefix="edited")
        return found | run(engine)

    assert_same(*on_both(scene, load, capture_beforehand=True))


def only_prompts_may_be_eager(engine: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = engine.parts.eager.takes

    def watched(entries: tuple[Entry, ...]) -> list[bool]:
        assert all(entry.num_known > 1 or entry.sequence.num_output == 0 for entry in entries), "it decodes"
        return takes(entries)

    monkeypatch.setattr(engine.parts.eager, "takes", watched)


@pytest.mark.parametrize(
    ("family", "kind", "is_long"),
    [
        *(("gemma2", "draft_model", False), ("olmo2", "eagle3", False), ("phi3", "draft_model", False)),
        *(("llama", "draft_model", True), ("llama", "eagle3", True)),
    ],
)
def test_models_of_other_families_and_the_long_scene_of_the_gpus_tests(
    family: str, kind: str, is_long: bool, tmp_path: Path
) -> None:
    longest = {"max_position_embeddings": 4096}
    folder = write_tiny_model(tmp_path / "model", family, vocab_size=64, num_hidden_layers=4, **longest)
    model = folder if kind == "draft_model" else write_tiny_head(tmp_path / "head", folder)
    own = DrafterConfig(kind=kind, model=str(model), num_draft_tokens=3)
    base = {"drafter": own, "self_check_sample_rate": 1.0, **(LONG if is_long else {"max_num_seqs": 4})}

    def load(**changes: Any) -> EngineCore:
        return load_engine(folder, settings(**base, **changes), make_constraint=lambda _: Alternating())

    assert_same(*on_both(lambda load: late_prompts(load()) if is_long else answers(load(), MIXED), load))


@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_the_coupled_verifier(load: Load, drafters: dict[str, DrafterConfig], name: str) -> None:
    assert_same(*on_both(lambda load: answers(load(drafter=drafters[name], verifier="coupled"), MIXED), load))


LOGPROBS = [
    SamplingParams(max_tokens=10, logprobs=5, temperature=0.5),
    SamplingParams(max_tokens=10, logprob_token_ids=tuple(range(20)), top_k=9),
    SamplingParams(max_tokens=10, logprobs=20, logprob_token_ids=(7, 9, 7), top_p=0.7, min_p=0.01),
]


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_every_logprobs_mode(load: Load, drafters: dict[str, DrafterConfig], mode: str) -> None:
    def scene(load: Load) -> dict[str, Answer]:
        engine = load(drafter=drafters["draft_model"], logprobs_mode=mode)
        found = answers(engine, SHORT[:4])
        edited = [dataclasses.replace(one, logprobs=count) for count, one in zip((0, 4, 20), EDITED[2:5], strict=True)]
        add_all(engine, [*LOGPROBS, *edited], prefix="more")
        return found | run(engine)

    assert_same(*on_both(scene, load))


@in_both_forms
@pytest.mark.parametrize(("name", "changes"), [("draft_model", {"length": "dynamic"}), ("eagle3", {"sampled": False})])
def test_drafts_of_varying_length_and_drafts_that_are_not_sampled(
    load: Load, drafters: dict[str, DrafterConfig], name: str, changes: dict[str, Any]
) -> None:
    greedy = [dataclasses.replace(one, temperature=0) for one in SHORT]  # whatever the clock makes of the lengths
    params = greedy if "length" in changes else SHORT
    drafter = dataclasses.replace(drafters[name], **changes)
    dynamic = "length" in changes
    found, expected = on_both(lambda load: answers(load(drafter=drafter), params), load, by_the_clock=dynamic)
    assert texts(found) == texts(expected)


@in_both_forms
@pytest.mark.parametrize("name", ["draft_model", "eagle3"])
def test_a_handoff(load: Load, drafters: dict[str, DrafterConfig], name: str) -> None:
    def scene(load: Load) -> dict[str, Answer]:
        prefill, decode = (load(drafter=drafters[name]) for _ in range(2))
        requests = [Request(f"r{index}", PROMPTS[index + 1], own, seed=index) for index, own in enumerate(SHORT[:4])]
        found = run(decode, hand_over(prefill, decode, requests, 5))
        assert_idle(prefill)
        assert_idle(decode)
        return found

    assert_same(*on_both(scene, load))


@in_both_forms
def test_scoring_and_prompts_in_chunks(load: Load) -> None:
    def scene(load: Load) -> dict[str, Answer]:
        engine = load(max_batched_tokens=24)
        params = SamplingParams(max_tokens=1, top_p=0.9, prompt_logprobs=2)
        engine.add(Request("scored", PROMPTS[4] + PROMPTS[3], params, seed=1, score_from=len(PROMPTS[4])))
        add_all(engine, SHORT)
        return run(engine)

    assert_same(*on_both(scene, load))


@in_both_forms
def test_preemptions(load: Load, drafters: dict[str, DrafterConfig]) -> None:
    def scene(load: Load) -> dict[str, Answer]:
        engine = load(drafter=drafters["draft_model"], kv_cache_tokens=96, max_model_len=96)
        found = answers(engine, PLAIN)
        assert engine.take_stats().num_preemptions > 0
        return found

    assert_same(*on_both(scene, load))


@in_both_forms
@pytest.mark.parametrize("name", ["ngram", "eagle3"])
def test_more_sequences_than_are_captured_are_computed_in_parts(
    load: Load, drafters: dict[str, DrafterConfig], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculative.gpu.buckets.MAX_CAPTURED_SEQS", 2)

    def scene(load: Load) -> dict[str, Answer]:
        engine, found = load(drafter=drafters[name], max_num_seqs=5), defaultdict[str, Answer](Answer)
        add_all(engine, [*SHORT[:3], *(dataclasses.replace(EDITED[index], max_tokens=10) for index in (0, 6))])
        for _ in range(4):  # with prompts
            take(found, engine.step())
        while engine.has_work:
            num_parts = -(-engine.usage().num_running // 2)
            if PretendedCuda.current is not None:
                PretendedCuda.current.waits.clear()
            take(found, engine.step())
            if PretendedCuda.current is not None:
                waits = dict(PretendedCuda.current.waits)
                assert waits.pop(("late copy", "gpu/staged_inputs.py:wait")) - num_parts <= 1, (
                    "the structured request's"
                )
                assert not waits
        return found

    assert_same(*on_both(scene, load))


def test_without_graphs_attention_is_torchs_and_waits_for_no_plan_of_cudnn(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    attend, masked = torch.nn.functional.scaled_dot_product_attention, set[bool]()

    def watched(query: Tensor, key: Tensor, value: Tensor, **named: Any) -> Tensor:
        masked.add(named["attn_mask"] is not None)
        assert not torch.backends.cuda.cudnn_sdp_enabled()
        assert named["attn_mask"] is None or query.shape[1] == key.shape[1], "what takes a mask takes no groups"
        return attend(query, key, value, **named)

    expected = answers(load(max_batched_tokens=20), SHORT)  # some prompts in pieces
    monkeypatch.setattr("torch.nn.functional.scaled_dot_product_attention", watched)
    with PretendedCuda():
        found = answers(load(device="cuda", cuda_graphs=False, max_batched_tokens=20), SHORT)
    torch.backends.cuda.enable_cudnn_sdp(True)
    assert_same(found, expected)
    assert masked == {False, True}


@pytest.mark.parametrize("name", ["suffix", "draft_model", "eagle3"])
def test_what_runs_eagerly_is_verified_in_parts(
    load: Load, drafters: dict[str, DrafterConfig], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("speculative.step.eager_step.ROWS_AT_ONCE", 9)
    parts = list[int]()

    def scene(load: Load) -> dict[str, Answer]:
        engine = load(drafter=drafters[name], max_num_seqs=6, cuda_graphs=False, self_check_sample_rate=1.0)
        sample = engine.parts.checked_sampler.sample

        def watched(step_input: StepInput, logits: Tensor, *given: Any) -> StepOutcome:
            parts.append(len(logits) if logits.is_cuda else 0)
            return sample(step_input, logits, *given)

        monkeypatch.setattr(engine.parts.checked_sampler, "sample", watched)
        return answers(engine, [*SHORT, *MIXED])

    expected = scene(load)
    with PretendedCuda():
        assert_same(scene(lambda **changes: load(device="cuda", **changes)), expected)
    assert 4 < max(parts) <= 9


@pytest.mark.parametrize(("name", "cheap_rows"), [("draft_model", 128), ("eagle3", 128), ("ngram", 0), ("dynamic", 0)])
def test_nothing_is_captured_while_requests_are_served(
    load: Load,
    drafters: dict[str, DrafterConfig],
    name: str,
    cheap_rows: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Prompts short and long, answers of all lengths, requests that come and go, edits of logits, logprobs of the
    likeliest tokens; edits and logprobs in one step, and named tokens, have graphs of their own, when they first come.
    """
    drafter = dataclasses.replace(drafters["eagle3"], length="dynamic") if name == "dynamic" else drafters[name]
    monkeypatch.setattr("speculative.gpu.buckets._CHEAP_ROWS", cheap_rows)
    with PretendedCuda(capture_beforehand=True) as device, caplog.at_level("INFO", "truespec.start"):
        engine = load(device="cuda", drafter=drafter, max_num_seqs=3)
        counts = [int(found[1]) for found in re.finditer(r"captured (\d+) CUDA graphs in", caplog.text)]
        assert sum(counts) == len(device.graphs) and len(counts) == 3 - (name == "ngram") and min(counts) > 0

        def serve(wishes: list[SamplingParams]) -> int:
            captured = len(device.graphs)
            params = [dataclasses.replace(own, max_tokens=2 + index) for index, own in enumerate(wishes)]
            add_all(engine, params[::2])
            for _ in range(7):
                engine.step()
            add_all(engine, params[1::2], prefix="late")
            run(engine)
            return len(device.graphs) - captured

        assert serve([*SHORT, *MIXED[:1], *MIXED[4:5], *MIXED[8:9]]) == 0
        assert serve([*SHORT, SamplingParams(logprobs=5), SHORT[0]]) == 0
        assert serve([*SHORT, *EDITED[:5], *EDITED[7:]]) == 0
        assert serve([*SHORT, *MIXED[::2]]) > 0
        if name != "dynamic":  # whatever the clock makes of the lengths
            assert serve([*SHORT, *MIXED[::2]]) == 0


# -- faults that the device has to find -----------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["", "padding counts", "everybody counts"])
def test_evidence_that_is_inflated_is_found(load: Load, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = verify_graph._fields
    if fault == "padding counts":
        monkeypatch.setattr(
            verify_graph,
            "_fields",
            lambda bucket, size: (
                fields(bucket, size)
                | {"counted": Field((bucket.num_seqs,), torch.bool, 1), "greedy": Field((bucket.num_rows,), torch.bool)}
            ),
        )

    def scene(load: Load) -> dict[str, Answer]:
        engine = load()
        if fault == "everybody counts" and engine.parts.graphs is not None:
            monkeypatch.setattr(engine.self_check, "counted", lambda entries, checked=True: np.full(len(entries), True))
        for index in range(3):
            engine.add(Request(f"r{index}", PROMPTS[2], SHORT[1], seed=index % 2))
        return run(engine)

    with pytest.raises(AssertionError, match="terms for") if fault else nullcontext():
        on_both(scene, load)


FP8_FAULTS: dict[str, tuple[str, Callable[[Fp8Linear], Any]]] = {
    "give bfloat16": ("dtype", lambda one: torch.float32),
    "weights are transposed": ("weight", lambda one: one.weight.t().contiguous().t()),
    "scales are contiguous": ("weight_scale", lambda one: one.weight_scale.expand(-1, 2).contiguous()[:, :1]),
}


@pytest.mark.parametrize("load", ["fp8"], indirect=True)
@pytest.mark.parametrize("fault", FP8_FAULTS)
def test_fp8_products_that_only_a_cpu_computes_are_found(load: Load, fault: str) -> None:
    with PretendedCuda():
        engine = load(device="cuda")
        linear = next(one for one in decoder_of(engine).modules() if isinstance(one, Fp8Linear))
        name, spoil = FP8_FAULTS[fault]
        spoiled = spoil(linear)
        delattr(linear, name)
        setattr(linear, name, spoiled)
        with pytest.raises(AssertionError, match=fault):
            answers(engine, SHORT[:1])


@pytest.mark.parametrize("to", [torch.zeros(3), None])
def test_a_copy_that_nobody_waited_for_is_garbage(to: Tensor | None) -> None:
    with PretendedCuda():
        source = torch.arange(3.0).to("cuda")
        copied = source.to("cpu", non_blocking=True) if to is None else to.copy_(source, non_blocking=True)
        done = torch.cuda.Event()
        done.record(torch.cuda.current_stream(source.device))
        assert copied.isnan().all()
        done.synchronize()
        assert copied.tolist() == [0, 1, 2]
        sent = torch.zeros(3, pin_memory=True)
        on_device = sent.to("cuda", non_blocking=True)
        sent[0] = 1
        with pytest.raises(AssertionError, match="filled again before its copy was done"):
            on_device.cpu()


def test_eager_results_that_are_read_before_they_came_are_found(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    found = list[Verdicts]()

    def read_at_once(verified: VerifyOutput, probs: Any) -> Verdicts:
        read = [one.to("cpu", non_blocking=True).numpy() for one in (verified.num_accepted, verified.token_ids)]
        found.append(Verdicts(read[0], read[1], 0.0))
        return found[-1]

    monkeypatch.setattr("speculative.step.sampler.copy_to_host", read_at_once)
    with PretendedCuda(), pytest.raises(IndexError):
        answers(load(device="cuda", cuda_graphs=False), SHORT)
    assert (found[0].token_ids == GARBAGE_ID).all()


# -- memory ---------------------------------------------------------------------------------------------------------


STAGING = 2**14  # bytes of the device that an update may take


@pytest.mark.parametrize(
    ("load", "name", "graphs"),
    [
        *(("plain", name, True) for name in ("none", "ngram", "draft_model", "eagle3")),
        ("plain", "eagle3", False),
        ("fp8", "ngram", True),
        ("fp8", "eagle3", True),
    ],
    indirect=["load"],
)
def test_new_weights_are_copied_over_the_old_where_the_cache_has_all_other_memory(
    load: Load, drafters: dict[str, DrafterConfig], name: str, graphs: bool, tmp_path: Path
) -> None:
    """With requests under way; the new head drafts other tokens than the old. Nothing is captured again."""
    new = write_tiny_model(tmp_path / "new", vocab_size=64, num_hidden_layers=4, seed=9)
    head = write_tiny_head(tmp_path / "head", new, draft_ids=torch.arange(24) * 2 + 5)
    drafter = {"draft_model": new, "eagle3": head}.get(name)

    def scene(load: Load) -> dict[str, Answer]:
        engine, found = load(drafter=drafters[name], max_num_seqs=2), defaultdict[str, Answer](Answer)
        add_all(engine, SHORT)
        for _ in range(6):
            take(found, engine.step())
        device, old = PretendedCuda.current, digests(engine.parts.weights.networks)
        if device is not None:
            captured, device.memory = len(device.graphs), device.taken + STAGING
            with pytest.raises(torch.OutOfMemoryError):
                load_weights(new, engine.config, engine.device, drafter)
        given = (new, engine.config, engine.device, drafter)
        weights = load_weights(*given, check=True, replaced=engine.parts.weights.networks)
        assert digests(engine.parts.weights.networks) == old != digests(weights.networks)
        if device is not None:
            device.clear()
        engine.switch(weights, "2")
        assert digests(engine.parts.weights.networks) == digests(weights.networks)
        if device is not None:
            # Parameters are pinned; tables of rotations and a head's ids are not.
            assert device.waits["upload from pageable memory", "model/new_weights.py:overwrite"] <= 3
            device.memory = 2**40
        run(engine, found)
        assert device is None or len(device.graphs) == captured
        assert engine.manifest.fingerprint == weights.fingerprint
        if weights.draft_model is not None:
            assert engine.manifest.drafter_state == weights.draft_model.name
        return found

    expected = scene(load)
    with PretendedCuda(capture_beforehand=True, memory=2**40):
        assert_same(scene(lambda **changes: load(device="cuda", cuda_graphs=graphs, **changes)), expected)


def test_an_update_that_cannot_take_the_place_of_what_is_served_is_refused_and_changes_nothing(
    load: Load, target: Path, drafters: dict[str, DrafterConfig], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Fp8, "why_not", lambda *_: "")
    own_embedding = write_tiny_head(tmp_path / "own", target, own_embedding=True)
    more_ids = write_tiny_head(tmp_path / "more", target, draft_ids=torch.arange(30))
    with PretendedCuda():
        engine = load(device="cuda", drafter=drafters["eagle3"])
        old, manifest = digests(engine.parts.weights.networks), engine.manifest
        for head, quantization, named in (
            (own_embedding, "auto", r"drafter \.embedding is"),
            (more_ids, "auto", r"drafter \.draft_ids is \[30\]"),
            (None, "fp8", r"model layers\.0\.attention\.o_proj\.weight is .* torch\.float8"),
        ):
            given = (target, replace(engine.config, quantization=quantization), engine.device, head)
            with pytest.raises(ConfigError, match=f"of another form .*: {named}"):
                load_weights(*given, replaced=engine.parts.weights.networks)
            with pytest.raises(ConfigError, match=f"of another form .*: {named}"):
                engine.switch(load_weights(*given), "2")
        monkeypatch.setattr("speculative.model.new_weights.free_host_bytes", lambda: 1000)
        with pytest.raises(ConfigError, match=r"the host's memory before the GPU gets them: 0.0 GiB, and 0.0 are free"):
            load_weights(target, engine.config, engine.device, replaced=engine.parts.weights.networks)
        assert digests(engine.parts.weights.networks) == old
        assert (engine.manifest, engine.weight_version) == (manifest, "default")


@pytest.mark.parametrize("fault", ["", "a pool for every graph"])
@pytest.mark.parametrize("name", ["ngram", "draft_model", "eagle3"])
def test_graphs_hold_less_memory_than_is_estimated(
    load: Load, drafters: dict[str, DrafterConfig], name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with PretendedCuda(capture_beforehand=True) as device:
        if fault:
            monkeypatch.setattr(torch.cuda, "graph", lambda graph, pool, **_: device._capture(graph))
        engine = load(device="cuda", drafter=drafters[name])
        assert engine.parts.graphs is not None
        buckets, model = engine.parts.graphs.buckets, getattr(engine.drafter, "model", None)
        sizes = AttentionSizes(4, buckets.largest.num_queries, engine.max_model_len // 4)
        estimate = graph_bytes(
            decoder_of(engine), buckets, sizes, model, prompt_sizes(engine.config.max_batched_tokens)
        )
        assert (estimate / 3 < sum(device.pool_bytes.values()) < estimate) == (not fault)


def test_the_cache_takes_what_steps_leave_free(
    target: Path, drafters: dict[str, DrafterConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of a tiny model need little; of what is left, target and drafter have their caches."""
    with PretendedCuda():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (PIECES + 2**27, 2**29))
        engine = tiny_engine(target, device="cuda", kv_cache_tokens=None, drafter=drafters["draft_model"])
        assert isinstance(engine.drafter, ModelDrafter)
        taken = sum(one.data.numel() * one.data.element_size() for one in (engine.cache, engine.drafter.cache))
    assert engine.config.kv_cache_tokens == engine.usage().num_blocks * engine.config.block_size
    left = 2**27 - 2**29 // 20
    assert 0.7 * left < taken < left


def test_a_gpu_without_room_for_a_cache_is_refused(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with PretendedCuda():
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (PIECES + 2**20, 2**30))
        for tokens, found in ((None, "nothing"), (1024, "too little")):
            with pytest.raises(ConfigError, match=rf"{found} is left for the KV cache; lower max_num_seqs"):
                tiny_engine(target, device="cuda", kv_cache_tokens=tokens)
