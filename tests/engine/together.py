"""Submits jobs so that an engine finds them in one step."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from llorch_worker.engine import Engine

HOLD_S = 60


@contextmanager
def all_at_once(engine: Engine) -> Iterator[None]:
    """Holds ``engine`` between two steps: jobs submitted meanwhile arrive together.

    Raises the engine's error if it cannot be held.
    """
    reached, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert go_on.wait(HOLD_S), "the engine was held for too long"

    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(engine._thread.call, hold)
        # An engine that refuses the call is not waited for.
        holding.add_done_callback(lambda _: reached.set())
        try:
            assert reached.wait(HOLD_S), "the engine does not come to the end of its step"
            yield
        finally:
            go_on.set()
        holding.result()
