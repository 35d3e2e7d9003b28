"""Reported facts of a request besides the tokens that it generates."""

from dataclasses import dataclass, field

from speculative.request import ReplayedToken, TokenLogprobs


@dataclass(slots=True)
class ReplyState:
    """Kept beside a sequence until a delta takes it along; no step reads it but to know what is to be scored.

    returns_prompt: the prompt's logprobs are requested, and still to be returned.
    num_cached: prompt tokens found in a prefix cache where they were computed.
    queue_s: seconds from arrival to the first blocks; None before that.
    prompt_logprobs: so far.
    replayed: tokens of a scoring request, so far.
    """

    returns_prompt: bool
    num_cached: int = 0
    queue_s: float | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    replayed: list[ReplayedToken] = field(default_factory=list)

    def take_prompt_logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """The prompt's logprobs, returned once; None if not requested, or already returned."""
        if not self.returns_prompt:
            return None
        self.returns_prompt = False
        reported, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return reported

    def recompute(self) -> None:
        """Drop the scores: a preempted sequence is computed, and scored, from its first token again."""
        self.prompt_logprobs.clear()
        self.replayed.clear()
