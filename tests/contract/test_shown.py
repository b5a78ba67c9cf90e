"""What users chose is shown in one printable line of bounded length."""

from __future__ import annotations

from datetime import date, datetime, time
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llorch_worker.contract import (
    GenerationRequest,
    InvalidRequest,
    describe,
    printable,
    shown,
    summarise,
)
from llorch_worker.contract.shown import MAX_SHOWN_CHARS


@given(st.text(max_size=300))
def test_anything_becomes_one_printable_line_of_bounded_length(text: str) -> None:
    line = shown(text)
    assert line.isprintable()
    assert len(line) <= MAX_SHOWN_CHARS


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("東京 Zürich 🦙", "東京 Zürich 🦙"),
        ("two\nlines\ttab", "two\\nlines\\ttab"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\u202etxt.exe\u2028", "\\u202etxt.exe\\u2028"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_what_cannot_be_seen_is_escaped(text: str, line: str) -> None:
    assert printable(text) == line


def test_a_name_of_exactly_the_limit_is_not_cut() -> None:
    assert shown("x" * MAX_SHOWN_CHARS) == "x" * MAX_SHOWN_CHARS
    assert shown("x" * (MAX_SHOWN_CHARS + 1)) == "x" * (MAX_SHOWN_CHARS - 3) + "..."


def test_what_is_not_a_string_is_shown_by_its_size() -> None:
    assert shown({"a": 1}) == "an object of 1 field"
    assert shown(["a"] * 1200) == "a list of 1200 items"


@pytest.mark.parametrize(
    ("value", "what"),
    [
        (Decimal("1.5"), "a decimal"),
        (UUID(int=7), "a UUID"),
        (date(2026, 1, 2), "a date or time"),
        (datetime(2026, 1, 2, 3), "a date or time"),
        (time(3), "a date or time"),
        (b"secret", "6 bytes"),
        ({1}, "a value that JSON does not have"),
    ],
)
def test_what_kombu_makes_of_a_message_is_shown_without_pythons_names(
    value: object, what: str
) -> None:
    assert describe(value) == what


def test_a_summary_of_unknown_fields_counts_them() -> None:
    fields = {"max_tokens": 7} | {f"secret\n{number}": number for number in range(10_000)}
    assert summarise(fields) == "max_tokens=7, unknown fields: 10000"


def test_a_refusal_of_any_request_is_printable_and_bounded() -> None:
    fields = {f"\x1b[2J{number}" + "y" * 1000: 1 for number in range(900)}
    with pytest.raises(InvalidRequest) as caught:
        GenerationRequest(prompt_token_ids=[-1] * 100_000, **fields)
    assert caught.value.message.isprintable()
    assert len(repr(caught.value)) < 20_000
    assert caught.value.message.endswith("; and more")
