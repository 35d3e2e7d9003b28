"""The base of maintainers' commands, which run in a checkout: `python -m tools.bench`, for example."""

from typing import Any

import click

from deploy.cli.console import errors_in_a_line


class ToolCommand(click.Command):
    """A command that ends as those of `truespec` do."""

    def invoke(self, ctx: click.Context) -> Any:
        with errors_in_a_line():
            return super().invoke(ctx)
