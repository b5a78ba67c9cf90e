"""Warnings that repeat are cut, and counted."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from llorch_worker.telemetry.logs.repeats import MOST_A_MINUTE, WINDOW_S, Repeats


class Log(logging.Handler):
    """What gets through the filter."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.lines: list[str] = []
        self.addFilter(Repeats(lambda: self.now_s))

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def log() -> Iterator[Log]:
    handler = Log()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield handler
    logger.removeHandler(handler)


logger = logging.getLogger(__name__)


def test_a_warning_is_cut_and_counted_after_its_minute(log: Log) -> None:
    for number in range(MOST_A_MINUTE + 7):
        logger.warning("job %d is late", number)
    assert log.lines == [f"job {number} is late" for number in range(MOST_A_MINUTE)]
    log.now_s += WINDOW_S + 1
    logger.info("something else")
    assert log.lines[MOST_A_MINUTE:] == [
        "7 more like 'job %d is late' were left out within a minute",
        "something else",
    ]
    logger.warning("job %d is late", 99)
    assert log.lines[-1] == "job 99 is late"


def test_errors_that_differ_are_all_told(log: Log) -> None:
    for number in range(3 * MOST_A_MINUTE):
        logger.error("job %d is lost", number)
    assert len(log.lines) == 3 * MOST_A_MINUTE
    for _ in range(3 * MOST_A_MINUTE):
        logger.error("all is lost")
    assert log.lines.count("all is lost") == MOST_A_MINUTE


def test_what_jobs_say_at_level_info_is_never_cut(log: Log) -> None:
    for _ in range(3 * MOST_A_MINUTE):
        logger.info("job ended")
    assert len(log.lines) == 3 * MOST_A_MINUTE
