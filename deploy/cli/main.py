"""The `truespec` command and its groups."""

import importlib
import sys

import click

from deploy.cli.console import MainGroup

_MODULES = {
    "serve": "serving",
    "demo": "serving",
    "model": "models",
    "config": "config",
    "keys": "keys",
    "dashboards": "dashboards",
    "verify": "receipts",
    "batch": "batch",
    "watch": "watch",
}
"""Module of `deploy.cli` that has the command, under its name with underscores."""


class _Commands(MainGroup):
    """Imports a command when it is asked for: none needs what all the others do."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of the help."""
        del ctx
        return sorted(_MODULES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; None where there is none of this name."""
        del ctx
        if cmd_name not in _MODULES:
            return None
        found: click.Command = getattr(
            importlib.import_module(f"deploy.cli.{_MODULES[cmd_name]}"), cmd_name.replace("-", "_")
        )
        return found


@click.group(cls=_Commands)
@click.version_option(package_name="truespec")
def main() -> None:
    """Serve language models faster by speculative decoding, and keep checking that the answers are the model's own."""


if __name__ == "__main__":
    sys.exit(main())
