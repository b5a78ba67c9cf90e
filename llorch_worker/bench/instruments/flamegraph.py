"""A flamegraph of this process, made by py-spy, an optional program."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.installing import install_command

FORMATS: Final = {".svg": "flamegraph", ".json": "speedscope"}
RATE_HZ: Final = 100
WRITE_TIMEOUT_S: Final = 300.0
_SAMPLING = "Sampling process"
_PR_SET_PTRACER = 0x59616D61


@dataclass
class Made:
    """``path`` is None if nothing was written; ``notes`` say why, or what the file lacks."""

    path: Path | None = None
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Flamegraph:
    """The file to write; its suffix selects the format."""

    path: Path
    program: str
    """py-spy."""

    @classmethod
    def at(cls, path: Path) -> Flamegraph:
        """Raises CommandError if py-spy is missing or the path cannot be written."""
        if path.suffix not in FORMATS:
            raise usage_error(
                f"--flamegraph must end in .svg (a picture) or .json (for speedscope) "
                f"(got {path.name[:40]!r})"
            )
        if not path.parent.is_dir():
            raise usage_error(f"--flamegraph: folder {path.parent} does not exist")
        program = py_spy()
        if program is None:
            raise CommandError(
                "MISSING_EXTRA", f"--flamegraph needs py-spy: {install_command('bench')}"
            )
        return cls(path, program)

    @contextmanager
    def recording(self) -> Iterator[Made]:
        """Sample this process, except for idle threads, while the block runs.

        Native frames are included if py-spy can read them on this machine. The block runs even if
        py-spy is not allowed to sample this process.
        """
        made = Made()
        spy = self._start(made, "--native") or self._start(made)
        yield made
        if spy is not None:
            spy.send_signal(signal.SIGINT)
            output, _ = spy.communicate(timeout=WRITE_TIMEOUT_S)
            if spy.returncode == 0 and self.path.exists():
                made.path = self.path
            else:
                made.notes.append(f"no flamegraph: {_last_line(output)}")

    def _start(self, made: Made, *options: str) -> subprocess.Popen[str] | None:
        """The py-spy process once it samples; None, with a note, if it ended."""
        spy = subprocess.Popen(
            [
                self.program, "record", *options,
                "--pid", str(os.getpid()), "--rate", str(RATE_HZ),
                "--format", FORMATS[self.path.suffix], "--output", str(self.path),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )  # fmt: skip
        if sys.platform == "linux":
            # With Yama, only a parent may trace a process, unless the process permits others.
            ctypes.CDLL(None).prctl(_PR_SET_PTRACER, ctypes.c_ulong(spy.pid), 0, 0, 0)
        said = ""
        for line in spy.stdout or ():
            if _SAMPLING in line:
                return spy
            said += line
        spy.wait()
        missing = "no native frames in the flamegraph" if options else "no flamegraph"
        made.notes.append(f"{missing}: {_last_line(said)}")
        return None


def py_spy() -> str | None:
    """The program, next to this Python or on the PATH."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if beside.exists() else shutil.which("py-spy")


def _last_line(output: str) -> str:
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "py-spy said nothing"
