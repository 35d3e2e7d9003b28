"""Both implementations of the arithmetic over the vocabulary, for tests that must hold for each."""

import pytest
import torch

from speculative.kernels.chosen import choose_kernels
from speculative.kernels.library import cpu_kernels
from speculative.step.kernel_ops import choose_ops
from speculative.step.vocabulary_ops import VocabularyOps

needs_kernels = pytest.mark.skipif(cpu_kernels() is None, reason="no C++ compiler, or neither AVX-512 nor AVX2")
CPU_OPS = choose_ops(choose_kernels(torch.device("cpu")))
with_both_ops = pytest.mark.parametrize(
    "ops", [pytest.param(VocabularyOps(), id="torch"), pytest.param(CPU_OPS, id="kernels", marks=needs_kernels)]
)
