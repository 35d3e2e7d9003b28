"""The `truespec` command and its groups."""

import sys

import click

from deploy.cli.audit import audit
from deploy.cli.batch import batch
from deploy.cli.bench import bench, bench_handoff, bench_proxy
from deploy.cli.config import config
from deploy.cli.console import MainGroup
from deploy.cli.dashboards import dashboards
from deploy.cli.keys import keys
from deploy.cli.models import model
from deploy.cli.receipts import verify
from deploy.cli.reliability import chaos, load
from deploy.cli.serving import demo, serve
from deploy.cli.training import train_drafter
from deploy.cli.watch import watch


@click.group(cls=MainGroup)
@click.version_option(package_name="truespec")
def main() -> None:
    """Serve language models faster by speculative decoding, and keep checking that the answers are the model's own."""


for _command in (
    serve,
    demo,
    model,
    config,
    keys,
    dashboards,
    verify,
    audit,
    batch,
    bench,
    bench_handoff,
    bench_proxy,
    train_drafter,
    chaos,
    load,
    watch,
):
    main.add_command(_command)

if __name__ == "__main__":
    sys.exit(main())
