"""SIGUSR1 writes the stack of every thread to stderr, as in Celery, but without local variables,
which may be prompts."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from typing import Any

from llorch_worker.telemetry.logs.json_lines import document_line
from llorch_worker.telemetry.logs.streams import are_printed

_writing = False


def write_on_sigusr1() -> None:
    """Installs the handler, unless the worker runs in a thread of another program, as in tests.

    It runs between two steps of Python. ``faulthandler`` reads the frames of threads that run
    meanwhile, and crashes at times.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGUSR1, _write)


def _write(*_: Any) -> None:
    global _writing
    if _writing:  # the next signal came before the stacks were written
        return
    _writing = True
    try:
        # Not through sys.stderr: the signal may have come while this thread writes there.
        stacks = _stacks()
        if are_printed():
            stacks = document_line("INFO", __name__, stacks)
        text = memoryview(stacks.encode(errors="replace"))
        while text:
            text = text[os.write(2, text) :]
    except OSError:
        pass  # nobody reads stderr any more
    finally:
        _writing = False


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        parts += [f"Thread {names.get(ident, ident)}:\n", *traceback.format_stack(frame), "\n"]
    return "".join(parts)
