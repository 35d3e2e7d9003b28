"""The application that answers a batch by itself."""

from collections.abc import Collection

from deploy.run.ports import free_port
from serve_app.config.serve_file import ServeFile
from speculative.errors import ConfigError


def batch_application(served: ServeFile, models: Collection[str], *, on_a_cluster: bool) -> ServeFile:
    """The application to start for a batch.

    Args:
        served: a checked application.
        models: that the requests ask for.
        on_a_cluster: keep the configured port; else a free one is taken, so that a running server is not in the way.

    Raises:
        ConfigError: requests ask for a model that it does not serve.
    """
    http, name = served.http_options, served.application.args.model.served_name
    if others := sorted(set(models) - {name}):
        raise ConfigError(f"The requests ask for the model {others[0]!r}; this engine serves {name!r} and no other.")
    if not on_a_cluster:
        http = http.model_copy(update={"port": free_port(http)})
    return served.model_copy(update={"http_options": http})
