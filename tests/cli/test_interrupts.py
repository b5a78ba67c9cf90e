"""Ctrl-C before there is anything to interrupt."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cli.command import environment

INTERRUPTED_IN_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == "typer":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.{handler})
sys.meta_path.insert(0, Interrupt())
from llorch_worker.cli import main
main()
"""


@pytest.mark.parametrize(
    ("handler", "code", "says"),
    [("default_int_handler", 130, ("", "error: interrupted\n")), ("SIG_IGN", 0, ("llorch", ""))],
    ids=["heard", "ignored"],
)
def test_ctrl_c_while_the_command_loads_ends_it_without_a_traceback(
    handler: str, code: int, says: tuple[str, str]
) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IN_IMPORT.format(handler=handler), "--version"],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    out, err = says
    assert (ran.returncode, ran.stderr) == (code, err)
    assert ran.stdout.startswith(out)
