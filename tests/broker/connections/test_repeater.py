"""Threads that repeat what they do with Redis."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
from redis.exceptions import ConnectionError as NoConnection

from llorch_worker.broker.connections import repeater
from llorch_worker.broker.connections.repeater import Repeater
from tests.waiting import wait_until


def test_an_outage_is_logged_once_and_ends_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    left = [NoConnection("refused")] * 3
    served = threading.Event()

    def act() -> None:
        if left:
            raise left.pop()
        served.set()

    thread = Repeater("test", "act", act, 0.001)
    thread.start()
    assert served.wait(60)
    wait_until(lambda: "Redis serves again" in caplog.messages)
    thread.close()
    assert caplog.messages == ["Redis is away, will retry: refused", "Redis serves again"]


def test_a_defect_is_logged_with_its_place_and_ends_no_thread(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = [ValueError("a secret")] * 2
    served = threading.Event()

    def act() -> None:
        if left:
            raise left.pop()
        served.set()

    thread = Repeater("test", "act", act, 0.001)
    thread.start()
    assert served.wait(60)
    thread.close()
    assert caplog.messages[0] == "cannot act, will retry"
    assert "ValueError" in caplog.text
    assert "in act" in caplog.text
    assert "secret" not in caplog.text


def test_a_call_that_hangs_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeater, "CLOSE_TIMEOUT_S", 0.01)
    began, go_on = threading.Event(), threading.Event()

    def act() -> None:
        began.set()
        go_on.wait()

    thread = Repeater("test", "act", act)
    thread.start()
    began.wait()
    thread.close()
    go_on.set()


def test_what_failed_is_kept_nowhere() -> None:
    class Outbox:
        pass

    def act() -> None:
        outbox = Outbox()
        watched.append(weakref.ref(outbox))
        error = NoConnection("refused")
        raise error

    watched: list[weakref.ref[Outbox]] = []
    gc.disable()
    try:
        Repeater("test", "act", act).attempt()
        assert watched[0]() is None
    finally:
        gc.enable()
