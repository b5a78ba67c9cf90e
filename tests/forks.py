"""Processes that need not import anything: forks of a process that has.

Importing takes most of a short program's time, and most of what a worker needs to start. No
program runs before the fork, so none can affect the next. Such a process differs from a fresh one
in two ways: it sees the ``PYTHON*`` and ``OMP_*`` variables of the process that it was forked from,
and it ends without the interpreter's last cleanup.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

from llorch_worker.stack.tether import PR_SET_PDEATHSIG
from tests.zygote import WITHOUT_PACKAGES, run_program

REPOSITORY = Path(__file__).resolve().parents[1]
MODULE_PATH = f"{WITHOUT_PACKAGES}{os.pathsep}{REPOSITORY}"
"""The PYTHONPATH of tests' processes. ``demo`` is the story model there."""
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "tests.forks_begun",
        "tests.forks",
        "tests.toy_engine",
        "billiard.pool",
        "celery.app.amqp",
        "celery.app.control",
        "celery.app.events",
        "celery.app.log",
        "celery.app.routes",
        "celery.apps.worker",
        "celery.backends.redis",
        "celery.bin.celery",
        "celery.concurrency.solo",
        "celery.concurrency.thread",
        "celery.fixups.django",
        "celery.loaders.app",
        "celery.worker.autoscale",
        "celery.worker.components",
        "celery.worker.consumer",
        "celery.worker.consumer.delayed_delivery",
        "celery.worker.strategy",
        "kombu.matcher",
        "kombu.pidbox",
        "kombu.transport.redis",
        "llorch_worker.broker.celery.backend",
        "llorch_worker.cli.app",
        "llorch_worker.client",
        "llorch_worker.engine.engine",
        "llorch_worker.engine.process.server",
        "llorch_worker.gateway.app",
        "llorch_worker.intake.desk",
        "llorch_worker.text.loading",
        "llorch_worker.worker.celery.app",
        "llguidance.numpy",
        "rich.console",
        "transformers.models.llama",
        "transformers.utils.chat_template_utils",
        "tests.forks_settled",
    ]
)


class Fork:
    """``python -m <module> <arguments>`` in a fork, with the methods of ``subprocess.Popen``.

    With the module ``-c`` the first argument is the program, as for ``python -c``. It dies with the
    process that started it. ``folder`` is its working directory; ``out`` and ``err`` are the files
    that its output is appended to.
    """

    def __init__(
        self,
        module: str,
        *arguments: str,
        environment: Mapping[str, str],
        out: Path,
        err: Path | None = None,
        standard_input: Path = Path(os.devnull),
        folder: Path = REPOSITORY,
    ) -> None:
        streams = (standard_input, out, err or out)
        # What a daemon has started is not waited for at the end of the tests.
        self._process = _FORKS.Process(
            target=_run, args=(module, arguments, dict(environment), streams, folder), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        # It may have ended, and its end been collected, without this object's knowledge.
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def run_forked(
    module: str, *arguments: str, environment: Mapping[str, str], timeout_s: float,
    stdin: str = "", folder: Path = REPOSITORY,
) -> subprocess.CompletedProcess[str]:  # fmt: skip
    """Runs a :class:`Fork` to its end; kills it after ``timeout_s`` and raises TimeoutExpired."""
    with tempfile.TemporaryDirectory() as name:
        given, out, err = (Path(name) / stream for stream in ("in", "out", "err"))
        given.write_text(stdin)
        process = Fork(
            module, *arguments, environment=environment, out=out, err=err,
            standard_input=given, folder=folder,
        )  # fmt: skip
        try:
            code = process.wait(timeout_s)
            return subprocess.CompletedProcess(arguments, code, out.read_text(), err.read_text())
        finally:
            process.kill()
            process.wait()


def printed_by(code: str, *arguments: object) -> str:
    """What ``python -c <code> <arguments>`` prints in a fork. It must end with 0."""
    done = run_forked("-c", code, *map(str, arguments), environment=os.environ, timeout_s=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run(
    module: str,
    arguments: tuple[str, ...],
    environment: dict[str, str],
    streams: tuple[Path, Path, Path],
    folder: Path,
) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL))
    # The server ends when this file is closed everywhere, so also if the tests are killed.
    alive = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    os.close(alive)
    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    for number, stream in enumerate(streams):
        flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = os.open(stream, flags)
        os.dup2(file, number)
        os.close(file)
    run_program(module, *arguments)
