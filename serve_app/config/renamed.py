"""Settings that had another name: the old one is still read, with a warning that names the new one."""

import logging
from collections.abc import Mapping
from typing import Any

from serve_app.config.base import FieldError

_logger = logging.getLogger("truespec.config")

RENAMED = {  # section.old name: section.new name
    "engine.weights": "engine.quantization",
    "engine.self_check_share": "engine.self_check_sample_rate",
    "vllm.self_check_share": "vllm.self_check_sample_rate",
    "replay.share": "replay.sample_rate",
    "replay.law_tolerance": "replay.distribution_tolerance",
}


def with_new_names(args: Any, place: object) -> Any:
    """The application's `args` under the names of today; `place` says in the warning where to change them.

    Raises:
        FieldError: a setting is given under both names.
    """
    for old, new in RENAMED.items():
        section, _, old_name = old.partition(".")
        new_name = new.rpartition(".")[2]
        fields = args.get(section) if isinstance(args, Mapping) else None
        if not isinstance(fields, Mapping) or old_name not in fields:
            continue
        if new_name in fields:
            raise FieldError(old, f"is the old name of {new}, and both are set; remove {old}.")
        _logger.warning("%s is now %s; rename it in %s.", old, new, place)
        args = {**args, section: {new_name if name == old_name else name: value for name, value in fields.items()}}
    return args
