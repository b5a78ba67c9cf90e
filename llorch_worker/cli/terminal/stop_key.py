"""Esc stops what runs, as Ctrl-C does."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from llorch_worker.cli.terminal.live_screen import single_keys

_ESC = b"\x1b"
_CHUNK_BYTES = 4096


@contextmanager
def stopped_by_esc() -> Iterator[list[str]]:
    """Raises KeyboardInterrupt in the block at Esc and echoes no key. Yields a list that holds what
    else was typed, once the block has ended."""
    keyboard = sys.stdin.fileno()
    typed: list[bytes] = []
    ends, end = os.pipe()

    def hear() -> None:
        while True:
            ready, _, _ = select.select([keyboard, ends], [], [])
            if ends in ready:
                return
            keys = os.read(keyboard, _CHUNK_BYTES)
            if not keys:
                return
            if not keys.startswith(_ESC):  # an arrow is no text
                typed.append(keys.removesuffix(_ESC))
            if keys.endswith(_ESC):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    found: list[str] = []
    with single_keys(keyboard):
        thread = threading.Thread(target=hear, daemon=True)
        thread.start()
        try:
            yield found
        finally:
            os.write(end, b".")
            thread.join()
            os.close(ends)
            os.close(end)
            text = b"".join(typed).decode(errors="ignore")
            found.append("".join(each for each in text if each.isprintable() or each == "\n"))
