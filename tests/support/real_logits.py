"""SmolLM2-135M's logits as it is served and as it is replayed: pairs of tables with the rounding between them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from deploy.exchange.prompts import read_texts
from serve_app.backends.base import Numerics, precision_of
from serve_app.config.files import parse_args
from serve_app.referee.book.transformers_model import TransformersModel
from serve_app.referee.judge.tolerance import ServiceTolerances, Tolerance
from serve_app.text.tokenizer import Tokenizer
from speculative.assembly import Assembly
from speculative.config import DrafterConfig, EngineConfig
from speculative.drafting.weights import Weights as Loaded
from speculative.engine import EngineCore
from speculative.model.loading import load_decoder
from speculative.request import Request, SamplingParams
from speculative.weight_formats import is_rounded
from tests.support.engines import run
from tests.support.perturbed_engines import VOCAB, Pair, Tables

Dtype = Literal["float32", "bfloat16"]
Weights = Literal["float32", "bfloat16", "w4a8"] | None
ReferenceForm = Literal["plain", "w4a8"]

_PROMPTS = Path(__file__).parents[1] / "data" / "prompts.json"
_NUM_TEXTS = 8
_BEFORE = 40  # tokens of a text's shortest context
_LENGTH = _BEFORE + VOCAB // _NUM_TEXTS


@dataclass(frozen=True, slots=True)
class Form:
    """The arithmetic of an engine of ours. weights: as `load_decoder` has them; None = left to torch.
    singly: each row in a step of its own, as answers are decoded; not all of a text's in one, as replays are."""

    dtype: Dtype
    weights: Weights
    singly: bool = False

    @property
    def numerics(self) -> Numerics:
        """The numerics that its replica reports."""
        weights = self.weights if is_rounded(self.weights) else "plain"
        repeats = self.weights is not None  # our own kernels
        return Numerics("truespec", precision_of(self.dtype, self.weights), weights, repeats)


FORMS: dict[str, tuple[Form, Form | ReferenceForm]] = {
    "bfloat16, torch's operators, and float32": (Form("bfloat16", None), "plain"),
    "bfloat16 and float32": (Form("bfloat16", "bfloat16"), "plain"),
    "bfloat16, a row at a time and together": (Form("bfloat16", None, singly=True), Form("bfloat16", None)),
    "w4a8 and float32": (Form("bfloat16", "w4a8"), "w4a8"),
    "float32, another engine": (Form("float32", "float32"), "plain"),
}
"""Who answers and who replays, by name; a name of weights: `transformers` in float32 with them."""


class RealLogits:
    """Real logits of a model's folder: after 256 contexts, in eight texts and behind 40 to 71 tokens of each, on
    256 of its tokens.

    A table [256, 256] of them is a model in which context i follows token i. Each context has its own names for the
    tokens: its likeliest is i + 1, so that an answer comes through all contexts, and not round and round a few.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tokenizer = Tokenizer.from_folder(folder)
        mixed = [one["text"] for one in json.loads(_PROMPTS.read_text(encoding="utf-8"))]
        kinds = ([tokenizer.encode(text) for text in own] for own in (mixed, read_texts()["summarise"]))
        long = ([tuple(text[:_LENGTH]) for text in own if len(text) >= _LENGTH] for own in kinds)
        self._texts = [text for own in long for text in own[:_NUM_TEXTS:2]]
        config = parse_args({"model": {"source": str(folder)}})
        self._tolerances = ServiceTolerances(config)

    def pair(self, name: str) -> Pair:
        """Engines over the tables of two of `FORMS`. What drafts is off by as much as its target, in other rows."""
        served, again = FORMS[name]
        tables = self._table(served), self._table(again)
        of_drafter = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
        near = tables[0] + of_drafter
        own = Tables(tables[0], near), Tables(tables[1], near + (tables[1] - tables[0]).roll(1, 0))
        return Pair(*own, self.tolerance(name), served.numerics)

    def tolerance(self, name: str) -> Tolerance:
        """A service's for the two."""
        served, again = FORMS[name]
        reference = again.numerics if isinstance(again, Form) else Numerics("transformers", "float32", again)
        return self._tolerances.between(served.numerics, reference)

    def noise(self, name: str) -> Tensor:
        """[256, 256] by which the log-softmax of a pair's tables differs."""
        served, again = (self._table(form).log_softmax(-1) for form in FORMS[name])
        return again - served

    @cached_property
    def _ids(self) -> Tensor:
        """[256] each context's likeliest token, filled up with those that have the most mass over all contexts."""
        probs = self._rows("plain").softmax(-1)
        mass = probs.sum(0)
        mass[probs.argmax(-1)] += len(probs)
        return mass.topk(VOCAB).indices

    def _table(self, form: Form | ReferenceForm) -> Tensor:
        likeliest = self._rows("plain")[:, self._ids].argmax(-1)
        names = torch.arange(VOCAB) - torch.arange(VOCAB)[:, None] - 1
        return self._rows(form)[:, self._ids].gather(1, (names + likeliest[:, None]) % VOCAB)

    @cache  # noqa: B019  # a test module has one
    def _rows(self, form: Form | ReferenceForm) -> Tensor:
        """[256, V] float32 after each context."""
        if not isinstance(form, Form):
            model = TransformersModel(self._folder, form)
            return torch.cat([model.logits(text, _BEFORE) for text in self._texts])
        decoder = load_decoder(self._folder, dtype=getattr(torch, form.dtype), device="cpu", weights=form.weights)
        config = EngineConfig(
            dtype=form.dtype,
            device="cpu",
            max_num_seqs=1,
            kv_cache_tokens=1024,
            block_size=1,  # so that of a prompt that is known but for its last token only that is computed
            drafter=DrafterConfig(kind="none"),
        )
        engine = EngineCore(Assembly(Loaded(decoder), config))
        return torch.cat([_predicting(engine, text, singly=form.singly) for text in self._texts])


def _predicting(engine: EngineCore, text: Sequence[int], *, singly: bool) -> Tensor:
    """[n, V] that predict the text's tokens from `_BEFORE` on."""
    rows: list[Tensor] = []
    runner = engine.parts.eager.runner
    compute = type(runner).logits

    def keep(hidden: Tensor) -> Tensor:
        rows.append(compute(runner, hidden))
        return rows[-1]

    runner.logits = keep  # type: ignore[method-assign]
    one_token = SamplingParams(max_tokens=1, temperature=0)
    ends = range(_BEFORE, len(text)) if singly else ()
    asked = [Request(f"{end}", text[:end], one_token) for end in ends]
    for request in asked or [Request("whole", tuple(text), SamplingParams(), score_from=_BEFORE, replay=True)]:
        engine.add(request)
        run(engine)
    return torch.cat(rows)
