"""The `truespec` command and its groups."""

import importlib
import sys

import click

from deploy.cli.console import MainGroup

_HEADINGS = {
    "Serve a model": {"serve": "serving", "demo": "serving", "model": "models", "batch": "batch"},
    "Check answers": {"watch": "watch", "verify": "receipts"},
    "Set up and operate": {"config": "config", "keys": "keys", "dashboards": "dashboards"},
}
_MODULES = {name: module for commands in _HEADINGS.values() for name, module in commands.items()}
"""Module of `deploy.cli` that has the command, under its name with underscores."""


class _Commands(MainGroup):
    """Imports a command when it is asked for: none needs what all the others do."""

    headings = {heading: tuple(commands) for heading, commands in _HEADINGS.items()}  # noqa: RUF012  (never changed)

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


@click.group(
    cls=_Commands,
    context_settings={
        "token_normalize_func": lambda word: word.replace("_", "-"),  # --max_model_len, as vLLM takes it
        "help_option_names": ["--help", "-h"],
        "show_default": True,
    },
)
@click.version_option(package_name="truespec")
def main() -> None:
    """Keep checking that a language model's answers are its own, and serve them faster by speculative decoding.

    Completion: put eval "$(_TRUESPEC_COMPLETE=bash_source truespec)" into ~/.bashrc; there are zsh_source and
    fish_source, too.
    """


if __name__ == "__main__":
    sys.exit(main())
