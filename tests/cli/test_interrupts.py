"""Which signals interrupt a command, and when."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from llorch_worker.cli.terminal.interrupts import deaf, uninterrupted_exit
from tests.cli.command import environment

INTERRUPTED_IN_IMPORT = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.{handler})
sys.meta_path.insert(0, Interrupt())
from llorch_worker.cli import main
main()
"""


HEARD = "error: interrupted\n"


@pytest.mark.parametrize(
    ("command", "module"),
    [
        ("--version", "pydantic"),
        ("--version", "typer"),
        ("status", "redis"),
        ("doctor", "torch"),
        ("generate x", "torch"),
        ("batch run pyproject.toml -o /dev/null", "redis"),
    ],
)
def test_ctrl_c_during_imports_ends_a_command_without_a_traceback(
    command: str, module: str
) -> None:
    ran = interrupted(command, module, "default_int_handler")
    assert ran.returncode == 130
    assert ran.stderr in ("", HEARD)


def test_a_command_in_the_background_of_a_script_ignores_ctrl_c() -> None:
    ran = interrupted("--version", "typer", "SIG_IGN")
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout.startswith("llorch")


def interrupted(command: str, module: str, handler: str) -> subprocess.CompletedProcess[str]:
    """Ctrl-C arrives at the first import of ``module``."""
    code = INTERRUPTED_IN_IMPORT.format(handler=handler, module=module)
    return subprocess.run(
        [sys.executable, "-c", code, *command.split()],
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def default_handler() -> Iterator[None]:
    """Python's own: tests that run in the background inherit SIG_IGN."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


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
        with deaf():
            pass
    assert changes == []
