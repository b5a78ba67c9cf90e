"""The table of commands, and the one place where a fault becomes a sentence and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer

from llorch_worker.cli import (
    bench,
    dead,
    demo,
    doctor,
    generate,
    inspect,
    jobs,
    status,
    submit,
    up,
    worker,
)
from llorch_worker.cli.terminal.paragraphs import flowing
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract import ErrorDocument
from llorch_worker.contract.command_errors import INTERRUPTED, USAGE, explain

_FIRST = "Start here"
_JOBS = "Jobs"
_SERVE = "Serve"
_LOOK = "Look"

app = typer.Typer(
    name="llorch",
    help="Llama on Celery: workers that keep a model resident and batch jobs from Redis.",
    epilog="Exit codes: 0 done, 1 failed, 2 wrong command or request, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _add(name: str, command: Callable[..., Any], panel: str) -> None:
    app.command(name, help=flowing(command), rich_help_panel=panel)(command)


_add("demo", demo.demo, _FIRST)
_add("doctor", doctor.doctor, _FIRST)
_add("up", up.up, _SERVE)
_add("worker", worker.worker, _SERVE)
_add("generate", generate.generate, _JOBS)
_add("submit", submit.submit, _JOBS)
_add("watch", jobs.watch, _JOBS)
_add("cancel", jobs.cancel, _JOBS)
_add("status", status.status, _LOOK)
_add("inspect", inspect.inspect, _LOOK)
app.add_typer(dead.app, name="dead", rich_help_panel=_LOOK)
app.add_typer(bench.app, name="bench", rich_help_panel=_LOOK)


def _print_version(wanted: bool) -> None:
    if wanted:
        from llorch_worker import __version__

        typer.echo(f"llorch {__version__}")
        raise typer.Exit


@app.callback()
def _llorch(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show it.")
    ] = False,
) -> None:
    """Llama on Celery: workers that keep a model resident and batch jobs from Redis."""


# typer vendors click in newer releases and imports it in older ones: these names are true in both.
_UsageError = typer.BadParameter.__mro__[1]


def run(command: typer.Typer = app, name: str = "llorch") -> int:
    """Run ``command`` on ``sys.argv``; returns the exit code, and never shows a traceback for a
    known fault. A defect of ours does show one."""
    try:
        code = command(prog_name=name, standalone_mode=False)
    except BrokenPipeError:
        # `llorch ... | head`: the reader has enough. Keep the interpreter from complaining.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except typer.Abort:
        code = INTERRUPTED
    except BaseException as error:
        explained = explain(error)
        if isinstance(error, _UsageError):
            if not _said(error):
                return USAGE  # no arguments: the help is out, and is all there is to say
            explained = _usage_document(error), USAGE
        if explained is None:
            raise
        Screen(as_json=_json_wanted()).error(explained[0])
        return explained[1]
    if code == INTERRUPTED and _json_wanted() and (explained := explain(KeyboardInterrupt())):
        Screen(as_json=True).error(explained[0])
    return code if isinstance(code, int) else 0


def _usage_document(error: BaseException) -> ErrorDocument:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "llorch"
    message = f"{_said(error)}; see {command} --help"
    return ErrorDocument(code="USAGE", message=message, retriable=False)


def _said(error: BaseException) -> str:
    message = str(error.format_message()) if hasattr(error, "format_message") else str(error)
    # Newer versions of typer put the exception's kind before some values.
    return " ".join(message.split()).replace(": Value error, ", ": ").rstrip(".")


def _json_wanted() -> bool:
    """Whether ``--json`` was asked for, also where the command line could not be parsed."""
    arguments = sys.argv[1:]
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    return "--json" in options
