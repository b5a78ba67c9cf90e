"""A watchdog can tell an engine that hangs from one that works or is idle."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from llorch_worker.contract import GenerationRequest, InternalError
from llorch_worker.engine import Engine
from tests.waiting import wait_until

REQUEST = GenerationRequest(prompt="Once upon a time", max_tokens=20, temperature=0)


def wait_until_idle(engine: Engine) -> None:
    wait_until(lambda: engine.stalled_for_s() == 0)


def test_an_engine_without_work_is_not_stalled(make_engine: Callable[..., Engine]) -> None:
    engine = make_engine()
    wait_until_idle(engine)
    engine.submit(REQUEST).result(timeout=60)
    wait_until_idle(engine)
    engine.close()
    assert engine.stalled_for_s() == 0


def test_the_stall_of_a_hanging_step_counts_from_the_last_finished_step(
    make_engine: Callable[..., Engine], watched: Callable[..., Any], gate: Callable[..., Any]
) -> None:
    hold = gate(at=5)
    begun_s: list[float] = []

    def note(step: int, batch: Any) -> None:
        begun_s.append(time.monotonic())
        hold(step, batch)

    engine = make_engine(model=watched(note))
    generation = engine.submit(REQUEST)
    hold.wait_until_reached()
    for _ in range(3):
        before_s, stalled_s, after_s = time.monotonic(), engine.stalled_for_s(), time.monotonic()
        # Steps 1 to 4 moved it; step 5 does not, however often one looks.
        assert begun_s[3] < after_s - stalled_s
        assert before_s - stalled_s <= begun_s[4] + 1e-3
    assert 0 < engine.stalled_for_s() < engine.stalled_for_s()
    hold.open()
    generation.result(timeout=60)
    wait_until_idle(engine)


def test_an_engine_whose_thread_died_stays_stalled(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()

    def broken() -> None:
        raise AssertionError("a broken invariant")

    monkeypatch.setattr(engine._scheduler, "schedule", broken)
    generation = engine.submit(REQUEST)
    with pytest.raises(InternalError, match="broke down"):
        generation.result(timeout=60)
    engine._thread._thread.join(60)
    assert 0 < engine.stalled_for_s() < engine.stalled_for_s()
    monkeypatch.undo()
    for sequence in engine._scheduler.waiting:
        engine._scheduler.finish(sequence)
