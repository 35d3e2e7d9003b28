"""What is no fault between two engines: by the pair's precisions, as configured, whatever a replica says of itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.backends.base import UNKNOWN_NUMERICS, Computing, Numerics, Replayed, precision_of
from serve_app.config.files import parse_args
from serve_app.deployments.known_numerics import KnownNumerics
from serve_app.referee.judge.answer import Answer
from serve_app.referee.judge.tolerance import ServiceTolerances, Tolerance
from speculative.errors import ConfigError
from speculative.request import Request, SamplingParams


def tolerances(**sections: dict[str, Any]) -> ServiceTolerances:
    config = parse_args({"model": {"source": "m"}, **sections})
    return ServiceTolerances(config)


def test_what_rounding_does_depends_on_the_precision_unless_it_is_set() -> None:
    own, reference = Numerics("truespec", "bfloat16", "plain", True), Numerics("transformers", "float32", "plain")
    found, by_batch = tolerances(), replace(own, repeats=False)
    assert found.between(own, own) == Tolerance.between_equals("bfloat16")
    assert found.between(by_batch, by_batch) == Tolerance.against_float32("bfloat16"), "batches of another size"
    assert found.between(own, reference) == Tolerance.against_float32("bfloat16")
    assert found.between(own, replace(own, engine="vllm")) == Tolerance.against_float32("bfloat16")
    given = tolerances(replay={"edge_nats": 0.5, "max_tme": 1.2, "distribution_tolerance": 0.02})
    equals, apart = given.between(own, own), given.between(own, reference)
    assert (equals.edge_nats, apart.edge_nats) == (0.5, 1.0), "two engines round each by itself"
    assert (equals.shift_nats, apart.shift_nats) == (0.05, 0.1), "which moves the mean as it moves logits"
    assert {(one.max_tme, one.distribution) for one in (equals, apart)} == {(1.2, 0.02)}


def test_on_a_gpu_rounding_is_assumed_until_it_is_set_or_measured(tmp_path: Path) -> None:
    measured, gpu = replace(Tolerance.between_equals("bfloat16"), max_tme=1.07), {"decode": {"num_gpus": 1.0}}
    file = tmp_path / "tolerance.json"
    file.write_text(json.dumps(measured.to_wire()))
    own, exact = Numerics("truespec", "bfloat16", "plain"), Numerics("truespec", "float32", "plain")
    on_gpu = tolerances(pools=gpu)
    assert on_gpu.between(own, own).assumed and on_gpu.configured.assumed
    assert not on_gpu.between(exact, exact).assumed and not tolerances().between(own, own).assumed
    assert not tolerances(pools=gpu, replay={"max_tme": 1.2}).between(own, own).assumed
    found = tolerances(pools=gpu, replay={"tolerance": str(file)})
    assert found.between(own, own) == measured and found.between(exact, exact) != measured
    repeats = replace(own, repeats=True)
    assert found.between(repeats, repeats) == Tolerance.between_equals("bfloat16"), "which makes the same error"
    with pytest.raises(ConfigError, match=r"replay\.tolerance: \S+none\.json holds no tolerance"):
        tolerances(replay={"tolerance": str(tmp_path / "none.json")})


def test_the_coarser_of_a_pair_decides() -> None:
    found, exact = tolerances(engine={"dtype": "float32"}), Numerics("truespec", "float32", "plain", True)
    fp8, other = Numerics("truespec", "fp8", "fp8"), replace(exact, weights="gguf")
    reference = replace(exact, engine="transformers")
    assert found.configured == Tolerance.against_float32("float32")
    assert found.between(exact, reference) == Tolerance.against_float32("float32")
    assert found.between(fp8, fp8) == Tolerance.between_equals("fp8")
    assert found.between(exact, fp8) == Tolerance.against_float32("fp8"), "the coarser of the two"
    assert found.between(other, other) == Tolerance.between_equals("float32")
    assert found.between(other, reference) == Tolerance.against_float32("bfloat16"), "of weights that were rounded"


@pytest.mark.parametrize(
    ("dtype", "form", "precision"),
    [
        ("float32", "auto", "float32"),
        ("bfloat16", "w4a8", "w4a8"),
        ("float32", "bfloat16", "bfloat16"),
        ("bfloat16", "awq_marlin", "bfloat16"),
        ("bfloat16", "modelopt_fp4", "fp8"),
    ],
)
def test_the_precision_is_that_of_what_weights_are_multiplied_with(
    dtype: str, form: str | None, precision: str
) -> None:
    assert precision_of(dtype, form) == precision


BF16 = Numerics("truespec", "bfloat16", "plain", repeats=True)
F32, W4A8 = replace(BF16, precision="float32"), replace(BF16, precision="w4a8", weights="w4a8")
FP8, ODD = Numerics("truespec", "fp8", "fp8"), Numerics("", "odd")
BY_BATCH, VLLM = replace(BF16, repeats=False), Numerics("vllm", "bfloat16", "plain")
ON_GPUS: dict[str, Any] = {"pools": {"monolith": {"num_gpus": 1}}}
APART: dict[str, Any] = {"topology": "disaggregated", "pools": {"prefill": {"num_gpus": 1}, "decode": {"num_cpus": 1}}}


def numerics_of(folder: Path, wrong: list[str], **sections: Any) -> KnownNumerics:
    return KnownNumerics(
        parse_args({"model": {"source": str(folder)}, "topology": "monolith", **sections}), wrong.append
    )


@pytest.mark.parametrize(
    ("sections", "known", "widening"),
    [
        ({}, BF16, [FP8, W4A8, BY_BATCH, replace(BF16, weights="w4a8"), replace(BF16, engine="x"), ODD]),
        ({"engine": {"dtype": "float32"}}, F32, [BF16, FP8, replace(F32, repeats=False), replace(F32, weights="gguf")]),
        ({"engine": {"quantization": "w4a8"}}, W4A8, [FP8, replace(W4A8, repeats=False)]),
        (ON_GPUS, BY_BATCH, [FP8, W4A8]),
        (ON_GPUS | {"engine": {"quantization": "fp8"}}, FP8, []),
        ({"engine": {"kind": "vllm"}} | ON_GPUS, VLLM, [replace(VLLM, precision="fp8"), replace(VLLM, weights="awq")]),
    ],
)
def test_a_replicas_word_never_widens_the_tolerance(
    folder: Path, sections: dict[str, Any], known: Numerics, widening: list[Numerics]
) -> None:
    wrong: list[str] = []
    numerics = numerics_of(folder, wrong, **sections)
    answer = Answer.reported(Request("r-0", (1,), SamplingParams()), "r1", (2,), (), ())
    for claimed in (known, UNKNOWN_NUMERICS, replace(known, precision="float32")):
        numerics.observe("r1", "monolith", Computing(numerics=claimed))
        held = numerics.served(replace(answer, numerics=claimed)).numerics
        assert held == (known if claimed == UNKNOWN_NUMERICS else claimed) and not wrong
    for number, claimed in enumerate(widening, start=1):
        numerics.observe("r1", "monolith", Computing(numerics=claimed))
        assert numerics.served(replace(answer, numerics=claimed)).numerics == known
        assert numerics.replayed(Replayed((), replica="r1", numerics=claimed)).numerics == known
        assert wrong == ["r1"] * 3 * number


def test_each_pool_is_held_to_its_own(folder: Path, tmp_path: Path) -> None:
    """A decoding pool on CPUs behind prefills on a GPU whose checkpoint is in FP8; and torch's replays for vLLM."""
    wrong: list[str] = []
    mixed = numerics_of(folder, wrong, **APART)
    assert (mixed.of("prefill"), mixed.of("decode")) == (BY_BATCH, BF16)
    mixed.observe("d1", "decode", Computing(numerics=BY_BATCH))
    assert wrong == ["d1"], "what a GPU may do is no excuse for a CPU"
    mixed.observe("d1", "decode", Computing(kernels_off="no compiler", numerics=BY_BATCH))
    assert wrong == ["d1"], "it is on the status page that its kernels are missing"
    beside = numerics_of(folder, wrong, engine={"kind": "vllm"}, **ON_GPUS)
    assert beside.replayed(Replayed((), replica="r1", numerics=BY_BATCH)).numerics == BY_BATCH
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    quantized = numerics_of(tmp_path, wrong, engine={"kind": "vllm"}, **ON_GPUS)
    assert quantized.of("monolith") == replace(VLLM, weights="gptq")
    quantized.observe("v1", "monolith", Computing(numerics=replace(VLLM, weights="gptq_marlin")))
    assert wrong == ["d1"]
    away = numerics_of(tmp_path / "gone", wrong)
    assert away.of("monolith") == replace(W4A8, repeats=False), "the coarsest that auto may give there"
