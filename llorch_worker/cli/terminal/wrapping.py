"""Word wrap for text that arrives piece by piece."""

from __future__ import annotations

import shutil
from collections.abc import Callable

from rich.cells import cell_len

_SMALLEST_WIDTH = 20
_CLEAR_TO_END_OF_LINE = "\x1b[K"


class WordWrap:
    """Writes to a terminal; a word that crosses the edge is erased and moves to the next line.

    Each piece is shown at once, before its word is complete. The last column stays empty, because
    terminals differ in where they put the cursor after it.
    """

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._column = 0
        self._word = ""

    def push(self, text: str) -> None:
        """Write ``text``, which may begin or end within a word."""
        width = max(shutil.get_terminal_size().columns - 1, _SMALLEST_WIDTH)
        self._write("".join(self._placed(character, width) for character in text))

    def _placed(self, character: str, width: int) -> str:
        if character == "\n":
            self._column, self._word = 0, ""
            return character
        cells = cell_len(character)
        before = ""
        if self._column + cells > width:
            if character == " ":
                self._column, self._word = 0, ""
                return "\n"
            before = self._new_line()
        self._column += cells
        self._word = "" if character.isspace() else self._word + character
        return before + character

    def _new_line(self) -> str:
        """The line's end; moves the unfinished word to the next line if possible."""
        word = self._word
        if len(word) in (0, self._column) or not all(map(_is_plain, word)):
            self._column, self._word = 0, ""
            return "\n"
        self._column = len(word)
        return f"\x1b[{len(word)}D{_CLEAR_TO_END_OF_LINE}\n{word}"


def _is_plain(character: str) -> bool:
    # One cell wide on every terminal. The widths of joined emoji vary, and Chinese or Japanese may
    # break anywhere.
    return (character.isascii() or character.isalpha()) and cell_len(character) == 1
