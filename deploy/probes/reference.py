"""The same weights, computed independently of the server: `transformers` on the CPU, float32, one sequence at a time.

It shares no code with any server, ours included, except that our rules apply a request's parameters to the logits.
"""

from collections.abc import Sequence
from pathlib import Path

from deploy.exchange.dialect import AuditFailed
from serve_app.backends.base import Replayed
from serve_app.referee.transformers_model import TransformersModel
from serve_app.text.grammar import StructureCompiler
from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError
from speculative.request import Request


class Reference(TransformersModel):
    """A model folder, and its tokenizer if there is one. Loads on construction.

    Raises:
        AuditFailed: transformers cannot load a model from the folder.
    """

    def __init__(self, folder: Path) -> None:
        try:
            super().__init__(folder)
        except ConfigError as error:
            raise AuditFailed(f"there is nothing to compare with: {error}") from error
        self.tokenizer = Tokenizer.from_folder(folder) if (folder / "tokenizer.json").is_file() else None
        self._structures = StructureCompiler(folder, self.vocab_size, self.eos_token_ids)

    def compute(self, request: Request) -> Replayed:
        """A teacher-forced request (`score_from`)."""
        return self.replay(request, self._structures)

    def scores(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of every token but the first, [len(tokens) - 1] nats."""
        return self.compute(Request("scores", tuple(tokens), score_from=1)).logprobs
