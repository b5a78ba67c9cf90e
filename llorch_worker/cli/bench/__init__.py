"""``llorch bench``: measurements of the engine on this machine.

Commands are light to import; they import their measurements when they run.
"""

from __future__ import annotations

from llorch_worker.cli.bench.engine import engine
from llorch_worker.cli.bench.queue import queue
from llorch_worker.cli.bench.startup import startup
from llorch_worker.cli.terminal.command_line import command_line

app = command_line(
    no_args_is_help=True,
    help="Measure the engine on this machine.",
    epilog="Every table names its machine, its versions and the command that made it.",
)
for command in (engine, queue, startup):
    app.command(command.__name__)(command)
