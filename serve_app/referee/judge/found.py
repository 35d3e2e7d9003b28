"""Words for what replays find: what an alarm means, by the side to which a mean is shifted, and where its cause is
looked for first."""

from typing import Literal

from serve_app.telemetry.metric_names import REPLAY_ALARMS

Side = Literal["", "hotter", "colder", "low", "high"]
"""Side of an alarm: tokens as at a higher or a lower temperature than the request's, or served logprobs that are too
low or too high on average; "" = it has none."""

_SHIFTED = {
    "low": "served logprobs are lower than replayed ones on average",
    "high": "served logprobs are higher than replayed ones on average",
    "hotter": "tokens are less likely than those sampled from the model's distribution, as at a higher temperature",
    "colder": "tokens are more likely than those sampled from the model's distribution, as at a lower temperature",
}
_VERIFICATION = "the verification of drafts, the drafter's probabilities, and random numbers"
LOOK_AT = {
    "drift": "keys and values: handoff, prefix cache, new weights",
    **dict.fromkeys(("probability", "surprisal", "unlikely"), _VERIFICATION),
    "support": "filters and masks at drafted positions",
    "greedy": "the verification of drafts",
    "impossible": "the front end, and its limits",
    "wire": "the front end: how it reads requests, and writes replies",
    "draws": "random numbers, and the verification of drafts",
    "alternatives": "how logprobs of other tokens, and of prompts, are gathered",
    "missing": "the front end, where it hands finished requests in, and its log",
    "numerics": "the replica's log: its device, its kernels, and the form of its weights",
}
"""Where the cause of an alarm is looked for first, by the alarm."""


def meaning_of(alarm: str, side: str = "") -> str:
    """Return what an alarm of replays means."""
    return _SHIFTED.get(side) or REPLAY_ALARMS.get(alarm, alarm)
