"""A contestant in its own process, with its own memory and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Self

import psutil

from benches.peers.contestants.contestant import CannotRun, Rate, Ready, Terms, Work
from benches.peers.contestants.server import MOST_SHOWN_CHARS
from llorch_worker.bench.plan import thread_environment
from llorch_worker.processes.signals import signal_name

SERVER = "benches.peers.contestants.server"
REPOSITORY = Path(__file__).parents[3]
TIMEOUT_S = 1800.0
"""A load or a pass that takes longer counts as failed."""
STOP_S = 10.0
IDLE_S = 0.05
"""A process that computes nothing for so long is idle; several ticks of the kernel's clock."""
MOST_IDLE_WAIT_S = 3.0
"""Then the other side runs beside a process that does not rest."""


class ContestantProcess:
    """Entering loads the model; leaving ends the process.

    Every method raises :class:`CannotRun` if the contestant fails or its process ends.
    """

    def __init__(self, name: str, terms: Terms) -> None:
        self.name = name
        self._log = tempfile.NamedTemporaryFile(prefix="llorch-bench-", suffix=".log")  # noqa: SIM115 - closed on exit
        self._connection, theirs = Pipe()
        # A peer may lie in a folder of its own.
        paths = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            [sys.executable, "-m", SERVER, name, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": paths, **thread_environment(terms.threads)},
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            # Output of libraries would end up in our tables and documents.
            stdout=self._log,
            stderr=self._log,
        )
        theirs.close()
        self._terms = terms

    def __enter__(self) -> Self:
        try:
            self.ready: Ready = self._ask(self._terms)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        # Closing the connection ends an idle process; one that runs a pass is terminated.
        self._connection.close()
        if error is not None or not self._ends():
            self._process.terminate()
            if not self._ends():
                self._process.kill()
                self._process.wait()
        self._log.close()

    def warm_up(self, work: Work) -> None:
        """Runs the shapes of ``work`` once; returns when the process is idle."""
        self._ask(("warm_up", work))
        self._until_idle()

    def run(self, work: Work) -> Rate:
        """Runs one timed pass; returns when the process is idle."""
        rate: Rate = self._ask(("run", work))
        self._until_idle()
        return rate

    def _until_idle(self) -> None:
        """OpenMP's threads spin for some 0.2 s after a pass, which would slow the other side's."""
        give_up_s = time.monotonic() + MOST_IDLE_WAIT_S
        try:
            process = psutil.Process(self._process.pid)
            used_s = sum(process.cpu_times()[:2])
            while time.monotonic() < give_up_s:
                time.sleep(IDLE_S)
                before_s, used_s = used_s, sum(process.cpu_times()[:2])
                if used_s == before_s:
                    return
        except psutil.Error:
            raise CannotRun(self._last_words()) from None

    def _ask(self, question: Terms | tuple[str, Work]) -> Any:
        try:
            self._connection.send(question)
            if not self._connection.poll(TIMEOUT_S):
                raise CannotRun(f"did not answer within {TIMEOUT_S:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise CannotRun(self._last_words()) from None
        if isinstance(answer, CannotRun):
            raise answer
        return answer

    def _ends(self) -> bool:
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            return False
        return True

    def _last_words(self) -> str:
        self._ends()
        code = self._process.returncode
        if code is not None and code < 0:
            return f"its process was killed by {signal_name(-code)}"
        return f"its process ended with exit code {code}: {last_line(Path(self._log.name))}"


def last_line(log: Path) -> str:
    """The last line of a process' output, cut to fit a row."""
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1][:MOST_SHOWN_CHARS] if lines else ""
