"""Drafters without weights as the engine runs them."""

from collections.abc import Callable

from speculative.config import DrafterConfig
from speculative.drafters import registered
from speculative.drafting.base import Drafter, DraftOutput
from speculative.errors import ConfigError
from speculative.lookup import Lookup
from speculative.sampling.draft_probs import PointMass
from speculative.state.batch import Batch


class LookupDrafter(Drafter):
    """Drafts what a lookup chooses, sequence by sequence."""

    def __init__(self, build: Callable[[], Lookup]) -> None:
        self._build = build
        self.restart()

    def restart(self) -> None:
        """Forget all that was seen."""
        self.lookup = self._build()

    def propose(self, batch: Batch) -> DraftOutput:
        """Up to `max_drafts` tokens per entry, all of them deterministic."""
        drafts = [self.lookup.draft(entry.sequence, entry.max_drafts) for entry in batch.entries]
        return DraftOutput.pack(drafts, PointMass())

    def forget(self, request_id: str) -> None:
        """Drop what is kept about a request that has left."""
        self.lookup.forget(request_id)


def make_weightless(config: DrafterConfig) -> Drafter:
    """The drafter that is set, where it has no weights. Raises ConfigError: it has."""
    if config.kind == "none":
        return Drafter()
    kind = registered().get(config.kind)
    if kind is None:
        raise ConfigError(f"drafter.kind {config.kind} needs its model; make the engine with EngineCore.load.")
    return LookupDrafter(lambda: kind.build(config.options_of(kind.options), config.num_draft_tokens))
