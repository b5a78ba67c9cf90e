"""Prints and writes each figure as soon as it is measured."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO


class Report:
    """A report that keeps all earlier figures if a failure or a time limit ends the run."""

    def __init__(self, screen: TextIO, out: Path | None = None) -> None:
        """``out`` is overwritten with one line of JSON per figure."""
        self.failed = False
        self.document: dict[str, list[dict[str, Any]]] = {}
        """All figures so far, by kind."""
        self._screen = screen
        self._out = out
        if out is not None:
            out.write_text("", encoding="utf-8")

    def add(self, figure: Any) -> None:
        """Prints ``figure``, one of :mod:`benches.gpu.figures`, and keeps it."""
        self.note(figure.kind, figure.line, asdict(figure))

    def note(self, kind: str, line: str, values: dict[str, Any]) -> None:
        self.document.setdefault(kind, []).append(values)
        if self._out is not None:
            with self._out.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"kind": kind, **values}) + "\n")
        print(line, file=self._screen, flush=True)

    def leave_out(self, what: str, reason: str) -> None:
        """Says why something was not measured; this is not a failure."""
        line = f"not measured: {what}: {reason}"
        self.note("not_measured", line, {"what": what, "reason": reason})

    @contextmanager
    def attempt(self, what: str) -> Iterator[None]:
        """Reports an error of the block in one line; the caller continues."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - the other measurements must go on
            self.failed = True
            line = one_line(error)
            self.note("failed", f"failed: {what}: {line}", {"what": what, "error": line})


def one_line(error: Exception) -> str:
    """The error's class, and the first line of its message."""
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
