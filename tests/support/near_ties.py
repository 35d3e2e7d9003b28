"""Texts that are equal up to the first position where the model itself could not decide."""

from collections.abc import Callable, Sequence

from torch import Tensor

NEAR_TIE = 1e-4  # nats between the two best tokens; float32 products of other shapes differ by a few 1e-6


def assert_same_up_to_near_tie(
    first: Sequence[int], second: Sequence[int], logits_after: Callable[[Sequence[int]], Tensor]
) -> int | None:
    """Two greedy continuations must be equal, up to a position where the best two tokens are a near-tie.

    Args:
        first, second: token ids, without the prompt.
        logits_after: the model's logits [V] after the prompt and these output tokens.

    Returns:
        Where they part at a near-tie; None when they are equal.
    """
    parting = next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), None)
    if parting is None:
        assert len(first) == len(second), (
            f"one text ends after {min(len(first), len(second))} tokens, the other does not"
        )
        return None
    best = logits_after(first[:parting]).topk(2)
    assert {first[parting], second[parting]} == set(best.indices.tolist()), (
        f"position {parting}: not the best two tokens"
    )
    gap = float(best.values[0] - best.values[1])
    assert gap < NEAR_TIE, f"position {parting}: {first[parting]} against {second[parting]}, {gap:.2e} nats apart"
    return parting
