"""Structured output, as the engine sees it: something that knows which tokens may come next.

Grammars are compiled beside the tokenizer, outside the engine. A constraint follows one request: it is rebuilt from the
emitted tokens after a handoff or a move, and looks ahead over drafts without committing to them.
"""

from collections.abc import Callable
from collections.abc import Sequence as Tokens
from typing import Any, Protocol

import numpy as np

from speculative.request import Structure

Bools = np.ndarray[Any, np.dtype[np.bool_]]


class TokenConstraint(Protocol):
    """The tokens one request may emit."""

    def allowed(self, output: Tokens[int], drafts: Tokens[int]) -> list[Bools]:
        """Masks [vocab_size] over the vocabulary: element j says what may follow output + drafts[:j].

        The list ends with the first draft that is not allowed, so it has 1 to len(drafts) + 1 elements. `output` only
        grows from call to call, and was emitted under these masks.
        """


ConstraintMaker = Callable[[Structure], TokenConstraint]
"""Compiles a structure. Raises InvalidRequest for one that makes no sense."""
