"""Which signals end a command, and when none may."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

INTERRUPTED: Final = 130
"""The exit code of a command that was."""


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt the block as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends the process there and then; for imports, with which nothing is begun yet.

    As an exception it would be shown with a traceback, or swallowed by a callback of theirs.
    """

    def leave(_number: int, _frame: FrameType | None) -> None:
        os.write(2, b"error: interrupted\n")
        os._exit(INTERRUPTED)

    before = signal.getsignal(signal.SIGINT)
    # Not where it is ignored, as in a script's background.
    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    yield
    signal.signal(signal.SIGINT, before)


@contextmanager
def deaf() -> Iterator[None]:
    """Nothing but SIGKILL interrupts the block; for what ends soon in any case."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
