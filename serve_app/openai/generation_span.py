"""One generation in OpenTelemetry's terms, on the span of its HTTP request.

The attributes are those of the conventions for generative AI
(https://github.com/open-telemetry/semantic-conventions-genai); none of them has text of the client's or the model's.
"""

import time
from types import TracebackType

from serve_app.openai.choice import ChoiceRun
from serve_app.openai.plan import Planned
from serve_app.openai.replies import ChoiceDelta
from serve_app.telemetry.tracing import current_span

PROVIDER = "truespec"
_INT64 = 2**63


class GenerationSpan:
    """Describes a generation on the current span, from its beginning to its end, however it ends. Does nothing where
    that is not recorded."""

    def __init__(self, job: Planned, run: ChoiceRun) -> None:
        self._job = job
        self._run = run
        self._span = current_span()
        self._recorded = self._span.is_recording()
        self._began_at = time.monotonic()
        self._begun = False
        self._reasons: dict[int, str] = {}

    def __enter__(self) -> "GenerationSpan":
        if not self._recorded:
            return self
        request, num_choices = self._job.requests[0], self._job.head.num_choices
        params = request.params
        chosen: dict[str, int | float | bool] = {
            "stream": bool(self._job.asked.wire.stream),
            "top_k": params.top_k,
            "frequency_penalty": params.frequency_penalty,
            "presence_penalty": params.presence_penalty,
            "choice.count": num_choices if num_choices > 1 else 0,
        }
        # As a signed number of 64 bits, as OpenAI's and OpenTelemetry's seeds are.
        sent = request.seed - 2 * _INT64 if request.seed >= _INT64 else request.seed
        self._span.set_attributes(
            {
                "gen_ai.operation.name": self._job.asked.format.operation,
                "gen_ai.provider.name": PROVIDER,
                "gen_ai.request.model": self._job.head.model,
                "gen_ai.request.max_tokens": params.max_tokens,
                "gen_ai.request.temperature": params.temperature,
                "gen_ai.request.top_p": params.top_p,
                **{f"gen_ai.request.{name}": value for name, value in chosen.items() if value},
                **({} if self._job.unrepeatable is None else {"gen_ai.request.seed": sent}),
            }
        )
        return self

    def see(self, piece: ChoiceDelta) -> None:
        """Take in what goes out of one choice."""
        if not self._recorded:
            return
        if self._job.asked.wire.stream and not self._begun:
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", time.monotonic() - self._began_at)
        self._begun = True
        if piece.finish_reason is not None:
            self._reasons[piece.index] = piece.finish_reason

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not self._span.is_recording():  # as after its end, if a client left
            return
        usage, head = self._run.usage(), self._job.head
        self._span.set_attributes(
            {
                "gen_ai.response.id": head.reply_id,
                "gen_ai.response.model": head.model,
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
            }
        )
        if self._reasons:
            reasons = [self._reasons[index] for index in sorted(self._reasons)]
            self._span.set_attribute("gen_ai.response.finish_reasons", reasons)
        if isinstance(error, Exception):
            self._span.set_attribute("error.type", type(error).__name__)
