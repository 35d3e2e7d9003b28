"""Names of the files of a model's folder. What is read is fetched: readers, the hub and stream routers share them."""

from fnmatch import fnmatch
from pathlib import Path

from speculative.weight_formats import FORMATS

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
QUANTIZED_FILE = FORMATS["w4a8"].file
"""The numbers of four and eight bits that plain weights were made of. Beside these, other engines would load them."""

TEMPLATES_FOLDER = "additional_chat_templates"
TOP_FILES = ("*.safetensors", "*.json", "*.jinja", "merges.txt", "vocab.txt", "tokenizer.model")
"""Files that are read at the top of a folder, as patterns. None of them runs code."""
NEVER_READ = ["*/*", "consolidated*"]
"""Files that match these patterns, and that nobody reads: lower folders, and Mistral's second copy of its weights."""
LOWER_FILES = (f"{TEMPLATES_FOLDER}/*.jinja", *(one.file for one in FORMATS.values() if one.file))
"""Files that are read below it."""

_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def read_all_but_weights(folder: Path) -> dict[str, bytes]:
    """Read the files of a folder that its tokenizer and its ends of text need, and more: by their paths in it."""
    found = sorted(path for pattern in (*TOP_FILES, *LOWER_FILES) for path in folder.glob(pattern) if path.is_file())
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in found
        if not any(fnmatch(path.name, weights) for weights in _WEIGHTS)
    }
