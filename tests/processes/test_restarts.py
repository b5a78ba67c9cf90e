"""When a program that ended is started again."""

from __future__ import annotations

import pytest

from llorch_worker.processes.restarts import LIVED_S, Restarts, in_words


def test_one_that_ends_again_and_again_waits_longer_each_time_up_to_a_limit() -> None:
    restarts = Restarts()
    pauses = [restarts.pause_s(LIVED_S / 2) for _ in range(10)]
    assert pauses[0] == 0.0
    assert pauses[1:8] == sorted({*pauses[1:8]})
    assert pauses[7:] == [pauses[7]] * 3


@pytest.mark.parametrize("worked", [False, True])
def test_one_that_worked_or_ran_for_long_starts_again_at_once(worked: bool) -> None:
    restarts = Restarts()
    for _ in range(3):
        restarts.pause_s(0.0)
    if worked:
        restarts.end_row()
    assert restarts.pause_s(0.0 if worked else LIVED_S) == 0.0
    assert restarts.pause_s(0.0) > 0.0


def test_a_pause_is_told_in_whole_seconds() -> None:
    assert [in_words(pause_s) for pause_s in (-1.0, 0.4, 3.6)] == ["now", "now", "in 4 s"]
