"""One generation in OpenTelemetry's terms, on the span of its HTTP request.

The attributes are those of the conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai); none of them has text of the client's or the model's.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from serve_app.openai.choice import ChoiceRun
from serve_app.openai.plan import Planned
from serve_app.openai.replies import ChoiceDelta
from serve_app.telemetry.tracing import current_span

PROVIDER = "truespec"
_INT64 = 2**63


@contextmanager
def generation_span(job: Planned, run: ChoiceRun) -> Iterator[Callable[[ChoiceDelta], None]]:
    """Within it a generation is described on the current span, however it ends. It gives a function that takes in what
    goes out of a choice. Does nothing where the span is not recorded."""
    span, began_at, reasons = current_span(), time.monotonic(), dict[int, str]()
    if not span.is_recording():
        yield lambda piece: None
        return
    request, head, streams = job.requests[0], job.head, bool(job.asked.wire.stream)
    params, begun = request.params, False
    chosen: dict[str, int | float | bool] = {
        "stream": streams,
        "top_k": params.top_k,
        "frequency_penalty": params.frequency_penalty,
        "presence_penalty": params.presence_penalty,
        "choice.count": head.num_choices if head.num_choices > 1 else 0,
    }
    # As a signed number of 64 bits, as OpenAI's and OpenTelemetry's seeds are.
    sent = request.seed - 2 * _INT64 if request.seed >= _INT64 else request.seed
    span.set_attributes(
        {
            "gen_ai.operation.name": job.asked.format.operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": head.model,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            **{f"gen_ai.request.{name}": value for name, value in chosen.items() if value},
            **({} if job.unrepeatable is None else {"gen_ai.request.seed": sent}),
        }
    )

    def see(piece: ChoiceDelta) -> None:
        nonlocal begun
        if streams and not begun:
            span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - began_at)
        begun = True
        if piece.finish_reason is not None:
            reasons[piece.index] = piece.finish_reason

    ended: dict[str, str | int] = {}
    try:
        yield see
    except Exception as error:
        ended = {"error.type": type(error).__name__}
        raise
    finally:
        if span.is_recording():  # not after its end, if a client left
            usage = run.usage()
            about: dict[str, str | int] = {
                "gen_ai.response.id": head.reply_id,
                "gen_ai.response.model": head.model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
            span.set_attributes(about | ended)
            if reasons:
                span.set_attribute("gen_ai.response.finish_reasons", [reasons[index] for index in sorted(reasons)])
