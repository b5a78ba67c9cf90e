"""Which signals end a command, and when they are ignored."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import FrameType
from typing import TypeVar

from llorch_worker.contract.command_errors import INTERRUPTED

Service = TypeVar("Service")

_ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def terminable() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP interrupt the block as Ctrl-C does."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def ending() -> Iterator[None]:
    """Makes SIGTERM and SIGHUP end a block in which Ctrl-C only stops something: the terminal is
    left as it was."""

    def end(_number: int, _frame: FrameType | None) -> None:
        raise SystemExit(INTERRUPTED)

    with _handling(end, signal.SIGTERM, signal.SIGHUP):
        yield


@contextmanager
def uninterrupted_exit(service: AbstractContextManager[Service]) -> Iterator[Service]:
    """Enter ``service``. Only SIGKILL interrupts its exit, which must end within seconds."""
    with ExitStack() as deafness, ExitStack() as leaving:
        entered = leaving.enter_context(service)
        leaving.callback(deafness.enter_context, deaf())
        yield entered


@contextmanager
def deaf() -> Iterator[None]:
    """Lets only SIGKILL interrupt the block; for work that ends soon in any case."""
    with _handling(signal.SIG_IGN, *_ALL):
        yield


@contextmanager
def cancelling() -> Iterator[None]:
    """Makes the first Ctrl-C cancel the task that runs the block, and ignores further signals, so
    that the task can clean up.

    With asyncio's own handler a second Ctrl-C raises inside the loop: tasks that were about to wake
    never do, and tasks that wait for them hang.
    """
    import asyncio  # takes a fifth of the time of `llorch --help`

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
    """Ignore signals until the process ends, while it cleans up after an interrupt.

    A second Ctrl-C often follows within milliseconds, as from ``timeout -s INT``.
    """
    for number in _ALL:
        signal.signal(number, signal.SIG_IGN)


@contextmanager
def _handling(
    handler: Callable[[int, FrameType | None], None] | signal.Handlers, *numbers: signal.Signals
) -> Iterator[None]:
    """Installs ``handler`` for these signals in the block. Skips signals whose handler was not
    installed from Python, because it could not be restored."""
    found = {number: signal.getsignal(number) for number in numbers}
    before = {number: was for number, was in found.items() if was is not None}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
