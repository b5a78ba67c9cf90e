"""Ctrl-C before there is anything to interrupt."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from llorch_worker.stack.interrupts import deaf, leaving_at_once
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


def test_ctrl_c_is_handled_as_before_once_a_block_failed() -> None:
    def fail() -> None:
        assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        raise ZeroDivisionError

    # Ignored where the tests run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(ZeroDivisionError), leaving_at_once():
            fail()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_that_is_not_pythons_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[object] = []
    # As where a program in C embeds the interpreter.
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda _number: None)
        patch.setattr(signal, "signal", lambda *change: changes.append(change))
        with leaving_at_once(), deaf():
            pass
    assert changes == []
