"""The ``llorch`` command: one file a command group.

Nothing heavy is imported here: ``llorch --help`` must answer at once, and on a machine that has
only the base install.
"""

from __future__ import annotations

from llorch_worker.stack.interrupts import leaving_at_once


def main() -> None:
    """Run the command line; exit with a code of :mod:`llorch_worker.contract.command_errors`."""
    with leaving_at_once():
        from llorch_worker.cli.app import run
    code = run()
    # An interrupt that went through an eval or exec of CPython's own, as imports have them, leaves
    # a mark with which the interpreter ends by SIGINT whatever the exit code; this takes it off.
    eval("0")
    raise SystemExit(code)
