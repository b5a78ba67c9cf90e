"""The ``llorch`` command: one file per command.

Imports nothing heavy: ``llorch --help`` must answer at once, even with only the base install.
"""

from __future__ import annotations

from llorch_worker.cli.terminal.interrupts import leaving_at_once


def main() -> None:
    """Run the command line; exit with a code of :mod:`llorch_worker.contract.command_errors`."""
    with leaving_at_once():
        from llorch_worker.cli.app import app
        from llorch_worker.cli.terminal.command_line import run
    code = run(app, "llorch")
    # After a KeyboardInterrupt passes through eval or exec, as in imports, CPython ends by SIGINT
    # and ignores the exit code. Another eval clears that mark.
    eval("0")
    raise SystemExit(code)
