"""What a measurement's processes take is told thread by thread."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from llorch_worker.bench.instruments.processor_time import ProcessorTime
from tests.waiting import wait_until

TAKEN_S = 0.3


@pytest.fixture
def burning() -> Iterator[None]:
    """A child with one thread that never rests, and one that always does."""
    source = """
import threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
while True: pass
"""
    child = subprocess.Popen([sys.executable, "-c", source])
    yield
    child.kill()
    child.wait()


def test_the_busiest_threads_of_children_can_be_left_out(burning: None) -> None:
    before = ProcessorTime.now()

    def enough() -> ProcessorTime | None:
        now = ProcessorTime.now()
        taken_s = now.without_busiest_s(before, 0) - now.without_busiest_s(before, 1)
        return now if taken_s >= TAKEN_S else None

    now = wait_until(enough)
    assert now is not None
    # More than there are: what is left is this process' own.
    assert now.without_busiest_s(before, 99) == pytest.approx(now.here_s - before.here_s)
    assert now.without_busiest_s(before, 0) >= TAKEN_S


def test_what_is_taken_here_counts_though_its_thread_has_ended() -> None:
    def burn() -> None:
        until_s = time.thread_time() + TAKEN_S
        while time.thread_time() < until_s:
            pass

    before = ProcessorTime.now()
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert ProcessorTime.now().without_busiest_s(before, 1) >= TAKEN_S
