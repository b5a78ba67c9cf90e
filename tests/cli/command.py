"""The real command in a subprocess: one that ends, or one that keeps running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llorch_worker.stack.children import Child, Program, python
from tests.forks import MODULE_PATH, run_forked
from tests.services import wait_until

COMMAND_TIMEOUT_S = 240
"""``llorch demo`` takes 25 s of a processor, which other tests use too."""


@dataclass(frozen=True)
class Served:
    """A served model: its Redis and its name."""

    redis_url: str
    model: str


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def environment(**variables: str) -> dict[str, str]:
    """The environment of a command: this one, one torch thread, and ``variables``."""
    return {
        **os.environ,
        "PYTHONPATH": MODULE_PATH,
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "80",
        **variables,
    }


def run(
    *arguments: str | Path,
    stdin: str = "",
    python_options: tuple[str, ...] = (),
    site: Path | None = None,
    fresh: bool = False,
    timeout_s: float = COMMAND_TIMEOUT_S,
    **variables: str,
) -> Ran:
    """``llorch <arguments>`` in a process of its own, killed after ``timeout_s``.

    ``site`` is one more folder on the module path. The process is forked from one that has the
    libraries already, but where it is to find others or is to be ``fresh``: an interpreter that
    starts as a user's does.
    """
    env = environment(**variables)
    if not (fresh or python_options or site or "PYTHONPATH" in variables):
        done = run_forked(
            "llorch_worker.cli", *map(str, arguments), environment=env, stdin=stdin,
            timeout_s=timeout_s, folder=Path(tempfile.gettempdir()),
        )  # fmt: skip
        return Ran(done.returncode, done.stdout, done.stderr)
    if site is not None:
        env["PYTHONPATH"] += f"{os.pathsep}{site}"
    done = subprocess.run(
        [sys.executable, *python_options, "-m", "llorch_worker.cli", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        cwd=tempfile.gettempdir(),
        env=env,
        timeout=timeout_s,
        check=False,
    )
    return Ran(done.returncode, done.stdout, done.stderr)


# A shell lets what it runs in the background ignore SIGINT, and tests may run there.
_OBEY = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, "-P", "-m", "llorch_worker.cli", *sys.argv[1:]])
"""
OBEYING_CTRL_C = python("-c", _OBEY)
"""The command ``llorch``, before its arguments."""


class Started:
    """A command that keeps running; collects its lines and waits for any of them."""

    def __init__(self, *arguments: str | Path, **variables: str) -> None:
        self.lines: list[str] = []
        program = Program(
            "llorch", (*OBEYING_CTRL_C, *map(str, arguments)), environment(**variables)
        )
        self.child = Child(
            program, lambda _name, line: self.lines.append(line), lambda _child: None
        )

    @property
    def pid(self) -> int:
        return self.child.pid

    def wait_for(self, text: str, count: int = 1) -> str:
        """The ``count``-th line with ``text``."""

        def found() -> str | None:
            lines = [line for line in list(self.lines) if text in line]
            if len(lines) >= count:
                return lines[count - 1]
            assert self.child.exit_code is None, "\n".join(self.lines)
            return None

        return str(wait_until(found, timeout_s=COMMAND_TIMEOUT_S, what=text))

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def ended(self) -> int:
        """The exit code, once it has ended by itself."""
        assert self.child.wait(COMMAND_TIMEOUT_S), "\n".join(self.lines)
        code = self.child.exit_code
        assert code is not None
        return code

    def family(self) -> set[int]:
        """The processes that it started, and theirs."""
        return {process.pid for process in psutil.Process(self.pid).children(recursive=True)}


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
