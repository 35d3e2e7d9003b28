"""What is no fault between two engines: by the pair's precisions, as the engines themselves report them."""

from dataclasses import replace
from typing import Any

import pytest

from serve_app.backends.base import Numerics, precision_of
from serve_app.config.files import parse_args
from serve_app.referee.tolerance import ServiceTolerances, Tolerance


def tolerances(**sections: dict[str, Any]) -> ServiceTolerances:
    config = parse_args({"model": {"source": "m"}, **sections})
    return ServiceTolerances(config.replay, config.engine)


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


def test_replicas_know_better_than_the_configuration_what_they_compute_in() -> None:
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
