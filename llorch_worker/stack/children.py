"""Programs that a command runs as its children; they never outlive it.

Each child has its own process group, so that Ctrl-C in the terminal reaches only the command, which
decides what to do. Each is tethered (:mod:`llorch_worker.stack.tether`), so that it ends even if
the command is killed with SIGKILL.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import llorch_worker
from llorch_worker.processes.signals import signal_name
from llorch_worker.stack import tether

TAIL_LINES = 40
_ERROR_MARKS = ("error: ", "cannot start: ")
"""A command or a worker's log writes one of these before the reason for its end."""


@dataclass(frozen=True)
class Program:
    """A program to run. It receives ``death_signal`` if this process dies without stopping it."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    death_signal: signal.Signals = signal.SIGTERM


class Child:
    """A running program. A thread passes its output to ``on_line(name, line)``, and calls
    ``on_exit(child)`` once the program has closed its output.

    Start children from a thread that lives as long as they do: on Linux the tether watches the
    starting thread, not the process.
    """

    def __init__(
        self,
        program: Program,
        on_line: Callable[[str, str], None],
        on_exit: Callable[[Child], None],
    ) -> None:
        self.program = program
        self.started_at_s = time.monotonic()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._on_line = on_line
        self._on_exit = on_exit
        self._process = subprocess.Popen(
            _tethered(program),
            env=_environment(program),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, name=program.name, daemon=True)
        self._reader.start()

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code (negative: killed by that signal), or None while it runs."""
        return self._process.poll()

    def listens_on(self, port: int) -> bool:
        """Whether the program itself accepts connections on TCP ``port``."""
        import psutil

        try:
            connections = psutil.Process(self.pid).net_connections("tcp")
        except psutil.Error:
            return False
        return any(c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in connections)

    def terminate(self) -> None:
        """Ask the program to finish (SIGTERM)."""
        if self.exit_code is None:
            self._process.terminate()

    def kill(self) -> None:
        """Kill the program and its process group."""
        if self.exit_code is None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether the program ended within ``timeout_s`` seconds; None waits forever."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        self._reader.join(1.0)
        return True

    def last_words(self) -> str:
        """The program's own reason for its end, else its last line."""
        lines = [line.strip() for line in self.tail if line.strip()]
        for line in reversed(lines):
            sentence = error_sentence(line)
            if sentence is not None:
                return sentence
        return lines[-1] if lines else ""

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for line in output:
                line = line.rstrip("\n")
                self.tail.append(line)
                self._on_line(self.name, line)
        self._on_exit(self)


def error_sentence(line: str) -> str | None:
    """The reason in ``line`` for the end of a command or worker; None for other lines."""
    for mark in _ERROR_MARKS:
        before, found, sentence = line.partition(mark)
        if found and (not before or before.endswith("] ")):
            return sentence
    return None


def python(*arguments: str) -> tuple[str, ...]:
    """The command line of this interpreter, without imports from the working directory."""
    return (sys.executable, "-P", *arguments)


def describe_exit(code: int | None) -> str:
    """An exit code in words."""
    if code is None:
        return "still running"
    return f"killed by {signal_name(-code)}" if code < 0 else f"exit code {code}"


def _tethered(program: Program) -> list[str]:
    # -I -S: the tether must start fast and must not import from the user's directory.
    wrapper = [sys.executable, "-I", "-S", str(tether.__file__)]
    return [*wrapper, str(int(program.death_signal)), str(os.getpid()), *program.command]


def _environment(program: Program) -> dict[str, str]:
    # `python -P` drops the working directory from the path, but a checkout that is not installed
    # must stay importable.
    home = str(Path(llorch_worker.__file__).parents[1])
    inherited = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([home, inherited] if inherited else [home]),
        "PYTHONUNBUFFERED": "1",
        **program.environment,
    }
