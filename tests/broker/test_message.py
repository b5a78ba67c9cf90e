"""Headers that any producer may write."""

from __future__ import annotations

import math

import pytest

from llorch_worker.broker.message import enqueue_time_s


@pytest.mark.parametrize("header", [1_763_000_000, 1_763_000_000.5])
def test_a_unix_time_is_the_time_of_enqueueing(header: float) -> None:
    assert enqueue_time_s(header) == header


@pytest.mark.parametrize(
    "header",
    [10**400, math.inf, math.nan, -1, 0, 1, True, 1_763_000_000_000, "1763000000", None, []],
)
def test_anything_else_is_no_time(header: object) -> None:
    assert enqueue_time_s(header) is None
