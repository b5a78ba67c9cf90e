"""The output of a command, for a person or as one JSON document.

Results go to stdout; progress, banners and errors go to stderr, so that
``llorch generate ... > story.txt`` writes only the story.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from llorch_worker.contract import ErrorDocument, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

PIPE_COLUMNS = 1_000

_TURNING = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
"""Marks that turn the direction of the text beside them."""
# These, and C0 and C1 controls except tab and newline. A model may generate them, and a terminal
# obeys them.
_VISIBLE_CONTROLS = {
    code: chr(code).encode("unicode_escape").decode()
    for code in (*range(0x20), *range(0x7F, 0xA0), *_TURNING)
    if chr(code) not in "\n\t"
}
_NOT_PLAIN = re.compile(r"[^\n -~]")


class Screen:
    """The output of a command. With ``as_json``, stdout has exactly one document."""

    def __init__(self, *, as_json: bool = False) -> None:
        self.as_json = as_json

    @property
    def out(self) -> Console:
        """stdout, styled if it is a terminal."""
        return _console(stderr=False)

    @property
    def wide(self) -> Console:
        """stdout for tables, which are not cut to a width in a file or a pipe."""
        edge = sys.stdout.isatty() or os.environ.get("COLUMNS")
        return _console(stderr=False, width=None if edge else PIPE_COLUMNS)

    @property
    def err(self) -> Console:
        """stderr, styled if it is a terminal."""
        return _console(stderr=True)

    @property
    def live(self) -> bool:
        """Whether to show progress bars and spinners."""
        return not self.as_json and sys.stderr.isatty()

    def document(self, value: Any, *, indent: int | None = 2) -> None:
        """Print ``value`` as the command's one JSON document; services print a line."""
        sys.stdout.write(json_text(value, indent=indent) + "\n")
        sys.stdout.flush()

    def note(self, text: str, style: str = "dim") -> None:
        """Print a remark on stderr, except under ``--json``; no command ends because it cannot."""
        if self.as_json:
            return
        text = harmless(text)
        with suppress(OSError):
            if sys.stderr.isatty():
                self.err.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
            else:  # rich would end the process if nobody reads
                sys.stderr.write(text + "\n")
                sys.stderr.flush()

    def line(self, text: str) -> None:
        """Print one line to stdout, unstyled; invisible characters are made visible."""
        self.write_raw(printable(text) + "\n")

    def write_raw(self, text: str) -> None:
        """Write ``text`` to stdout unchanged, and flush."""
        sys.stdout.write(text)
        sys.stdout.flush()

    def error(self, document: ErrorDocument) -> None:
        """Print one sentence on stderr, or ``{"error": ...}`` on stdout under ``--json``."""
        if self.as_json:
            # On one line, for commands that print a document a line.
            self.write_raw(json_text({"error": document.model_dump(mode="json")}) + "\n")
            return
        sys.stdout.flush()
        with suppress(OSError):  # the exit code still tells
            if sys.stderr.isatty():
                self.err.print("error:", style="bold red", end=" ")
            else:
                sys.stderr.write("error: ")
            sys.stderr.write(printable(document.message) + "\n")
            sys.stderr.flush()

    @contextmanager
    def bar(
        self, label: str, unit: str = "", *, long: bool = False
    ) -> Iterator[Callable[[int, int], None]]:
        """A progress bar on stderr while the block runs; yields ``advance_to(done, total)``.

        ``unit`` is ``"bytes"`` or a word for what is counted. ``long``: shows the rate and the time
        left. No bar if stderr is not a terminal.
        """
        if not self.live:
            yield lambda _done, _total: None
            return
        progress = self.progress(unit, long=long)
        task = progress.add_task(label, total=None)
        with progress:
            yield lambda done, total: progress.update(task, completed=done, total=total)

    def loading_bar(self, label: str) -> Callable[[int, int], None]:
        """A progress callback for bytes; its bar disappears once everything is loaded."""
        bars = ExitStack()
        advance: list[Callable[[int, int], None]] = []

        def progress(done_bytes: int, total_bytes: int) -> None:
            if not advance:
                advance.append(bars.enter_context(self.bar(label, "bytes")))
            advance[0](done_bytes, total_bytes)
            if done_bytes >= total_bytes:
                bars.close()

        return progress

    def progress(self, unit: str, *, long: bool = False) -> Progress:
        """A rich progress display on stderr that disappears at its end."""
        from rich import progress as columns

        class Rate(columns.ProgressColumn):
            def render(self, task: columns.Task) -> str:
                return f"{task.speed:,.0f}/s" if task.speed else ""

        in_bytes = unit == "bytes"
        return columns.Progress(
            columns.SpinnerColumn(),
            columns.TextColumn("{task.description}"),
            columns.BarColumn(bar_width=30),
            columns.DownloadColumn() if in_bytes else columns.MofNCompleteColumn(),
            columns.TextColumn("" if in_bytes else unit),
            columns.TimeElapsedColumn(),
            *((Rate(), columns.TimeRemainingColumn()) if long else ()),
            console=self.err,
            transient=True,
        )


def _console(*, stderr: bool, width: int | None = None) -> Console:
    # Built each time to use the current stream; this is cheap.
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False, width=width)


def harmless(text: str) -> str:
    """``text`` with visible control characters: generated text must not control a terminal.

    It may have several lines; a name may not, and is shown by ``printable``.
    """
    return text.translate(_VISIBLE_CONTROLS)


def json_text(value: Any, *, indent: int | None = None) -> str:
    """``value`` as readable JSON; what is invisible, or not in stdout's encoding, is escaped."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = json.dumps(value, ensure_ascii=not encoding.lower().startswith("utf"), indent=indent)
    return _NOT_PLAIN.sub(_readable, text)


def _readable(character: re.Match[str]) -> str:
    return character[0] if character[0].isprintable() else json.dumps(character[0])[1:-1]
