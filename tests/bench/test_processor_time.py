"""Processor time counts this process whole and its children thread by thread."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from llorch_worker.bench.instruments.processor_time import ProcessorTime
from tests.waiting import wait_until

USED_S = 0.3


@pytest.fixture
def busy_child() -> Iterator[None]:
    """A child with one busy thread and one idle thread."""
    source = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
while True: pass
"""
    child = subprocess.Popen([sys.executable, "-c", source])
    yield
    child.kill()
    child.wait()


def test_the_busiest_threads_of_children_can_be_left_out(busy_child: None) -> None:
    before = ProcessorTime.now()

    def after() -> ProcessorTime | None:
        now = ProcessorTime.now()
        return now if now.since_s(before) - now.since_s(before, 1) >= USED_S else None

    now = wait_until(after)
    assert now is not None
    # 99 is more than all threads: only this process is left.
    assert now.since_s(before, 99) == pytest.approx(now.here_s - before.here_s)
    assert now.since_s(before) >= USED_S
