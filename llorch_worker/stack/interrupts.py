"""Which signals end a command, and when none may."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from llorch_worker.contract.command_errors import INTERRUPTED

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt the block as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def leaving_at_once() -> Iterator[None]:
    """Ctrl-C ends the process there and then; for imports, with which nothing is begun yet.

    As an exception it would be shown with a traceback, or swallowed by a callback of theirs.
    """

    def leave(_number: int, _frame: FrameType | None) -> None:
        os.write(2, b"error: interrupted\n")
        os._exit(INTERRUPTED)

    # Not where it is ignored, as in a script's background.
    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with _handling(leave, *([signal.SIGINT] if heard else [])):
        yield


@contextmanager
def deaf() -> Iterator[None]:
    """Nothing but SIGKILL interrupts the block; for what ends soon in any case."""
    with _handling(signal.SIG_IGN, *_ALL):
        yield


@contextmanager
def cancelling() -> Iterator[None]:
    """The first Ctrl-C cancels the task that runs the block, which may take its time to tidy up;
    no signal is heard from then on.

    Of asyncio's own handler a second Ctrl-C is an exception wherever the loop is just then: tasks
    that were about to wake never do, and who waits for them waits for ever.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel(_number: int, _frame: FrameType | None) -> None:
        deaf_from_now_on()
        loop.call_soon_threadsafe(task.cancel)

    before = signal.getsignal(signal.SIGINT)
    if before is None or before is signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is cancel:
            signal.signal(signal.SIGINT, before)


def deaf_from_now_on() -> None:
    """As :func:`deaf`, to the end of the process: it was interrupted, and tidies up.

    A second Ctrl-C often follows within milliseconds, as from ``timeout -s INT``.
    """
    for number in _ALL:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """``handler`` handles these signals in the block, but none whose handler is not Python's: that
    one could not be put back."""
    found = {number: signal.getsignal(number) for number in numbers}
    before = {number: was for number, was in found.items() if was is not None}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
