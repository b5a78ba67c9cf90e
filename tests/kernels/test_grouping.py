"""Which sequences share a call."""

from __future__ import annotations

import pytest

from llorch_worker.kernels.grouping import in_groups


@pytest.mark.parametrize(
    ("contexts", "groups"),
    [
        ([5], [[5]]),
        ([5, 5, 5, 5, 5], [[5, 5, 5, 5], [5]]),
        ([5, 90, 5, 5], [[5], [90], [5, 5]]),
        ([9, 9, 3], [[9, 9], [3]]),
    ],
)
def test_a_long_context_pads_no_other_and_parts_none(
    contexts: list[int], groups: list[list[int]]
) -> None:
    found = in_groups(contexts, lambda count, longest: count * longest <= 20)
    assert [contexts[each] for each in found] == groups
