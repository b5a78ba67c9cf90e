from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.text import StopStrings


def _run(stops: list[str], pieces: list[str], *, include: bool = False) -> tuple[str, bool]:
    """What comes out of ``pieces``, up to the match or the end."""
    stopper = StopStrings(stops, include=include)
    shown = ""
    for piece in pieces:
        text, matched = stopper.push(piece)
        shown += text
        if matched:
            return shown, True
    return shown + stopper.flush(), stopper.matched


def _oracle(stops: list[str], text: str) -> tuple[str, bool]:
    cut = min((at for stop in stops if (at := text.find(stop)) >= 0), default=None)
    return text[:cut], cut is not None


ALPHABET = "aab😀é"


@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), max_size=5),
    pieces=st.lists(st.text(ALPHABET, max_size=4), max_size=12),
)
def test_the_cut_is_where_the_first_stop_begins_however_the_text_is_split(
    stops: list[str], pieces: list[str]
) -> None:
    cut, matched = _oracle(stops, "".join(pieces))
    assert _run(stops, pieces) == (cut, matched)
    begun = [stop for stop in stops if "".join(pieces).startswith(stop, len(cut))]
    stop = min(begun, key=len) if matched else ""
    assert _run(stops, pieces, include=True) == (cut + stop, matched)


@given(
    stops=st.lists(st.text(ALPHABET, min_size=1, max_size=5), min_size=1, max_size=5),
    pieces=st.lists(st.text(ALPHABET, max_size=4), max_size=12),
)
def test_no_more_is_held_back_than_may_begin_a_stop(stops: list[str], pieces: list[str]) -> None:
    stopper = StopStrings(stops)
    seen = shown = ""
    for piece in pieces:
        text, matched = stopper.push(piece)
        seen, shown = seen + piece, shown + text
        if matched:
            return
        held = seen[len(shown) :]
        assert not held or any(stop.startswith(held) or held.startswith(stop) for stop in stops)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
