"""Commands in processes that need not import anything: forks of a process that has.

Importing torch and transformers takes most of a short command's time. No command runs before the
fork, so none can affect the next.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path

_STREAMS = ("stdin", "stdout", "stderr")
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "llorch_worker.cli.app",
        "llorch_worker.client",
        "llorch_worker.engine",
        "llorch_worker.text.loading",
        "rich.console",
        "transformers.models.llama",
    ]
)


def run_forked(
    arguments: list[str], *, stdin: str, environment: dict[str, str], timeout_s: float
) -> subprocess.CompletedProcess[str]:
    """``llorch <arguments>``, killed after ``timeout_s``; raises TimeoutExpired then."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "stdin").write_text(stdin)
        process = _FORKS.Process(target=_command, args=(arguments, environment, folder))
        process.start()
        try:
            process.join(timeout_s)
            if process.exitcode is None:
                raise subprocess.TimeoutExpired(arguments, timeout_s)
            out, err = ((folder / stream).read_text() for stream in _STREAMS[1:])
            return subprocess.CompletedProcess(arguments, process.exitcode, out, err)
        finally:
            process.kill()
            process.join()
            process.close()


def _command(arguments: list[str], environment: dict[str, str], folder: Path) -> None:
    from llorch_worker.cli import main

    os.environ.clear()
    os.environ.update(environment)
    os.chdir(tempfile.gettempdir())
    for number, stream in enumerate(_STREAMS):
        file = os.open(folder / stream, os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT)
        os.dup2(file, number)
        os.close(file)
    # That of a child is /dev/null.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.argv = ["llorch", *arguments]
    main()
