"""Strata: under which circumstances a token was made.

They group tokens for the comparison, because the circumstances point to the fault: drift right after a handoff means a
bad handoff. A token belongs to several strata, so their counts cannot be summed. Whoever records an answer says what
strata its tokens belong to.
"""

from collections.abc import Iterable

SERVED_STRATA: dict[str, str] = {
    "all": "every emitted token",
    "prompt": "prompt tokens whose logprobs were returned",
    "speculative": "tokens of requests with drafts",
    "plain": "tokens of requests without drafts: their drift is the noise floor",
    "handoff_0": "the first round after a handoff",
    "handoff_1": "the second round after a handoff",
    "handoff_2_7": "rounds 2 to 7 after a handoff, counted from 0",
    "handoff_8_up": "later rounds after a handoff",
    "no_handoff": "computed on the replica that computed the prompt",
    "near_limit": "so near the model's maximum length that a full round of drafts no longer fits",
    "first": "first tokens after a prompt",
    "accepted": "accepted drafts",
    "recovered": "sampled after a rejected draft",
    "bonus": "sampled after the last draft, or where there was none",
    "cached_prefix": "tokens of requests that found part of their prompt in the prefix cache",
    "computed_prefix": "tokens of requests that computed their whole prompt",
    "preempted": "emitted after the request was preempted and its keys and values were recomputed",
    "greedy": "tokens of requests at temperature 0",
    "sampled": "tokens of requests at a temperature above 0, without a filter",
    "filtered": "tokens of requests with top_k, top_p or min_p",
}
"""Strata of a service's own answers, and what each means."""

WATCHED_POSITIONS = {
    "position_0": 1, "position_1_7": 8, "position_8_31": 32, "position_32_127": 128, "position_128_up": 2**63,
}  # fmt: skip
WATCHED_LENGTHS = {
    "length_256": 256, "length_1024": 1024, "length_4096": 4096, "length_16384": 16384, "length_up": 2**63,
}  # fmt: skip
"""Strata of watched tokens by their index in the answer, and by the tokens before them; each with the first value
beyond it."""

WATCHED_STRATA: dict[str, str] = {
    **{
        name: SERVED_STRATA[name]
        for name in ("all", "prompt", "greedy", "sampled", "filtered", "cached_prefix", "computed_prefix")
    },
    "position_0": "first tokens of watched answers",
    "position_1_7": "tokens 1 to 7 of watched answers, counted from 0",
    "position_8_31": "tokens 8 to 31 of watched answers",
    "position_32_127": "tokens 32 to 127 of watched answers",
    "position_128_up": "later tokens of watched answers",
    "length_256": "tokens of watched answers with fewer than 256 tokens before them",
    "length_1024": "tokens of watched answers with 256 to 1,023 tokens before them",
    "length_4096": "tokens of watched answers with 1,024 to 4,095 tokens before them",
    "length_16384": "tokens of watched answers with 4,096 to 16,383 tokens before them",
    "length_up": "tokens of watched answers with more tokens before them",
    "ended_stop": "tokens of watched answers that the model ended",
    "ended_length": "tokens of watched answers that a limit ended",
    "ended_tool_calls": "tokens of watched answers that ended with calls of tools",
    "ended_otherwise": "tokens of watched answers that ended for another reason",
}
"""Strata of a watched server's answers (`truespec watch`), and what each means."""

STRATA = SERVED_STRATA | WATCHED_STRATA
"""Meaning of each stratum."""

KNOWN_AFTERWARDS = frozenset({"speculative", "plain", "accepted", "recovered"})
"""Strata to which a token belongs because of what was sampled, there or after it. Accepted tokens follow min(p, q) and
recovered ones the residual, and only together do they follow p: here drift is tested, the distribution is not."""


def shared(strata: Iterable[tuple[str, ...]]) -> tuple[tuple[str, ...], ...]:
    """The strata of each token, equal ones as one object, which `pickle` writes once."""
    known: dict[tuple[str, ...], tuple[str, ...]] = {}
    return tuple(known.setdefault(one, one) for one in strata)
