"""What a line holds is counted before any of it is made, as a body's is."""

from __future__ import annotations

import io
import json
import tracemalloc

import pytest

from llorch_worker.batches.lines import fields_of
from llorch_worker.batches.raw_lines import MOST_LINE_BYTES, RawLine, survey
from llorch_worker.contract import InvalidRequest

LISTS = b'{"custom_id": "1", "body": {"metadata": [' + b"[]," * 2_500_000 + b"[]]}}"
NUMBERS = b'{"custom_id": "1", "body": {"metadata": [' + b"1," * 3_500_000 + b"1]}}"


@pytest.mark.parametrize(
    ("content", "rule"),
    [(LISTS, "at most 100000 objects and lists"), (NUMBERS, "at most 1100000 values")],
)
def test_a_line_that_holds_too_much_is_refused_by_its_number(content: bytes, rule: str) -> None:
    assert len(content) <= MOST_LINE_BYTES
    found = survey(io.BytesIO(b'{"custom_id": "1"}\n' + content))
    assert (found.lines, found.broken, found.repeated) == (2, {2}, set())
    refused = fields_of(RawLine(2, content))
    assert isinstance(refused, InvalidRequest)
    assert refused.message.startswith(f"line 2: must hold {rule}")


def test_a_survey_finds_repeated_ids_of_any_kind_and_keeps_none_of_them() -> None:
    ids = [*(f"{n:07}" * 2**17 for n in range(20)), *("a", "\ud800", "a", "\ud800", 7, 7, None)]
    file = io.BytesIO(b"\n".join(json.dumps({"custom_id": each}).encode() for each in ids))
    tracemalloc.start()
    try:
        found = survey(file)
        _, most_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (found.lines, found.repeated) == (27, {23, 24})
    assert most_bytes < 10 * 2**20, "a line of 0.9 MiB several times, but not 20 of them"
