"""The application that answers a batch by itself."""

from collections.abc import Collection
from pathlib import Path

from deploy.ports import free_port
from serve_app.config.files import load_config
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError

_BASE = Path(__file__).parents[1] / "configs" / "monolith.yaml"


def batch_application(
    source: str | None, file: Path | None, models: Collection[str], *, on_a_cluster: bool
) -> ServeFile:
    """A checked application, from a model's source or a configuration file.

    Args:
        source: a catalogue name, a folder or a hub id, for monolith.yaml's other settings; or None.
        file: the configuration; None with a source.
        models: that the requests ask for.
        on_a_cluster: keep the configured port; else a free one is taken, so that a running server is not in the way.

    Raises:
        ConfigError: the file is wrong, or requests ask for a model that it does not serve.
    """
    found = load_config(file or _BASE)
    application, http = found.application, found.http_options
    if source is not None:
        model = application.args.model.model_copy(update={"source": source, "name": None})
        engine = application.args.engine.model_copy(update={"max_model_len": None})  # as long as the model can
        args = application.args.model_copy(update={"model": model, "engine": engine})
        application = application.model_copy(update={"args": args})
    name = application.args.model.served_name
    if others := sorted(set(models) - {name}):
        raise ConfigError(f"The requests ask for the model {others[0]!r}; this engine serves {name!r} and no other.")
    if not on_a_cluster:
        http = http.model_copy(update={"port": free_port(http)})
    return found.model_copy(update={"applications": [application], "http_options": http})
