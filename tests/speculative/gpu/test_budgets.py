"""What a decoding step costs on a CUDA device, counted on a pretended one: waits of the host, launches, graph nodes."""

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from speculative.config import DrafterConfig
from speculative.engine import EngineCore
from speculative.gpu.buckets import Bucket
from speculative.gpu.next_round import STEADY_STEPS
from speculative.request import Request, SamplingParams, Structure
from tests.support.engines import NO_DRAFTS, settings, tiny_engine
from tests.support.graph_scenes import VOCABULARY, Alternating, add_all
from tests.support.pretended_cuda import PretendedCuda
from tests.support.tiny_models import write_tiny_model
from tests.support.triton_interpreter import needs_triton

pytestmark = [pytest.mark.slow, needs_triton]


class Cost(NamedTuple):
    """Of a decoding step of four sequences: how often the host waits for the device, what is launched outside of
    graphs, and how many graphs are replayed."""

    waits: float
    launches: float
    replays: float


# At most, with three plain neighbours of the odd one. The goal is 1 wait and no launch outside of graphs in every row.
BUDGETS = {
    **{("none", odd): Cost(1, 0, 2) for odd in ("filtered", "named_logprobs", "biases", "reproducible")},
    **{("ngram", odd): Cost(1, 0, 2) for odd in ("plain", "five_logprobs", "penalty", "structure")},
    **{("eagle3", odd): Cost(1, 0, 4) for odd in ("plain", "filtered", "penalty", "prompt_logprobs", "reproducible")},
    ("eagle3", "coupled"): Cost(1, 0, 4),
    ("eagle3", "structure"): Cost(2, 0, 4),
    ("draft_model", "filtered"): Cost(1, 0, 4),
    # In one pass with a prompt, so that weights are read once. What is launched is for its last rows, and by the head.
    **{(name, "late_prompt"): Cost(1, 3, 2) for name in ("none", "ngram")},
    ("eagle3", "late_prompt"): Cost(1, 40, 4),
}
# Launches within graphs. The goal is 10 a layer, and 12 for a verification of any kind.
LAYER_NODES = 10
FP8 = {"quantization": "fp8", "dtype": "bfloat16"}
VERIFY_NODES = {"none": 13, "eagle3": 16}  # one keeps the verdict for what is begun behind it, 3 look up the drafts
VERDICT_NODES = 17  # to place the rows and uniforms of a round's drafts behind a verdict that the host has not read
DRAFT_NODES = 4  # to sample a draft of each sequence, filters included
ODD = {
    "plain": SamplingParams(logprobs=0),
    "filtered": SamplingParams(top_p=0.8, top_k=20, min_p=0.01),
    "five_logprobs": SamplingParams(logprobs=5),
    "named_logprobs": SamplingParams(logprob_token_ids=(7, 9)),
    "penalty": SamplingParams(frequency_penalty=0.5),
    "biases": SamplingParams(logit_bias=((5, 3.0),), bad_words=((7,),), allowed_token_ids=tuple(range(60))),
    "structure": SamplingParams(structure=Structure("choice", "[]")),
    "prompt_logprobs": SamplingParams(prompt_logprobs=3),
    **dict.fromkeys(("reproducible", "coupled"), SamplingParams(reproducible=True)),
    "late_prompt": SamplingParams(),
}


def decoding_cost(engine: EngineCore, device: PretendedCuda, odd: str) -> Cost:
    """The mean of some steps."""
    params = dataclasses.replace(ODD[odd], max_tokens=80, ignore_eos=odd != "structure")
    late = Request("late", tuple(range(3, 60)) * 4, params, seed=9)
    add_all(engine, [SamplingParams(max_tokens=80, ignore_eos=True)] * 3 + [params] * (odd != "late_prompt"))
    for _ in range(STEADY_STEPS + 4):  # prompts, what the drafter's first rounds catch up on, the first early pass
        engine.step()
    if odd == "late_prompt":
        engine.add(late)
    device.counts_launches = True  # which takes as long as all the rest
    costs: list[Cost] = []
    while len(costs) < 4:
        device.clear()
        num_graphs = len(device.graphs)
        num_answering = len({delta.request_id for delta in engine.step()})
        assert num_answering == 4 - (odd == "late_prompt")
        if len(device.graphs) == num_graphs:  # not one that captures a shape of its own
            costs.append(Cost(sum(device.waits.values()), device.num_launches, device.num_replays))
    assert engine.usage().num_running == 4
    return Cost(*(sum(parts) / len(costs) for parts in zip(*costs, strict=True)))


@pytest.mark.parametrize(("name", "odd"), BUDGETS)
def test_a_decoding_step_keeps_to_its_budget(
    target: Path, drafters: dict[str, DrafterConfig], name: str, odd: str
) -> None:
    changes = {"drafter": drafters[name], "device": "cuda", "max_num_seqs": 4, "self_check_sample_rate": 1.0}
    changes |= {"max_batched_tokens": 32}  # of which the late prompt fills many
    config = settings(**changes, verifier="coupled" if odd == "coupled" else "token_wise")
    with PretendedCuda() as device:
        engine = EngineCore.load(target, config, make_constraint=lambda _: Alternating())
        cost = decoding_cost(engine, device, odd)
    over = [part for part, most in zip(cost, BUDGETS[name, odd], strict=True) if part > most]
    assert not over, f"{cost}, waiting at {device.waits}"


@pytest.mark.parametrize(("weights", "budget"), [({}, LAYER_NODES), (FP8, LAYER_NODES + 1)], ids=["plain", "fp8"])
def test_a_layer_keeps_to_its_budget(tmp_path: Path, weights: dict[str, Any], budget: int) -> None:
    """With FP8 weights, norms and gate quantize what they give; attention's output takes a launch of its own."""
    nodes = []
    for num_layers in (1, 2):
        folder = write_tiny_model(tmp_path / str(num_layers), vocab_size=VOCABULARY, num_hidden_layers=num_layers)
        with PretendedCuda(count_launches=True, capture_beforehand=True) as device:
            tiny_engine(folder, device="cuda", max_num_seqs=1, drafter=NO_DRAFTS, **weights)
        nodes.append(device.graphs[0].num_nodes)
    assert nodes[1] - nodes[0] <= budget


@pytest.mark.parametrize("name", VERIFY_NODES)
def test_verification_keeps_to_its_budget(target: Path, drafters: dict[str, DrafterConfig], name: str) -> None:
    with PretendedCuda(count_launches=True) as device:
        graphs = tiny_engine(target, device="cuda", max_num_seqs=4, drafter=drafters[name]).parts.graphs
        assert graphs is not None
        graphs.judge._captured.clear()
        graphs.judge.prepare(graphs.buckets.packed[0])
    assert device.graphs[-1].num_nodes <= VERIFY_NODES[name]


@pytest.mark.parametrize(("name", "num_layers"), [("eagle3", 1), ("draft_model", 4)])
def test_a_draft_keeps_to_its_budget(
    target: Path, drafters: dict[str, DrafterConfig], name: str, num_layers: int
) -> None:
    """Besides the layers of the model that drafts: what enters them, its norms, its LM head, and sampling."""
    with PretendedCuda(count_launches=True) as device:
        graphs = tiny_engine(target, device="cuda", max_num_seqs=4, drafter=drafters[name]).parts.graphs
        assert graphs is not None and graphs.loop is not None
        nodes = []
        for num_drafts in (1, 2):
            with torch.inference_mode():
                graphs.loop.prepare(Bucket(4, num_drafts))
            nodes.append(device.graphs[-1].num_nodes)
    assert nodes[0] <= VERDICT_NODES + DRAFT_NODES + 3, "block tables, the last norm, and the LM head"
    most = DRAFT_NODES + num_layers * LAYER_NODES + 6
    assert nodes[1] - nodes[0] <= most
