"""Token-wise verification, enumerated: over all drafts, coins and draws it emits exactly the target's distribution.

The verifier is a black box here. Where a coin or a draw changes the outcome is found by bisection, and the accept
uniforms are integrated out; over a tiny vocabulary all drafts are enumerated, each with the probability it is drawn
with."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from speculative.sampling.draft_probs import Drawn, PointMass
from speculative.sampling.token_wise import verify_token_wise
from speculative.sampling.verification import Verifier, VerifyInput, VerifyOutput
from speculative.step.vocabulary_ops import VocabularyOps
from tests.support.verify_inputs import verify_input
from tests.support.vocabulary import with_both_ops

BISECTIONS = 60  # a float64 in (0, 1) is pinned down to its last bit
SIZES = [(2, 1), (2, 4), (3, 2), (3, 3), (4, 2), (4, 3)]


class Distributions:
    """Random p and q after every prefix of up to K tokens, with ties, zeros and equal rows among them."""

    def __init__(self, vocab_size: int, num_drafts: int, seed: int, dtype: torch.dtype, kind: str) -> None:
        self.vocab_size, self.num_drafts = vocab_size, num_drafts
        random = np.random.default_rng(seed)
        self.p: dict[tuple[int, ...], Tensor] = {}
        self.q: dict[tuple[int, ...], Tensor] = {}
        for length in range(num_drafts + 1):
            for prefix in itertools.product(range(vocab_size), repeat=length):
                p, q = random.dirichlet([0.7] * vocab_size), random.dirichlet([0.7] * vocab_size)
                match kind:
                    case "zeros":
                        p[random.integers(vocab_size)] = 0
                        q[random.integers(vocab_size)] = 0
                    case "equal" if random.random() < 0.5:
                        q = p
                    case "greedy":
                        p = np.eye(vocab_size)[random.integers(vocab_size)]
                    case "deterministic":
                        q = np.eye(vocab_size)[random.integers(vocab_size)]
                self.p[prefix] = torch.tensor(p / p.sum(), dtype=dtype)
                self.q[prefix] = torch.tensor(q / q.sum(), dtype=dtype)

    def paths(self) -> list[tuple[tuple[int, ...], float]]:
        """Every draft that can be drawn, with its probability."""
        found = []
        for path in itertools.product(range(self.vocab_size), repeat=self.num_drafts):
            chance = float(np.prod([float(self.q[path[:i]][path[i]]) for i in range(self.num_drafts)]))
            if chance > 0:
                found.append((path, chance))
        return found

    def joint(self) -> np.ndarray | float:
        """[V] * (K + 1): the target's distribution of the next K + 1 tokens."""
        return continuation(self, ())


def step_for(distributions: Distributions, paths: list[tuple[int, ...]], *, deterministic: bool) -> VerifyInput:
    """One entry per path, all in one packed step; uniforms are filled in later."""
    rows = distributions.num_drafts + 1
    probs = torch.stack([distributions.p[path[:i]] for path in paths for i in range(rows)])
    drafts = torch.tensor([[*path, -1] for path in paths]).reshape(-1)
    q = torch.stack([distributions.q[path[:i]] for path in paths for i in range(rows - 1)])
    return verify_input(probs, drafts, PointMass() if deterministic else Drawn(q))


def threshold(happens: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """[count] the probability that something happens that happens for small uniforms, by bisection."""
    low, high = torch.zeros(count, dtype=torch.float64), torch.ones(count, dtype=torch.float64)
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        yes = happens(middle)
        low, high = torch.where(yes, middle, low), torch.where(yes, high, middle)
    return high


def accepted_distribution(verify: Verifier, step: VerifyInput) -> Tensor:
    """[E, K + 1] how likely each number of accepted drafts is, the accept uniforms integrated out."""
    num_rows = int(step.counts[0]) + 1
    chances = []  # per coin: the chance that it lets its draft pass
    for draft in range(1, num_rows):

        def passes(value: Tensor, draft: int = draft) -> Tensor:  # its coin matters when those before it pass
            accept_uniforms = torch.full((len(step.counts), num_rows), 1e-300, dtype=torch.float64)
            accept_uniforms[:, draft - 1] = value
            return verify(replace(step, accept_uniforms=accept_uniforms.reshape(-1))).num_accepted >= draft

        chances.append(threshold(passes, len(step.counts)))
    distribution = torch.zeros((len(step.counts), num_rows), dtype=torch.float64)
    rest = torch.ones(len(step.counts), dtype=torch.float64)
    for accepted in range(num_rows - 1):
        distribution[:, accepted] = rest * (1 - chances[accepted])
        rest = rest * chances[accepted]
    distribution[:, num_rows - 1] = rest
    return distribution


def final_distribution(verify: Verifier, step: VerifyInput, accepted: int) -> Tensor:
    """[E, V] the distribution of the token after `accepted` drafts, where that many can be accepted."""
    num_rows, vocab_size = int(step.counts[0]) + 1, step.probs.shape[1]
    accept_uniforms = torch.full((len(step.counts), num_rows), 1 - 2.0**-53, dtype=torch.float64)
    accept_uniforms[:, :accepted] = 1e-300
    base = replace(step, accept_uniforms=accept_uniforms.reshape(-1))

    def run(value: Tensor) -> VerifyOutput:
        return verify(replace(base, sample_uniforms=value.repeat_interleave(num_rows)))

    up_to = [threshold(lambda value, y=y: run(value).token_ids <= y, len(step.counts)) for y in range(vocab_size)]
    cumulative = torch.stack([torch.zeros_like(up_to[0]), *up_to], dim=1)
    return cumulative.diff(dim=1)


def emitted_joint(verify: Verifier, distributions: Distributions, *, deterministic: bool) -> np.ndarray:
    """The distribution of the next K + 1 tokens when this round is verified and the target goes on by itself."""
    paths = distributions.paths()
    step = step_for(distributions, [path for path, _ in paths], deterministic=deterministic)
    counts = accepted_distribution(verify, step)
    joint = np.zeros((distributions.vocab_size,) * (distributions.num_drafts + 1))
    for accepted in range(distributions.num_drafts + 1):
        tokens = final_distribution(verify, step, accepted)
        for index, (path, chance) in enumerate(paths):
            weight = chance * float(counts[index, accepted])
            for token in range(distributions.vocab_size) if weight > 0 else ():
                prefix = (*path[:accepted], token)
                joint[prefix] += weight * float(tokens[index, token]) * continuation(distributions, prefix)
    return joint


def continuation(distributions: Distributions, prefix: tuple[int, ...]) -> np.ndarray | float:
    """The target's distribution of what follows the prefix, up to K + 1 tokens."""
    left = distributions.num_drafts + 1 - len(prefix)
    distribution = np.ones((distributions.vocab_size,) * left)
    for tokens in itertools.product(range(distributions.vocab_size), repeat=left):
        whole = (*prefix, *tokens)
        distribution[tokens] = np.prod(
            [float(distributions.p[whole[:i]][whole[i]]) for i in range(len(prefix), len(whole))]
        )
    return distribution


@pytest.mark.parametrize("kind", ["random", "zeros", "equal", "greedy", "deterministic"])
@pytest.mark.parametrize(("vocab_size", "num_drafts"), SIZES)
def test_emits_the_targets_distribution_in_float64(kind: str, vocab_size: int, num_drafts: int) -> None:
    """Drawn drafts that are read as chosen ones, too: that is slower, and as right."""
    seed = vocab_size * 10 + num_drafts
    distributions = Distributions(vocab_size, num_drafts, seed, dtype=torch.float64, kind=kind)
    for deterministic in (False, True):
        joint = emitted_joint(verify_token_wise, distributions, deterministic=deterministic)
        assert np.abs(joint - distributions.joint()).max() <= 1e-12


@pytest.mark.parametrize("kind", ["random", "zeros", "deterministic"])
@with_both_ops
def test_emits_the_targets_distribution_in_float32(ops: VocabularyOps, kind: str) -> None:
    distributions = Distributions(4, 3, seed=1, dtype=torch.float32, kind=kind)
    for deterministic in (False, True):
        joint = emitted_joint(ops.verify_token_wise, distributions, deterministic=deterministic)
        assert np.abs(joint - distributions.joint()).max() <= 1e-6


def test_what_it_expects_to_accept_is_what_it_accepts() -> None:
    distributions = Distributions(3, 3, seed=5, dtype=torch.float64, kind="random")
    paths = distributions.paths()
    step = step_for(distributions, [path for path, _ in paths], deterministic=False)
    chances = torch.tensor([chance for _, chance in paths], dtype=torch.float64)
    distribution = accepted_distribution(verify_token_wise, step)
    observed = (chances @ distribution) @ torch.arange(4.0).double()
    expected = torch.zeros((), dtype=torch.float64)
    for accepted in range(4):  # what was expected depends on how far the accept uniforms let it come
        accept_uniforms = torch.full((len(paths), 4), 1 - 2.0**-53, dtype=torch.float64)
        accept_uniforms[:, :accepted] = 1e-300
        output = verify_token_wise(replace(step, accept_uniforms=accept_uniforms.reshape(-1)))
        reached = distribution[:, accepted] > 0
        expected += (chances * distribution[:, accepted])[reached] @ output.expected_accepted[reached]
    assert float(expected) == pytest.approx(float(observed), abs=1e-12)


def accept_too_often(step: VerifyInput) -> VerifyOutput:
    return verify_token_wise(replace(step, accept_uniforms=step.accept_uniforms * 0.9))


def q_of_another_row(step: VerifyInput) -> VerifyOutput:
    assert isinstance(step.draft_probs, Drawn)
    return verify_token_wise(replace(step, draft_probs=Drawn(step.draft_probs.probs.roll(1, 0))))


@pytest.mark.parametrize("faulty", [accept_too_often, q_of_another_row])
def test_the_method_sees_a_faulty_verifier(faulty: Verifier) -> None:
    distributions = Distributions(3, 2, seed=3, dtype=torch.float64, kind="random")
    assert np.abs(emitted_joint(faulty, distributions, deterministic=False) - distributions.joint()).max() > 1e-3
