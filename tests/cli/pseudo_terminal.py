"""A command in a terminal of a given size: what it shows, and the keys that a person presses."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable

from tests.cli.command import COMMAND_TIMEOUT_S, environment
from tests.services import wait_until

_AT_LINE = re.compile(r"\x1b\[(\d+);1H")
_STYLE = re.compile(r"\x1b\[[\d;]*m")
SECOND_SCREEN, FIRST_SCREEN = "\x1b[?1049h", "\x1b[?1049l"


class PseudoTerminal:
    """``llorch <arguments>`` as the foreground process of a terminal of its own."""

    def __init__(self, *arguments: str, columns: int, lines: int, **variables: str) -> None:
        self._master, self._slave = os.openpty()
        self._raw = ""
        self.resize(columns, lines)
        self.modes = termios.tcgetattr(self._slave)
        env = {**environment(**variables), "TERM": "xterm-256color"}
        for name in ("COLUMNS", "LINES"):
            # They would outweigh the terminal's size; xdist sets both.
            env.pop(name, None)
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", "llorch_worker.cli", *arguments],
            stdin=self._slave,
            stdout=self._slave,
            stderr=self._slave,
            cwd=tempfile.gettempdir(),
            env=env,
            start_new_session=True,
            preexec_fn=_take_terminal,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while chunk := os.read(self._master, 65_536):
                self._raw += chunk.decode(errors="replace")
        except OSError:
            return

    @property
    def raw(self) -> str:
        """All that was written, with its control sequences."""
        return self._raw

    def screen(self) -> str:
        """The text on the screen, line by line."""
        shown: dict[int, str] = {}
        _, *parts = _AT_LINE.split(self._raw.rpartition(SECOND_SCREEN)[2])
        for number, text in zip(parts[::2], parts[1::2], strict=True):
            shown[int(number)] = _STYLE.sub("", text).rstrip()
        return "\n".join(shown.get(number, "") for number in range(1, self._lines + 1))

    def wait_for(self, *texts: str) -> str:
        """The screen, once it has all ``texts``."""

        def found() -> str:
            screen = self.screen()
            assert self.process.poll() is None, self._raw[-2000:]
            return screen if all(text in screen for text in texts) else ""

        try:
            return wait_until(found, timeout_s=COMMAND_TIMEOUT_S, what=str(texts))
        except AssertionError:
            raise AssertionError(f"no {texts} in\n{self.screen()}") from None

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        self._lines = lines
        fcntl.ioctl(self._slave, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def wait_stopped(self) -> None:
        """Waits until the process is suspended."""
        stat = f"/proc/{self.process.pid}/stat"

        def stopped() -> bool:
            with open(stat) as file:
                return file.read().rpartition(")")[2].split()[0] == "T"

        wait_until(stopped, what="the process to stop")

    def ended(self) -> int:
        """The exit code, once the process has ended; the terminal must be as it was."""
        code = self.process.wait(COMMAND_TIMEOUT_S)
        assert termios.tcgetattr(self._slave) == self.modes
        wait_until(lambda: self._raw.rfind(FIRST_SCREEN) > self._raw.rfind(SECOND_SCREEN))
        return code

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._slave)
        self._reader.join()
        os.close(self._master)


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # A suite in the background ignores Ctrl-C; a person's shell does not.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


Opener = Callable[..., PseudoTerminal]
