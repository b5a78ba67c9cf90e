"""The ``llorch`` command: one file per command.

Imports nothing heavy: ``llorch --help`` must answer at once, even with only the base install.
"""

from __future__ import annotations

# These two alone, which Python itself has loaded: until main runs, Ctrl-C shows a traceback.
import _signal  # type: ignore[import-not-found]
import os


def main() -> None:
    """Run the command line; exit with a code of :mod:`llorch_worker.contract.command_errors`."""
    # A script's background processes ignore SIGINT and must continue to.
    heard = _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler
    if heard:
        _signal.signal(_signal.SIGINT, _leave_at_once)
    from llorch_worker.cli.app import app
    from llorch_worker.cli.terminal.command_line import run

    if heard:
        _signal.signal(_signal.SIGINT, _signal.default_int_handler)
    code = run(app, "llorch")
    # After a KeyboardInterrupt passes through eval or exec, as in imports, CPython ends by SIGINT
    # and ignores the exit code. Another eval clears that mark.
    eval("0")
    raise SystemExit(code)


def _leave_at_once(_number: int, _frame: object) -> None:
    """During imports, before any work has begun. As an exception Ctrl-C would show a traceback, or
    be swallowed by a callback of the import system."""
    os.write(2, b"error: interrupted\n")
    os._exit(130)
