"""The prompts: conversation, code, summaries and edits, which copy from their text, and long ones made of these texts.

Those of the kind `held-out` are questions that SmolLM2 asked itself, of the conversations that were held out when the
head that comes with the package was trained.
"""

import itertools
import json
from pathlib import Path

from serve_app.text.tokenizer import Tokenizer
from speculative.errors import ConfigError

KINDS = ("chat", "code", "summarise", "edit")
LONG = "long"  # prompts of `LONG_TOKENS` tokens, each cut out of several texts to summarise
LONG_TOKENS = 1000
_FILE = Path(__file__).with_name("prompts.json")


def read_prompts(folder: Path, kinds: tuple[str, ...], own: Path | None = None) -> dict[str, list[list[int]]]:
    """Token ids of the prompts by kind, in the chat template of the model in `folder`.

    `own` replaces the set that comes with the package: a JSON object with a list of questions for every kind.

    Raises:
        ConfigError: the file cannot be read, or has no such kind.
    """
    known = read_texts(own)
    missing = [kind for kind in kinds if not known.get(kind)]
    if missing:
        name = (own or _FILE).name
        raise ConfigError(f"--kinds: {name} has no prompts for {', '.join(missing)}; it has {', '.join(known)}.")
    tokenizer = Tokenizer.from_folder(folder)
    prompts = {
        kind: [tokenizer.encode_chat([{"role": "user", "content": text}]) for text in known[kind]] for kind in kinds
    }
    if own is None and LONG in kinds:
        texts = prompts[LONG]
        turned = (texts[number:] + texts[:number] for number in range(len(texts)))
        prompts[LONG] = [list(itertools.chain.from_iterable(one))[:LONG_TOKENS] for one in turned]
    return prompts


def read_texts(own: Path | None = None) -> dict[str, list[str]]:
    """The questions by kind.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = own or _FILE
    try:
        texts = json.loads(path.read_text(encoding="utf-8"))
        known = {kind: [str(text) for text in texts[kind]] for kind in texts}
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} is not a JSON object with a list of prompts for every kind ({error}).") from error
    return known if own is not None else known | {LONG: known["summarise"]}
