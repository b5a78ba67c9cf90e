"""What a document may hold is counted in its bytes, before any of it is made."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic_core import PydanticCustomError

from llorch_worker.contract import values
from llorch_worker.contract.values import (
    MOST_ITEMS,
    MOST_LISTS,
    MOST_NAMES,
    MOST_TEXTS,
    UnreadableJson,
    read_json,
    small_json,
)

MANY = 1_200_000


def listed(item: str, count: int) -> bytes:
    """An object with a list of so many items."""
    return f'{{"a": [{",".join([item] * count)}]}}'.encode()


def named(count: int) -> bytes:
    """An object of so many names."""
    return json.dumps({str(number): 1 for number in range(count)}).encode()


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (listed("[]", MANY), f"at most {MOST_LISTS} objects and lists"),
        (listed("{}", MANY), f"at most {MOST_LISTS} objects and lists"),
        (b"[" * MANY, f"at most {MOST_LISTS} objects and lists"),
        (listed("1", 2 * MANY), f"at most {MOST_ITEMS} values"),
        (listed("null", 2 * MANY), f"at most {MOST_ITEMS} values"),
        (listed('""', MANY), f"at most {MOST_TEXTS} names and texts"),
        (listed(r'"\\\""', MANY), f"at most {MOST_TEXTS} names and texts"),
        (b'{"": 1' + b',"":1' * MANY + b"}", f"at most {MOST_TEXTS} names and texts"),
        (named(60_000), f"at most {MOST_NAMES} names"),
        (listed('{"a":1}', 60_000), f"at most {MOST_NAMES} names"),
        (b'{"a": "\\\\",' + listed("[]", MANY)[1:], f"at most {MOST_LISTS} objects and lists"),
        (b'{"a": "\\",[{",' + listed("[]", MANY)[1:], f"at most {MOST_LISTS} objects and lists"),
    ],
)
def test_a_document_that_holds_too_much_is_refused_before_it_is_made(
    content: bytes, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "from_json", lambda _: pytest.fail("it was parsed"))
    with pytest.raises(UnreadableJson, match=rule):
        read_json(content)


@pytest.mark.parametrize(
    "document",
    [
        {"prompt": ",[{:" * 250_000},
        {"prompt": '",[{\\"\\\\' * 200_000},
        {"prompt": [12345] * 1_000_000},
        {"prompt": [",".join(["x"] * 1_000)] * 1_000},
        {"prompt": ["::"] * 99_000},
        {"schema": {str(number): "x" for number in range(49_999)}},
        {"é": ["\N{SNOWMAN}", 1.5, None, True, {}]},
        {"half a character": "\ud83d"},
    ],
)
def test_what_requests_may_hold_is_read(document: dict[str, Any]) -> None:
    assert read_json(json.dumps(document).encode()) == document
    plain = json.dumps(document, ensure_ascii=False).encode(errors="backslashreplace")
    assert read_json(b"\xef\xbb\xbf" + plain) == document


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32", "latin-1"])
def test_other_encodings_are_refused_with_the_name_of_the_right_one(encoding: str) -> None:
    with pytest.raises(UnreadableJson, match="UTF-8"):
        read_json('{"prompt": "é"}'.encode(encoding))


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1,}', b"[" * 900, b"nul"])
def test_what_is_no_json_is_refused_without_its_text(content: bytes) -> None:
    with pytest.raises(UnreadableJson, match=r"^must be JSON \("):
        read_json(content)


def test_a_value_is_measured_before_anything_walks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "nests_deeper", lambda *_: pytest.fail("it was walked"))
    with pytest.raises(PydanticCustomError, match="at most 4096 bytes"):
        small_json({"a": [1] * MANY}, "metadata", most_levels=32, most_bytes=4_096)
