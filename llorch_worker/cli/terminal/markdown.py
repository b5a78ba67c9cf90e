"""Markdown that arrives piece by piece, on a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, ClassVar, Self

from markdown_it import MarkdownIt
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.markdown import Markdown, MarkdownElement, TextElement
from rich.segment import Segment
from rich.spinner import Spinner
from rich.text import Text

from llorch_worker.cli.terminal.screen import harmless

if TYPE_CHECKING:
    from markdown_it.token import Token
    from rich.console import RenderableType

REFRESHES_A_S = 10
_MARGIN_LINES = 2
"""Of the screen below which the block that grows ends."""


class MarkdownStream:
    """Shows an answer as it comes: first what it waits for, then thoughts, dimmed, then Markdown.

    Each block is written once it is whole, and stays. The one that still grows is drawn again and
    again below it, its last lines if the screen has no room for all.
    """

    def __init__(self, console: Console, waiting_for: str) -> None:
        self._console = console
        self._parser = parser()
        self._rest = ""
        self._thinks = False
        self._spinner: Spinner | None = Spinner("dots", Text(waiting_for, "dim"))
        self._written = False
        self._live = Live(
            get_renderable=self._draw,
            console=console,
            refresh_per_second=REFRESHES_A_S,
            transient=True,
            vertical_overflow="visible",
        )

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Writes what is left."""
        self._spinner = None
        self._finish()
        self._live.stop()

    def think(self, text: str) -> None:
        """Adds to the thought before the answer."""
        self._thinks = True
        self._add(text)

    def push(self, text: str) -> None:
        """Adds to the answer, which is Markdown."""
        if self._thinks:
            self._finish()
            self._thinks = False
            text = text.lstrip("\n")
        self._add(text)

    def begin_again(self) -> None:
        """What was written is void."""
        self._finish()
        self._thinks = False

    def _add(self, text: str) -> None:
        self._spinner = None
        self._rest += harmless(text)
        if "\n" in text:
            whole, rest = self._split(self._rest)
            if whole.strip():
                self._rest = rest
                self._write(whole)

    def _finish(self) -> None:
        rest, self._rest = self._rest, ""
        if rest.strip():
            self._write(rest)

    def _write(self, text: str) -> None:
        # Else what is drawn below it is still what was drawn last, with this text in it.
        self._live.refresh()
        if self._written:
            self._console.print()
        self._written = True
        self._console.print(self._shown(text))

    def _split(self, text: str) -> tuple[str, str]:
        """The blocks that are whole, and the last one, which may grow."""
        if self._thinks:
            whole, mark, rest = text.rpartition("\n\n")
            return (whole, rest) if mark else ("", text)
        blocks = (each for each in self._parser.parse(text) if each.level == 0 and each.map)
        starts = [each.map[0] for each in blocks if each.map and each.nesting >= 0]
        lines = text.splitlines(keepends=True)
        last = starts[-1] if len(starts) > 1 else 0
        return "".join(lines[:last]), "".join(lines[last:])

    def _draw(self) -> RenderableType:
        if self._spinner is not None:
            return self._spinner
        return _Tail(self._shown(self._rest), above=self._written and bool(self._rest.strip()))

    def _shown(self, text: str) -> RenderableType:
        return Text(text.strip("\n"), "dim") if self._thinks else _Markdown(text, self._parser)


def parser() -> MarkdownIt:
    """Of CommonMark with tables and strikethrough."""
    return MarkdownIt().enable(["strikethrough", "table"])


class _Tail:
    """The last lines of what is too long for the screen."""

    def __init__(self, shown: RenderableType, *, above: bool) -> None:
        self._shown = shown
        self._above = above

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines = console.render_lines(self._shown, options.update(height=None), pad=False)
        room = max(1, console.height - _MARGIN_LINES)
        if self._above:
            yield Segment.line()
        for line in lines[-room:]:
            yield from line
            yield Segment.line()


class _Heading(TextElement):
    """On the left, in bold; rich's own are centred, and the first in a box."""

    @classmethod
    def create(cls, _markdown: Markdown, token: Token) -> _Heading:
        return cls(token.tag)

    def __init__(self, tag: str) -> None:
        self.tag = tag
        self.style_name = f"markdown.{tag}"
        super().__init__()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _Markdown(Markdown):
    """Text of strangers: an address is shown, never hidden behind other words, and no character
    controls the terminal, however it is spelled."""

    elements: ClassVar[dict[str, type[MarkdownElement]]] = {
        **Markdown.elements,
        "heading_open": _Heading,
    }

    def __init__(self, text: str, parser: MarkdownIt) -> None:
        super().__init__("", code_theme="ansi_dark", hyperlinks=False)
        self.parsed = parser.parse(text)
        _make_harmless(self.parsed)


def _make_harmless(tokens: Iterable[Token]) -> None:
    """``&#8238;`` is a character that only the parser makes."""
    for token in tokens:
        token.content = harmless(token.content)
        token.attrs = {
            name: harmless(value) if isinstance(value, str) else value
            for name, value in token.attrs.items()
        }
        _make_harmless(token.children or ())
