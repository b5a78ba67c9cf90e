"""An engine beside this process is compared with one in it, token by token."""

from __future__ import annotations

import pytest

from benches.engine_process import first_difference


@pytest.mark.parametrize(
    ("theirs", "place"),
    [
        ([(1, 2, 3), (4, 9, 6)], "sequence 1, token 1"),
        ([(9, 2, 3), (4, 9, 6)], "sequence 0, token 0"),
        ([(1, 2, 3), (4, 5)], "sequence 1, token 2"),
    ],
)
def test_the_first_difference_is_named(theirs: list[tuple[int, ...]], place: str) -> None:
    assert first_difference([(1, 2, 3), (4, 5, 6)], theirs) == place
