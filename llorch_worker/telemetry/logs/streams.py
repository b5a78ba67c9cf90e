"""stderr of a service whose log is JSON: each line is a document, whoever prints it."""

from __future__ import annotations

import atexit
import io
import json
import logging
import os
import sys
import threading
import warnings
from typing import Any, TextIO

from llorch_worker.telemetry.logs.json_lines import JsonFormatter, document_line

_ERROR = "error: "
"""What the sentence of a command that failed begins with."""


def print_documents() -> None:
    """Makes stderr print documents only, from warnings and unexpected errors on."""
    if sys.stderr is None or isinstance(sys.stderr, DocumentStream):
        return
    stream = DocumentStream(sys.stderr)
    # Celery's handlers write to the second, and are documents already.
    sys.stderr = sys.__stderr__ = stream  # type: ignore[assignment, misc]
    warnings.showwarning = _show_warning
    sys.excepthook = _show_error
    threading.excepthook = lambda hook: _show_error(
        hook.exc_type, hook.exc_value, hook.exc_traceback
    )
    atexit.register(stream.end)


def are_printed() -> bool:
    return isinstance(sys.stderr, DocumentStream)


def say(text: str, *_: Any) -> None:
    """Prints a line at once, in a signal handler too, which may interrupt another line's print."""
    os.write(2, document_line("INFO", "llorch_worker", text.strip()).encode())


class DocumentStream(io.TextIOBase):
    """Writes each line to ``stream`` as a document, unless it is one."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = ""
        # Reentrant: a signal handler may print while its thread does.
        self._lock = threading.RLock()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def buffer(self) -> Any:
        return self._stream.buffer

    def fileno(self) -> int:
        return self._stream.fileno()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        with self._lock:
            if self._begun and _read(text.rstrip()) is not None:
                text = f"\n{text}"
            *lines, self._begun = (self._begun + text).split("\n")
            if found := "".join(_document(line) for line in lines if line.strip()):
                self._stream.write(found)
                self._stream.flush()
        return len(text)

    def flush(self) -> None:
        self._stream.flush()

    def end(self) -> None:
        """Prints what has no end of line yet."""
        self.write("\n")


def tagged(line: str, program: str) -> str:
    """The document of a line that another program printed."""
    found = _read(line)
    return json.dumps({"program": program} | (found or json.loads(_document(line)))) + "\n"


def _document(line: str) -> str:
    if _read(line) is not None:
        return f"{line}\n"
    level = "ERROR" if line.startswith(_ERROR) else "INFO"
    return document_line(level, "stderr", line.removeprefix(_ERROR))


def _read(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        found: dict[str, Any] = json.loads(line)
    except ValueError:
        return None
    return found


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any, **__: Any
) -> None:
    text = f"{category.__name__}: {message} ({filename}:{lineno})"
    sys.stderr.write(document_line("WARNING", "py.warnings", text))


def _show_error(kind: Any, error: Any, trace: Any) -> None:
    record = logging.LogRecord(
        "llorch_worker", logging.CRITICAL, "", 0, "unexpected error", (), (kind, error, trace)
    )
    sys.stderr.write(JsonFormatter().format(record) + "\n")
