"""The table of commands."""

from __future__ import annotations

from typing import Annotated

import typer

from llorch_worker.cli import (
    batch,
    bench,
    cancel,
    chat,
    dead,
    demo,
    doctor,
    exporter,
    gateway,
    generate,
    inspect,
    load,
    models,
    purge,
    status,
    submit,
    top,
    up,
    usage,
    watch,
    worker,
)
from llorch_worker.cli.terminal.command_line import command_line

_COMMANDS = {
    "Start here": (demo.demo, up.up, chat.chat, doctor.doctor),
    "Serve": (
        worker.worker,
        gateway.gateway,
        gateway.gateway_key,
        exporter.exporter,
        load.load,
        load.unload,
        load.reload,
    ),
    "Jobs": (generate.generate, submit.submit, watch.watch, cancel.cancel, purge.purge),
    "Inspect": (status.status, top.top, usage.usage, inspect.inspect),
}

app = command_line(
    name="llorch",
    help="Language models on Celery: workers that keep a model resident and batch jobs from Redis.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong command or request, 130 interrupted.",
    no_args_is_help=True,
)
for panel, commands in _COMMANDS.items():
    for command in commands:
        app.command(command.__name__.replace("_", "-"), rich_help_panel=panel)(command)
app.add_typer(batch.app, name="batch", rich_help_panel="Jobs")
app.add_typer(dead.app, name="dead", rich_help_panel="Inspect")
app.add_typer(models.app, name="models", rich_help_panel="Inspect")
app.add_typer(bench.app, name="bench", rich_help_panel="Inspect")


def _print_version(wanted: bool) -> None:
    if wanted:
        from llorch_worker import __version__

        typer.echo(f"llorch {__version__}")
        raise typer.Exit


@app.callback()
def _llorch(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    pass
