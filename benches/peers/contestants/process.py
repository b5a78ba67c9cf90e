"""A contestant in its own process, with its own memory and threads."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benches.peers.contestants.contestant import (
    LLAMA_CPP,
    LLORCH,
    TRANSFORMERS,
    TRANSFORMERS_CB,
    CannotRun,
    Failed,
    Rate,
    Ready,
    Terms,
    Work,
)
from llorch_worker.bench.jobs.sandbox import thread_environment

ROOM = "benches.peers.contestants"
CLASSES = {
    LLORCH: (f"{ROOM}.llorch", "LlorchContestant"),
    LLAMA_CPP: (f"{ROOM}.llama_cpp", "LlamaCppContestant"),
    TRANSFORMERS: (f"{ROOM}.generate", "GenerateContestant"),
    TRANSFORMERS_CB: (f"{ROOM}.continuous_batching", "ContinuousBatchingContestant"),
}
TIMEOUT_S = 1800.0
"""A load or a pass that takes longer counts as failed."""
STOP_S = 10.0
MOST_SHOWN_CHARS = 200


@dataclass(frozen=True)
class WarmUp:
    """Asks for a warm-up of ``work``."""

    work: Work


class ContestantProcess:
    """Entering loads the model; leaving ends the process.

    Every method raises :class:`CannotRun` if the contestant fails or its process ends.
    """

    def __init__(self, name: str, terms: Terms) -> None:
        self.name = name
        self._log = tempfile.NamedTemporaryFile(prefix="llorch-bench-", suffix=".log")  # noqa: SIM115 - closed on exit
        # Spawned, because torch in a forked process expects threads that do not exist there.
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=serve, args=(theirs, name, terms, self._log.name), daemon=True
        )
        self._process.start()
        theirs.close()

    def __enter__(self) -> Self:
        try:
            self.ready: Ready = self._answer()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # Closing the connection ends an idle process; one that runs a pass is terminated.
        self._connection.close()
        if error is None:
            self._process.join(STOP_S)
        self._process.terminate()
        self._process.join(STOP_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._log.close()

    def warm_up(self, work: Work) -> None:
        """Runs the shapes of ``work`` once."""
        self._ask(WarmUp(work))

    def run(self, work: Work) -> Rate:
        """Runs one timed pass."""
        rate: Rate = self._ask(work)
        return rate

    def _ask(self, question: Work | WarmUp) -> Any:
        try:
            self._connection.send(question)
        except OSError:
            raise CannotRun(self._last_words()) from None
        return self._answer()

    def _answer(self) -> Any:
        try:
            if not self._connection.poll(TIMEOUT_S):
                raise CannotRun(f"did not answer within {TIMEOUT_S:.0f} s")
            answer = self._connection.recv()
        except (EOFError, OSError):
            raise CannotRun(self._last_words()) from None
        if isinstance(answer, Failed):
            raise CannotRun(answer.reason)
        return answer

    def _last_words(self) -> str:
        self._process.join(STOP_S)
        code = self._process.exitcode
        if code is not None and code < 0:
            return f"its process was killed by {signal.Signals(-code).name}"
        lines = Path(self._log.name).read_text(errors="replace").splitlines()
        words = lines[-1][:MOST_SHOWN_CHARS] if lines else ""
        return f"its process ended with exit code {code}: {words}"


def serve(connection: Connection, name: str, terms: Terms, log: str) -> None:
    """The process: loads, then answers until the connection closes."""
    # Output of libraries would end up in our tables and documents.
    sink = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(sink, stream)
    # Before torch is imported, because it reads them once.
    os.environ |= thread_environment(terms.threads)
    try:
        module, class_name = CLASSES[name]
        contestant = getattr(import_module(module), class_name)(terms)
        connection.send(contestant.ready)
        while True:
            match connection.recv():
                case WarmUp(work):
                    contestant.warm_up(work)
                    connection.send(None)
                case Work() as work:
                    connection.send(contestant.run(work))
    except EOFError:
        return
    except Exception as error:  # noqa: BLE001 - any error of a library is reported in its row
        text = " ".join(str(error).split())[:MOST_SHOWN_CHARS]
        connection.send(Failed(f"{type(error).__name__}: {text}" if text else type(error).__name__))
