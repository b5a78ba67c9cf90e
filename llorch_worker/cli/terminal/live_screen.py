"""A full screen that is drawn again and again and hears keys, as in ``top``."""

from __future__ import annotations

import os
import select
import signal
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from llorch_worker.cli.terminal.interrupts import terminable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

REDRAW_S = 1.0
"""How often the screen is drawn without news, for clocks and ages."""
_CHUNK_BYTES = 4096


def is_screen(console: Console) -> bool:
    """Whether ``console`` is a terminal that can show a full screen."""
    return sys.stdout.isatty() and not console.is_dumb_terminal


class LiveScreen:
    """Uses the terminal's second screen and gives back the first as it was, however it ends.

    It follows the terminal's size, and Ctrl-Z and ``fg`` work. Without a terminal on stdin it hears
    no keys.
    """

    def __init__(
        self,
        console: Console,
        draw: Callable[[], RenderableType],
        on_key: Callable[[str], bool],
    ) -> None:
        """``on_key`` gets each key and returns whether to go on."""
        self._console = console
        self._draw = draw
        self._on_key = on_key
        self._suspended = False
        self._news, self._wake = os.pipe()
        # Nobody reads while the process is suspended, and a byte that does not fit is not needed.
        os.set_blocking(self._wake, False)

    def redraw(self) -> None:
        """Draws soon; for other threads."""
        with suppress(BlockingIOError):
            os.write(self._wake, b".")

    def run(self) -> None:
        """Draws until ``on_key`` says stop or stdin ends; signals raise KeyboardInterrupt."""
        with terminable(), self._signals():
            while self._show():
                self._suspended = False
                os.kill(os.getpid(), signal.SIGSTOP)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        # A write to the pipe ends the wait in select(); a signal alone does not.
        before = {
            number: signal.signal(number, self._hear)
            for number in (signal.SIGWINCH, signal.SIGTSTP)
        }
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        self._suspended |= number == signal.SIGTSTP
        self.redraw()

    def _show(self) -> bool:
        """Draws until the end; returns True if it is suspended instead."""
        keyboard = sys.stdin.fileno() if sys.stdin.isatty() else None
        inputs = [self._news] if keyboard is None else [self._news, keyboard]
        with single_keys(keyboard), self._console.screen():
            while not self._suspended:
                self._console.update_screen(self._draw())
                ready, _, _ = select.select(inputs, [], [], REDRAW_S)
                if self._news in ready:
                    os.read(self._news, _CHUNK_BYTES)
                if keyboard in ready and not self._heard_keys(keyboard):
                    return False
        return True

    def _heard_keys(self, keyboard: int) -> bool:
        typed = os.read(keyboard, _CHUNK_BYTES)
        return bool(typed) and all(map(self._on_key, typed.decode(errors="ignore")))


@contextmanager
def single_keys(keyboard: int | None) -> Iterator[None]:
    """Delivers each key at once and does not echo it."""
    if keyboard is None:
        yield
        return
    before = termios.tcgetattr(keyboard)
    try:
        tty.setcbreak(keyboard, termios.TCSANOW)
        yield
    finally:
        termios.tcsetattr(keyboard, termios.TCSADRAIN, before)
