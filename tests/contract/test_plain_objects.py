"""What a user sends through Celery comes back as it was."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps, loads

from llorch_worker.contract.plain_objects import MARK, mark_plain, unmark_plain

KINDS = (
    *("bytes", "base64", "datetime", "date", "time", "decimal", "uuid", "unheard of"),
    *(None, 7, [], {"a": 1}),
)
NAMES = st.sampled_from(["__type__", "__value__", MARK, "a"])
VALUES = st.recursive(
    st.none() | st.integers() | st.sampled_from(["x", "decimal", "2026-11-28"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("value", ["x", "2026-11-28", {"hex": "0" * 32}, None, []], ids=str)
def test_an_object_that_kombu_would_decode_passes_through_it(kind: object, value: object) -> None:
    sent = {"a": [{"__type__": kind, "__value__": value}]}
    assert unmark_plain(loads(dumps(mark_plain(sent)))) == sent


@given(VALUES)
def test_whatever_passes_through_kombu_any_number_of_times_comes_back(sent: Any) -> None:
    marked = mark_plain(sent)
    # As in a chain, each of whose workers reads and writes it.
    assert loads(dumps(loads(dumps(marked)))) == marked
    assert unmark_plain(marked) == sent


def test_other_objects_get_no_mark() -> None:
    for plain in ({}, {"__type__": 1}, {"__value__": 1}, {"__type__": 1, "__value__": 2, "a": 3}):
        assert mark_plain(plain) == unmark_plain(plain) == plain


def test_very_deep_values_are_left_as_they_are() -> None:
    deep: Any = {}
    for _ in range(5_000):
        deep = {"a": deep}
    unmark_plain(deep)
