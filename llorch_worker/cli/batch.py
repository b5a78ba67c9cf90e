"""``llorch batch``: files of requests."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.request_options import request_options
from llorch_worker.cli.terminal.command_line import command_line
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import FAILED, usage_error
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings

DEFAULT_WINDOW = 256

app = command_line(help="Run files of requests.", no_args_is_help=True)


@app.callback()
def _batch() -> None:
    pass


@app.command("run")
@settings_options("redis_url")
@request_options
def run(
    file: Annotated[Path, typer.Argument(help="A file with one JSON request a line.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Where to write the answers.")],
    model: Annotated[
        str | None, typer.Option("--model", help="The name under which the model is served.")
    ] = None,
    priority: Annotated[
        str | None, typer.Option("--priority", help="high, normal or low [low].")
    ] = None,
    window: Annotated[
        int, typer.Option("--window", min=1, help="The most jobs in the queue at a time.")
    ] = DEFAULT_WINDOW,
    *,
    settings: Settings,
    as_json: JsonOption = False,
    fields: dict[str, Any],
) -> None:
    """Run a file of requests and write the answers, in the file's order.

    A line is a request with the fields of a job, or a line of OpenAI's batches: custom_id, method,
    url, body. The options are defaults of the former.

    Ctrl-C stops; the same command goes on where it was, also after a crash.
    """
    if not fields.keys().isdisjoint(("chat", "system")):
        raise usage_error("--chat and --system shape one prompt: in a file, use messages")
    fields |= {k: v for k, v in (("model", model), ("priority", priority)) if v is not None}
    from llorch_worker.cli.batch_run import run_file

    screen = Screen(as_json=as_json)
    done = run_file(screen, settings, file, output, fields, window=window)
    if as_json:
        screen.document(
            {
                "output": str(output),
                "lines": done.lines,
                "failed": done.failed,
                "lines_per_s": round(done.lines_per_s, 1),
            }
        )
    screen.note(
        f"{counted(done.lines, 'line')}: {done.lines - done.failed} done, {done.failed} failed, "
        f"{done.lines_per_s:.1f} lines/s, in {output}"
    )
    if done.failed:
        raise typer.Exit(FAILED)
