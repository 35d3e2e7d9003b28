"""Requests as vLLM's parameters, and what these cannot express.

A request whose distribution vLLM does not preserve is refused, naming the field that breaks it, and never served
differently from what it asks."""

import json
import math
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams as VllmParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from serve_app.backends.vllm_parts.adapters import LoadedAdapter
from serve_app.backends.vllm_parts.settings import TERMS
from serve_app.text.patterns import with_ascii_classes
from serve_app.text.schemas import held_text
from speculative.errors import EngineFault, InvalidRequest, SequenceTooLong
from speculative.request import Request, Structure
from speculative.selfcheck.vllm_draws import generator_seed

# With `top_k` alone a speculating engine dies when nothing is drafted: it takes the maximum of no rows. With `top_p`
# set as well, it takes another path. This value becomes 1 as vLLM's float32: the distribution is the same.
_ALL = math.nextafter(1.0, 0.0)

_SAME = (
    "temperature", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos",
    "prompt_logprobs",
)  # fmt: skip
"""Parameters that vLLM has by the same name."""
_TRANSLATED = (
    "max_tokens", "min_tokens", "top_p", "logit_bias", "bad_words", "allowed_token_ids", "structure", "stop_token_ids",
    "logprobs", "logprob_token_ids", "speculate",
)  # fmt: skip
"""Parameters that it has in another form; any other is refused."""


class _Params(VllmParams):
    """Ends at the tokens that it names, and at no others."""

    def update_from_generation_config(self, *_: Any, **__: Any) -> None:
        """Do nothing: vLLM would add the end tokens of its tokenizer, and forbid them before `min_tokens` even to an
        answer that ignores them."""


def check(request: Request, *, speculates: bool, max_model_len: int, vocab_size: int) -> None:
    """Check that this engine preserves the distribution that a request asks for.

    Args:
        request: as it came.
        speculates: whether the engine has a drafter.
        max_model_len: most tokens, prompt and answer.
        vocab_size: of the model.

    Raises:
        InvalidRequest: it does not.
    """
    params = request.params
    longest = max_model_len if request.score_from is not None else max_model_len - 1
    if len(request.prompt_token_ids) > longest:
        raise SequenceTooLong(
            "prompt", f"prompt has {len(request.prompt_token_ids)} tokens; this server takes at most {longest}."
        )
    wrong = next((token for token in request.prompt_token_ids if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InvalidRequest("prompt", f"prompt holds the token id {wrong}; ids run from 0 to {vocab_size - 1}.")
    params.check_vocabulary(vocab_size)
    if params.reproducible:
        raise InvalidRequest(
            "reproducible", "reproducible needs the coupled verifier, which the vllm engine lacks; leave it out."
        )
    unknown = sorted(params.changed.difference(_SAME, _TRANSLATED))
    if unknown:
        raise InvalidRequest(
            unknown[0],
            f"{unknown[0]} is not among vLLM's parameters; leave it out, or ask a server whose engine is torch.",
        )
    if speculates and request.score_from is None:
        for name, is_set in (("min_p", params.min_p > 0), ("logit_bias", bool(params.logit_bias))):
            if is_set:
                raise InvalidRequest(
                    name,
                    f"{name} is ignored by vLLM when it speculates; leave it out, or ask a server whose drafter "
                    "is none or whose engine is torch.",
                )


def to_vllm(
    request: Request, *, emitted: Sequence[int] = (), room: int, transfer: dict[str, Any], ends: Sequence[int]
) -> VllmParams:
    """Return how vLLM is to sample a request.

    Args:
        request: checked.
        emitted: tokens that were emitted for it elsewhere; they are a part of vLLM's prompt.
        room: most tokens that may still be emitted.
        transfer: instructions for the connector.
        ends: the checkpoint's end tokens, of which vLLM by itself reads the tokenizer's.

    Raises:
        EngineFault: its distribution depends on emitted tokens in ways that vLLM cannot be given.
    """
    params = request.params
    for name, depends in (
        ("presence_penalty", params.presence_penalty != 0),
        ("frequency_penalty", params.frequency_penalty != 0),
        ("bad_words", any(len(word) > 1 for word in params.bad_words)),
        ("response_format", params.structure is not None),
    ):
        if emitted and depends:  # to vLLM, they are part of the prompt
            raise EngineFault(
                f"A request with {name} cannot be resumed on another replica on the vllm engine: it does not know "
                "which tokens were emitted before. Send it again."
            )
    if request.score_from is not None:
        return VllmParams(
            temperature=0,
            max_tokens=1,
            ignore_eos=True,
            prompt_logprobs=max(1, params.prompt_logprobs or 0),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={TERMS: {}},
        )
    return _Params(
        **{name: getattr(params, name) for name in _SAME},
        top_p=_ALL if params.top_k and params.top_p == 1 else params.top_p,
        logit_bias=dict(params.logit_bias) or None,
        allowed_token_ids=None if params.allowed_token_ids is None else list(params.allowed_token_ids),
        _bad_words_token_ids=[list(word) for word in params.bad_words] or None,
        structured_outputs=_structure(params.structure),
        seed=generator_seed(request.seed, len(emitted)),
        max_tokens=max(1, min(params.max_tokens - len(emitted), room)),
        min_tokens=max(0, min(params.min_tokens - len(emitted), room)),
        stop_token_ids=list(dict.fromkeys((*params.stop_token_ids, *(() if params.ignore_eos else ends)))),
        # The whole vocabulary's if single tokens are requested: vLLM's own option for them (`logprob_token_ids`)
        # returns none while it speculates, and otherwise overrides what other requests of the batch asked for.
        logprobs=-1 if params.logprob_token_ids else params.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={TERMS: _terms(request)} | ({"kv_transfer_params": transfer} if transfer else {}),
    )


def prefilling(request: Request, transfer: dict[str, Any]) -> VllmParams:
    """Compute the prompt and hand it over; the one token that vLLM samples after it is discarded."""
    return VllmParams(
        temperature=0,
        max_tokens=1,
        ignore_eos=True,
        prompt_logprobs=request.params.prompt_logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={TERMS: {}, "kv_transfer_params": transfer},
    )


def order(*, speculation: str | None = None, transfer: dict[str, Any] | None = None) -> VllmParams:
    """Our own request, carrying orders: to the scheduler on who may draft, or to the connector on handoffs."""
    terms = {TERMS: {"speculation": speculation}, "kv_transfer_params": transfer}
    return VllmParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False, extra_args=terms)


def lora(loaded: LoadedAdapter | None) -> LoRARequest | None:
    """The adapter of a request; vLLM names cached prefixes by it, too."""
    if loaded is None:
        return None
    return LoRARequest(loaded.adapter.name, loaded.number, loaded.adapter.root)


def _terms(request: Request) -> dict[str, Any]:
    """Terms for the scheduler and the checks: structured output and drafts do not work well together in vLLM (#44993,
    #54437)."""
    speculate = request.params.speculate and request.params.structure is None
    return {"speculate": speculate, "canary": request.canary, "chosen_seed": request.chosen_seed}


def allows_what_ours_allows(structure: Structure | None) -> bool:
    """Return whether vLLM's masks are those that our own engine would make: vLLM forces the tokenisation of text that
    has to come, unless a grammar says otherwise, and its JSON has white space without end."""
    return structure is None or (structure.kind == "grammar" and '"no_forcing": true' in structure.text)


def _structure(structure: Structure | None) -> StructuredOutputsParams | None:
    if structure is None:
        return None
    if structure.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if structure.kind == "choice":
        return StructuredOutputsParams(choice=json.loads(structure.text))
    if structure.kind == "json_schema":
        return StructuredOutputsParams(json=held_text(structure.text))
    if structure.kind == "regex":
        return StructuredOutputsParams(regex=with_ascii_classes(structure.text))
    return StructuredOutputsParams(grammar=structure.text)
