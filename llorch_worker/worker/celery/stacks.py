"""SIGUSR1 writes the stack of every thread of a worker's processes to stderr, as in Celery, but
without local variables, which may be prompts."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.processes.stacks import stacks
from llorch_worker.telemetry.logs.json_lines import document_line
from llorch_worker.telemetry.logs.streams import are_printed

_writing = False
_asked: SimpleQueue[None] = SimpleQueue()


def write_on_sigusr1(ask_others: Callable[[], Iterable[str]]) -> None:
    """Installs the handler, unless the worker runs in a thread of another program, as in tests.
    ``ask_others`` asks the other processes for their stacks, and waits for them.

    It runs between two steps of Python. ``faulthandler`` reads the frames of threads that run
    meanwhile, and crashes at times.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _write_own)
        Repeater("stacks", "ask others for their stacks", lambda: _write_others(ask_others)).start()


def _write_own(*_: Any) -> None:
    global _writing
    if _writing:  # the next signal came before the stacks were written
        return
    _writing = True
    try:
        _write(stacks())
        # A handler may not wait, nor take a lock.
        if _asked.empty():
            _asked.put(None)
    finally:
        _writing = False


def _write_others(ask: Callable[[], Iterable[str]]) -> None:
    _asked.get()
    for found in filter(None, ask()):
        _write(found)


def _write(text: str) -> None:
    # Not through sys.stderr: the signal may have come while this thread writes there.
    if are_printed():
        text = document_line("INFO", __name__, text)
    left = memoryview(text.encode(errors="replace"))
    with suppress(OSError):  # nobody reads stderr any more
        while left:
            left = left[os.write(2, left) :]
