"""The real command in a subprocess: one that ends, or one that keeps running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from llorch_worker.stack.children import Child, Program, python
from tests.forks import MODULE_PATH, REPOSITORY, Fork, run_forked
from tests.services import wait_until
from tests.zygote import is_zygote

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
    """A command that keeps running; collects its lines and waits for any of them.

    It is a fork, and so are the programs that it starts, unless it is ``fresh`` or ``variables``
    have a module path with folders of their own.
    """

    def __init__(self, *arguments: str | Path, fresh: bool = False, **variables: str) -> None:
        words, env = tuple(map(str, arguments)), environment(**variables)
        fresh = fresh or env["PYTHONPATH"] not in (MODULE_PATH, str(REPOSITORY))
        self.child = _Spawned(words, env) if fresh else _Forked(words, env)

    @property
    def lines(self) -> list[str]:
        return self.child.lines()

    @property
    def pid(self) -> int:
        return self.child.pid

    def wait_for(self, text: str, count: int = 1) -> str:
        """The ``count``-th line with ``text``."""

        def found() -> str | None:
            ended = self.child.exit_code is not None
            lines = [line for line in self.lines if text in line]
            if len(lines) >= count:
                return lines[count - 1]
            assert not ended, "\n".join(self.lines)
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
        found = {process.pid for process in psutil.Process(self.pid).children(recursive=True)}
        return {pid for pid in found if not is_zygote(pid)}


class _Spawned(Child):
    """``llorch <arguments>`` as a user starts it."""

    def __init__(self, arguments: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._lines: list[str] = []
        super().__init__(
            Program("llorch", (*OBEYING_CTRL_C, *arguments), env),
            lambda _name, line: self._lines.append(line),
            lambda _child: None,
        )

    def lines(self) -> list[str]:
        return list(self._lines)


class _Forked:
    """``llorch <arguments>`` in a fork, with the methods of ``Child`` that tests call."""

    def __init__(self, arguments: tuple[str, ...], env: Mapping[str, str]) -> None:
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - as long as this object
        out, folder = Path(self._output.name), Path.cwd()
        self._fork = Fork("llorch_worker.cli", *arguments, environment=env, out=out, folder=folder)
        self.pid = self._fork.pid

    @property
    def exit_code(self) -> int | None:
        return self._fork.returncode

    def wait(self, timeout_s: float) -> bool:
        with suppress(subprocess.TimeoutExpired):
            self._fork.wait(timeout_s)
        return self.exit_code is not None

    def kill(self) -> None:
        self._fork.kill()

    def lines(self) -> list[str]:
        """Those that are complete, or all once it has ended."""
        ended = self.exit_code is not None
        text = Path(self._output.name).read_text(errors="replace")
        return (text if ended else text[: text.rfind("\n") + 1]).splitlines()


def alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
