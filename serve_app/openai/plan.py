"""From a request whose prompts are known to the engine's requests, and to how their answers become a reply."""

import dataclasses
import hashlib
import re
import time
import uuid
from dataclasses import dataclass
from typing import Any

from serve_app.backends.base import ModelInfo
from serve_app.errors import ContextLengthExceeded, dead_end
from serve_app.openai.asked import Asked, Limits
from serve_app.openai.chat.chat_request import ChatCompletionRequest
from serve_app.openai.completions.completion_request import CompletionRequest
from serve_app.openai.prompts import Prompted
from serve_app.openai.replies import ReplyHead
from serve_app.openai.requests import LEGACY_MAX_TOKENS
from serve_app.openai.tools.forced_calls import forces_calls
from serve_app.referee.records.tapped_reply import TappedReply
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import InvalidRequest
from speculative.request import Request, SamplingParams

_FORM = "response_format"  # how an engine names the form of an answer, whichever field asked for it
_NO_FIELDS = ("request", "request_id")  # what engines refuse that no client has sent


@dataclass(frozen=True, slots=True)
class Planned:
    """A request that nothing more is to be refused of: what to generate and how to answer."""

    prompted: Prompted
    head: ReplyHead
    groups: tuple[tuple[Request, ...], ...]  # one group a prompt, one request a choice
    stops: tuple[str, ...]
    unrepeatable: str | None = None  # why its seed may give another text again; "" = it gives the same, None = no seed
    tapped: TappedReply | None = None  # what keeps the bytes of request and reply

    @property
    def asked(self) -> Asked:
        """Return the request as it was asked."""
        return self.prompted.asked

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests; their order gives the choices' indices."""
        return tuple(request for group in self.groups for request in group)

    def refusal(self, error: InvalidRequest) -> InvalidRequest:
        """An engine's refusal, with the field that the client sent."""
        answers, asked = self.prompted.answers, self.asked
        forced = answers is not None and forces_calls(answers.chat)
        if forced and "rammar" in error.message:  # of the functions' schemas
            return InvalidRequest("tools", f"tools: the functions' schemas cannot be enforced: {error.message}")
        form = "tool_choice" if forced else asked.wire.structure_field
        prompt = "messages" if isinstance(asked.wire, ChatCompletionRequest) else "prompt"
        field, message = (
            asked.words(re.sub(r"^prompt\b", prompt, text.replace(_FORM, form)))
            for text in (error.field, error.message)
        )
        return type(error)("" if error.field in _NO_FIELDS else field, message)


@dataclass
class Planner:
    """Plans what one model generates."""

    tokenizer: Tokenizer
    model: ModelInfo  # that is served; others of its weights may follow
    limits: Limits

    def planned(self, prompted: Prompted) -> Planned:
        """Plan the choices of each prompt. Raises InvalidRequest: a field does not suit the model, or asks for more
        tokens than it has room for."""
        wire = prompted.asked.wire
        texts: list[str] = []  # of bad words, each as it begins a text and as it follows a space
        for word in wire.bad_words or ():
            bare = word.lstrip()
            texts += [bare, " " + bare] if bare else [word]
        encode = self.tokenizer.encode_continuation
        bad_words = tuple(dict.fromkeys(tuple(encode(text)) for text in texts))
        head = ReplyHead(
            reply_id=prompted.asked.format.id_prefix + uuid.uuid4().hex,
            created=int(time.time()),
            model=wire.model,
            system_fingerprint=self.model.system_fingerprint,
            prompts=prompted.prompts,
            num_choices=prompted.asked.num_choices,
            with_token_ids=bool(wire.return_token_ids),
            with_scored=bool(wire.logprob_token_ids),
            with_usage=wire.include_usage,
            with_token_kinds=bool(wire.return_token_kinds),
            num_prompt_logprobs=wire.prompt_logprobs,
        )
        groups = tuple(self._group(prompted, head, index, bad_words) for index in range(len(prompted.prompts)))
        unrepeatable = None if wire.seed is None else self._unrepeatable(groups[0][0].params)
        return Planned(prompted, head, groups, wire.stop_strings, unrepeatable)

    def _group(
        self, prompted: Prompted, head: ReplyHead, index: int, bad_words: tuple[tuple[int, ...], ...]
    ) -> tuple[Request, ...]:
        """The requests of one prompt's choices."""
        wire, prompt = prompted.asked.wire, prompted.prompts[index]
        params = self._params(prompted, len(prompt), bad_words)
        others = dataclasses.replace(params, prompt_logprobs=None)
        seeds: list[dict[str, Any]] = [
            {} if wire.seed is None else {"seed": choice_seed(wire.seed, number), "chosen_seed": True}
            for number in range(head.num_choices)
        ]
        return tuple(
            Request(
                f"{head.reply_id}-{index * head.num_choices + choice}",
                prompt,
                others if choice else params,
                gathers=not wire.stop_strings,  # each is looked for as soon as its last token is there
                resume=bool(self.limits.resumes if wire.resume is None else wire.resume),
                priority=wire.priority or 0,
                timeout_s=prompted.asked.timeout_s,
                adapter=self.model.adapter_of(wire.model),
                cache_salt=wire.cache_salt or "",
                **seeds[choice],
            )
            for choice in range(head.num_choices)
        )

    def _params(self, prompted: Prompted, num_prompt: int, bad_words: tuple[tuple[int, ...], ...]) -> SamplingParams:
        wire, longest = prompted.asked.wire, self.model.max_model_len
        name, asked = wire.token_budget
        room = longest - num_prompt
        if asked is None:
            default = LEGACY_MAX_TOKENS if isinstance(wire, CompletionRequest) else self.limits.default_max_tokens
            asked = room if default is None else min(default, room)
        elif asked > room:
            raise ContextLengthExceeded(
                name,
                f"The model's context is {longest} tokens; {num_prompt} of prompt and {asked} of output exceed it. "
                f"{name} may be at most {room} for this prompt.",
            )
        params = SamplingParams(
            max_tokens=max(asked, 1),  # the engine cannot generate nothing
            logprobs=wire.num_logprobs,
            prompt_logprobs=wire.num_prompt_logprobs,
            bad_words=bad_words,
            **wire.sampling_fields(),
        )
        if prompted.answers is not None:
            params = dataclasses.replace(params, structure=prompted.answers.form)
        if wire.reproducible is None and wire.seed is not None and self.model.computing.couples_seeds:
            params = dataclasses.replace(params, reproducible=not params.greedy)
        params.check_vocabulary(self.model.vocab_size)
        if params.allowed_token_ids is not None:
            forbidden = {word[0] for word in params.bad_words if len(word) == 1}
            if params.min_tokens:
                forbidden.update(params.stop_token_ids, () if params.ignore_eos else self.model.eos_token_ids)
            if forbidden.issuperset(params.allowed_token_ids):
                raise dead_end(params)
        return params

    def _unrepeatable(self, params: SamplingParams) -> str:
        """Return why a repeated request with a seed may get another text; "" = it gets the same."""
        computing = self.model.computing
        if computing.unrepeatable:
            return computing.unrepeatable
        shifted = computing.drafts_shift_draws and params.speculate
        if shifted and not (params.greedy or params.reproducible):
            return "reproducible is false: which text a seed gives depends on how many tokens were drafted, and when"
        return ""


def choice_seed(seed: int, choice: int) -> int:
    """The seed of one of n choices: the request's own for choice 0, an independent one for each other.

    A negative seed stands for its two's complement in 64 bits, as OpenAI's seed is an int64.
    """
    seed %= 2**64
    if choice == 0:
        return seed
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + choice.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little")
