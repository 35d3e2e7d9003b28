"""Captured passes of prompts against eager ones: any number of sequences and rows, alone and beside decoding rows."""

from itertools import pairwise
from pathlib import Path
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from speculative.gpu.prompt_graph import MOST_ROWS, prompt_sizes
from speculative.step.runner import ModelRunner
from tests.support.step_inputs import HIDDEN_TOLERANCE, Twins, input_of


class Scene(Twins):
    def __init__(self, target: Path, capture: tuple[int, ...] = ()) -> None:
        super().__init__(target, capture, max_num_seqs=32, max_batched_tokens=512, kv_cache_tokens=4096)
        hidden = self.graphs.buffers.hidden
        self.graphs.buffers.features.rows = torch.zeros((len(hidden), len(capture) * hidden.shape[1]))

    @torch.inference_mode()
    def assert_same(self, lengths: list[int], counts: list[int], capture: tuple[int, ...] = ()) -> None:
        step_input = input_of(lengths, counts, self.block_size, seed=len(counts))
        found = self.graphs.runner.forward_with_features(step_input, capture)
        expected = self.plain.forward_with_features(step_input, capture)
        for own, other in zip(found, expected, strict=True):
            assert own.shape == other.shape
            assert torch.allclose(own, other, atol=HIDDEN_TOLERANCE, rtol=0)
        self.assert_same_cache(step_input)

    @torch.inference_mode()
    def assert_same_beside(self, num_decoding: int, lengths: list[int], counts: list[int]) -> None:
        """Compare a step's first sequences, which decode, and its others, which are prompts."""
        step_input = input_of(lengths, counts, self.block_size, seed=len(counts))
        decodes = np.arange(len(counts)) < num_decoding
        decoding, prompts = step_input.of_sequences(decodes), step_input.of_sequences(~decodes)
        num_rows, buffers, runner = sum(counts[:num_decoding]), self.graphs.buffers, self.graphs.runner
        bucket = self.graphs.buckets.fit_rows(num_decoding, num_rows)
        assert bucket is not None
        for kept in (buffers.hidden, buffers.features.rows):
            kept.fill_(torch.nan)
        version = buffers.features.version
        runner.run_decoding(bucket, decoding, None, prompts)
        expected = self.plain.forward_with_features(step_input, self.graphs.runner.target.capture)
        with patch.object(ModelRunner, "forward_with_features", Mock(side_effect=AssertionError("a second pass"))):
            found = runner.forward_with_features(prompts, runner.target.capture)
        own = buffers.hidden[:num_rows], buffers.features.rows[:num_rows]
        for first, second, whole in zip(own, found, expected, strict=True):
            assert torch.allclose(torch.cat([first, second]), whole, atol=HIDDEN_TOLERANCE, rtol=0)
        assert not buffers.hidden[num_rows : bucket.num_rows].any(), "the judge reads nothing of a prompt"
        assert buffers.features.version > version, "what lay there is no more"
        self.assert_same_cache(step_input)


@pytest.mark.parametrize("capture", [(), (0, 2)])
def test_decoding_rows_and_prompts_are_one_pass(target: Path, capture: tuple[int, ...]) -> None:
    scene = Scene(target, capture)
    scene.assert_same_beside(1, [9, 0], [1, 64])
    scene.assert_same_beside(3, [40, 7, 300, 3, 0, 11], [1, 5, 2, 70, 1, 90])
    scene.assert_same_beside(2, [1, 2, 100], [5, 5, 3])
    assert scene.graphs.capturer.num_captured == 3, "of 128, 192 and 64 rows"
    scene.assert_same([0, 30], [65, 9], capture)


def test_the_sizes_are_close_and_none_is_larger_than_a_step_or_than_pays() -> None:
    assert prompt_sizes(40) == (40,)
    assert prompt_sizes(512) == (64, 128, 192, 256, 320, 384, 448, 512)
    assert prompt_sizes(700)[-3:] == (512, 640, 700)
    for sizes in map(prompt_sizes, (64, 100, 1000, 2048, 10**6)):
        assert sizes[-1] <= MOST_ROWS and list(sizes) == sorted(set(sizes))
        assert all(later <= earlier * 5 / 4 or later - earlier <= 64 for earlier, later in pairwise(sizes))


@pytest.mark.parametrize("capture", [(), (0, 2)])
def test_prompts_of_any_length_are_replayed_as_eager_passes_compute_them(
    target: Path, capture: tuple[int, ...]
) -> None:
    scene = Scene(target, capture)
    scene.assert_same([0], [64], capture)
    scene.assert_same([0, 30, 7], [65, 9, 110], capture)
    scene.assert_same([60], [450], capture)
    for counts in ([2, 20, 1, 30, 5], [40, 3], [33, 9], [7, 7]):
        scene.assert_same([11, 0, 25, 4, 0][: len(counts)], counts, capture)
    scene.assert_same([0] * 33, [15] * 33, capture)  # more sequences than a replay takes
    before = scene.graphs.capturer.num_captured
    scene.assert_same([3, 0], [61, 100], ())  # where nobody wants features
    assert scene.graphs.capturer.num_captured == before, "192 rows were captured above"


def test_a_pass_with_more_rows_than_are_captured_runs_eagerly(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speculative.gpu.prompt_graph.MOST_ROWS", 128)
    scene = Scene(target)
    scene.assert_same([0], [129])
    assert scene.graphs.capturer.num_captured == 0
    scene.assert_same([0], [128])
    assert scene.graphs.capturer.num_captured == 1


@torch.inference_mode()
def test_the_next_replay_leaves_earlier_results_as_they_are(target: Path) -> None:
    scene = Scene(target, (0,))
    first, second = (input_of([0], [60], scene.block_size, seed=seed) for seed in (1, 2))
    found = scene.graphs.runner.forward_with_features(first, (0,))
    kept = [one.clone() for one in found]
    scene.graphs.runner.forward_with_features(second, (0,))
    assert all(map(torch.equal, found, kept))
