"""The prompts: conversation, code, summaries and edits, which copy from their text.

Those of the kind `held-out` are questions that SmolLM2 asked itself, of the conversations that were held out when the
head that comes with the package was trained.
"""

import json
from pathlib import Path

from speculative.errors import ConfigError

KINDS = ("chat", "code", "summarise", "edit")
PROMPTS = Path(__file__).with_name("prompts.json")
"""Those that come with the package."""


def read_texts(path: Path = PROMPTS) -> dict[str, list[str]]:
    """The questions by kind. Raises ConfigError: the file cannot be read."""
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
        known = {kind: [str(text) for text in texts[kind]] for kind in texts}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a JSON object with a list of prompts for every kind ({error}).") from error
    return known
