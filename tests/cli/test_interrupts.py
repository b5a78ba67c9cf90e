"""Which signals interrupt a command, and when."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llorch_worker.cli.terminal.interrupts import deaf, leaving_at_once, uninterrupted_exit
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
def test_ctrl_c_during_imports_ends_the_command_without_a_traceback(
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


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's own: tests that run in the background inherit SIG_IGN."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_is_handled_as_before_after_a_block_that_failed() -> None:
    with pytest.raises(ZeroDivisionError), leaving_at_once():
        raise ZeroDivisionError
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("default_handler")
def test_ctrl_c_interrupts_a_service_but_not_its_exit() -> None:
    exits: list[str] = []

    @contextmanager
    def service() -> Iterator[None]:
        try:
            yield
        finally:
            signal.raise_signal(signal.SIGINT)
            exits.append("complete")

    with pytest.raises(KeyboardInterrupt), uninterrupted_exit(service()):
        signal.raise_signal(signal.SIGINT)
    assert exits == ["complete"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_not_installed_from_python_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    changes: list[object] = []
    # As where a program in C embeds the interpreter.
    with monkeypatch.context() as patch:
        patch.setattr(signal, "getsignal", lambda _number: None)
        patch.setattr(signal, "signal", lambda *change: changes.append(change))
        with leaving_at_once(), deaf():
            pass
    assert changes == []
