"""The decoder computes what transformers computes, family by family."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM

from speculative.model.decoder import Decoder
from speculative.model.layers import gelu
from speculative.model.loading import load_decoder
from tests.support.engines import naive_logits
from tests.support.tiny_models import write_tiny_model

LENGTHS = (37, 5)  # tokens of two sequences


def own_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    return torch.cat([naive_logits(decoder, sequence[None])[0] for sequence in ids.split(LENGTHS)])


def reference_logits(folder: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return torch.cat([model(sequence[None]).logits[0].float() for sequence in ids.split(LENGTHS)])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gemma3", "granite", "olmo2", "phi3"])
def test_bfloat16_logits_are_as_near_as_transformers_own(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family)
    ids = torch.randint(512, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))
    exact = reference_logits(folder, ids, torch.float32)
    ours = own_logits(load_decoder(folder, dtype=torch.bfloat16, device="cpu"), ids)
    theirs = reference_logits(folder, ids, torch.bfloat16)
    assert (ours - exact).square().mean() < 1.2 * (theirs - exact).square().mean()


def test_gelu_rounds_a_row_alike_in_any_batch_and_by_any_threads() -> None:
    rows = torch.randn(40, 1537, generator=torch.Generator().manual_seed(0)) * 3
    expected, threads = functional.gelu(rows.double(), approximate="tanh"), torch.get_num_threads()
    whole = gelu(rows)
    assert (whole - expected).abs().max() < 2e-6
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            for size in (1, 5, 17):
                assert all(torch.equal(gelu(rows[at : at + size]), whole[at : at + size]) for at in (0, 7, 20))
    finally:
        torch.set_num_threads(threads)


def test_a_position_beyond_the_model_is_an_error(tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny_model(tmp_path, max_position_embeddings=64), dtype=torch.float32, device="cpu")
    with pytest.raises(IndexError):
        decoder(torch.tensor([1]), torch.tensor([64]), lambda layer, query, *_: query)
