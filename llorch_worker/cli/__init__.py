"""The ``llorch`` command: one file a command.

Imports nothing heavy: ``llorch --help`` must answer at once, also with only the base install.
"""

from __future__ import annotations

from llorch_worker.cli.terminal.interrupts import leaving_at_once


def main() -> None:
    """Run the command line; exit with a code of :mod:`llorch_worker.contract.command_errors`."""
    with leaving_at_once():
        from llorch_worker.cli.app import app
        from llorch_worker.cli.terminal.command_line import run
    code = run(app, "llorch")
    # A KeyboardInterrupt that passed through eval or exec, as in imports, makes CPython end by
    # SIGINT whatever the exit code. A further eval clears that mark.
    eval("0")
    raise SystemExit(code)
