"""The decoder computes what transformers computes, family by family, on packed rows."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from speculative.model.decoder import Decoder
from speculative.model.loading import load_decoder
from tests.support.tiny_models import write_tiny_model

LENGTHS = (37, 5)  # tokens of the two sequences packed into one forward


class NaiveAttend:
    """Whole sequences at once, one query head of one sequence after another: the loop one would write first."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self.lengths = lengths
        self.layers: list[int] = []

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.layers.append(layer)
        output, start = torch.empty_like(query), 0
        for length in self.lengths:
            rows = slice(start, start + length)
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            for head in range(query.shape[1]):
                kv_head = head * key.shape[1] // query.shape[1]
                scores = (query[rows, head] @ key[rows, kv_head].T) * query.shape[-1] ** -0.5
                weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(value.dtype)
                output[rows, head] = weights @ value[rows, kv_head]
            start += length
        return output


def packed_logits(decoder: Decoder, ids: Tensor) -> Tensor:
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    with torch.inference_mode():
        return decoder.logits(decoder(ids, positions, NaiveAttend(LENGTHS)))


def reference_logits(folder: Path, ids: Tensor, dtype: torch.dtype) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.inference_mode():
        return torch.cat([model(sequence[None]).logits[0].float() for sequence in ids.split(LENGTHS)])


def random_ids(vocab_size: int = 512) -> Tensor:
    return torch.randint(vocab_size, (sum(LENGTHS),), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", ["llama", "smollm", "qwen2", "qwen3"])
def test_bfloat16_logits_are_as_near_as_transformers_own(family: str, tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path, family)
    ids = random_ids()
    exact = reference_logits(folder, ids, torch.float32)
    ours = packed_logits(load_decoder(folder, dtype=torch.bfloat16, device="cpu"), ids)
    theirs = reference_logits(folder, ids, torch.bfloat16)
    assert (ours - exact).square().mean() < 1.2 * (theirs - exact).square().mean()


def test_a_position_beyond_the_model_is_an_error(tmp_path: Path) -> None:
    decoder = load_decoder(write_tiny_model(tmp_path, max_position_embeddings=64), dtype=torch.float32, device="cpu")
    with pytest.raises(IndexError):
        decoder(torch.tensor([1]), torch.tensor([64]), NaiveAttend((1,)))
