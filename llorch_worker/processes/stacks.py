"""Where the threads of this process are, without local variables, which may be prompts."""

from __future__ import annotations

import sys
import threading
import traceback


def stacks(process: str = "") -> str:
    """The stack of every thread, whose names begin with that of the ``process``."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        name = " ".join(filter(None, (process, str(names.get(ident, ident)))))
        parts += [f"Thread {name}:\n", *traceback.format_stack(frame), "\n"]
    return "".join(parts)
