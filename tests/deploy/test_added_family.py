"""A model family from outside: in a copy of the tree, one file and a line, as docs/architecture.md says."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.changed_tree import changed_tree, files_to_add_to, served_in, with_added
from tests.support.tiny_models import greedy, write_tiny_model

pytestmark = pytest.mark.slow

MODULE = "speculative/model/families/NAME.py"
REGISTRY = "speculative/model/families/__init__.py"
EXAONE4 = '''"""EXAONE 4: norms behind, norms of heads, and windows in the layers that are rotated."""

from dataclasses import replace

from speculative.model.config import Form, ModelConfig, TensorNames, windowed
from speculative.model.config_file import FULL, SLIDING, ConfigFile

MODEL_TYPE = "exaone4"


def read(file: ConfigFile) -> ModelConfig:
    """Read a config.json."""
    model = ModelConfig.of_family(
        file,
        eps=1e-5,
        num_kv_heads=file.stated_size("num_key_value_heads", 32),
        qk_norm=True,
        form=Form(norms="behind"),
        names=TensorNames(norms=("post_attention_layernorm", "post_feedforward_layernorm")),
    )
    period = file.size("sliding_window_pattern", 4)
    types = file.layer_types([SLIDING if (layer + 1) % period else FULL for layer in range(model.num_layers)], SLIDING)
    model = windowed(model, types, file.window(4096, types))
    return model.with_kinds(replace(kind, rope=kind.rope if kind.scores.window else None) for kind in model.layer_kinds)
'''


def test_a_family_is_served_once_it_is_in_one_file_and_in_the_registry(tmp_path: Path) -> None:
    assert {MODULE, REGISTRY} <= files_to_add_to("a model family**")
    files = with_added({REGISTRY: [("FAMILIES = {\n", '    "Exaone4ForCausalLM": "exaone4",\n')]})
    tree = changed_tree(tmp_path / "tree", files | {MODULE.replace("NAME", "exaone4"): EXAONE4})
    own = {"model_type": "exaone4", "num_hidden_layers": 3, "sliding_window": 9, "sliding_window_pattern": 2}
    write_tiny_model(tree / "model", tokenizer=True, **own)
    prompt = [3 + (7 * index) % 41 for index in range(30)]
    wanted = greedy(AutoModelForCausalLM.from_pretrained(tree / "model", dtype=torch.float32), prompt, 24)
    assert served_in(tree, prompt, 24)[0] == wanted[0]
