"""JSON in pieces ends where the whole ends, and only what begins JSON goes on."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llorch_worker.text.json_scanner import JsonScanner, NotJson

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=8,
)  # fmt: skip


def scan(text: str, size: int = 0) -> tuple[int | None, int | None]:
    """Where the value of a text in pieces of ``size`` characters ends, and where it breaks."""
    scanner = JsonScanner()
    for start in range(0, len(text), size or len(text) or 1):
        piece = text[start : start + (size or len(text))]
        try:
            end = scanner.feed(piece)
        except NotJson as error:
            return None, start + error.at
        if end is not None:
            return start + end, None
    return None, None


@settings(max_examples=200, deadline=None)
@given(value=VALUES, ascii=st.booleans(), indent=st.none() | st.just(2), size=st.integers(0, 5))
def test_a_value_ends_where_it_ends(
    value: object, ascii: bool, indent: int | None, size: int
) -> None:
    text = json.dumps(value, ensure_ascii=ascii, indent=indent)
    assert scan(text + ",}", size) == (len(text), None)
    for end in range(len(text)):
        assert scan(text[:end], size)[1] is None


@settings(max_examples=500, deadline=None)
@given(text=st.text(alphabet="{}[]\":, \n\\u0a1-.eEtrufalsn\x01'"), size=st.integers(1, 4))
def test_only_what_may_become_json_goes_on(text: str, size: int) -> None:
    end, broken = scan(text)
    assert scan(text, size) == (end, broken)
    if end is not None:
        json.loads(text[:end])
    elif broken is not None:
        with pytest.raises(ValueError, match=r"."):
            json.loads(text)
        assert scan(text[:broken])[1] is None


@pytest.mark.parametrize(
    "text",
    [
        *("{'a': 1}", '{"a": 1,}', "[1, ]", "{a: 1}", '{"a" 1}', "[1 2]", "[True]", "[nul]"),
        *("[NaN]", '["\n"]', r'["\x41"]', r'["\u12g4"]', "[01]", "[1.]", "[+1]", "[.5]", "[1e]"),
        *('{"a": Infinity}', '{"a": None}', "[--1]"),
        *("[1}", '{"a": 1]', "[// 1\n]", "[" + "1" * 5000 + "]"),
    ],
)  # fmt: skip
def test_what_is_no_json_breaks(text: str) -> None:
    end, broken = scan(text)
    assert end is None
    assert broken is not None
    assert scan(text, 1) == scan(text, 3) == (None, broken)
