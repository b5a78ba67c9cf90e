"""Words are not broken at the terminal's edge, whatever the pieces."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.cli.terminal.wrapping import WordWrap


def screen(written: str) -> list[str]:
    """The lines that a terminal shows after ``written``: newline, cursor left, clear to the end."""
    lines = [""]
    for left, character in re.findall(r"\x1b\[(\d+)D|\x1b\[K|(.|\n)", written):
        if left:
            lines[-1] = lines[-1][: len(lines[-1]) - int(left)]
        elif character == "\n":
            lines.append("")
        elif character:
            lines[-1] += character
    return lines


def show(pieces: list[str], columns: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    written: list[str] = []
    wrap = WordWrap(written.append)
    for piece in pieces:
        wrap.push(piece)
    return screen("".join(written))


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (
            ["Once upon a time there ", "w", "as", " a fox"],
            ["Once upon a time there ", "was a fox"],
        ),
        (["a" * 24, " b"], ["a" * 24, "b"]),  # a space at the edge
        (["x" * 50], ["x" * 24, "x" * 24, "xx"]),  # a word longer than a line
    ],
)
def test_a_word_that_crosses_the_edge_moves_to_the_next_line(
    monkeypatch: pytest.MonkeyPatch, pieces: list[str], lines: list[str]
) -> None:
    assert show(pieces, 25, monkeypatch) == lines


@given(pieces=st.lists(st.text("ab \n", max_size=12), max_size=30), columns=st.integers(21, 40))
def test_no_line_is_too_long_and_no_word_is_lost(pieces: list[str], columns: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        shown = show(pieces, columns, patch)
    assert all(len(line) < columns for line in shown)
    text = "".join(pieces)
    assert "".join(shown).replace(" ", "") == text.replace("\n", "").replace(" ", "")
    if max(map(len, text.split()), default=0) < columns:
        assert " ".join(shown).split() == text.split()
