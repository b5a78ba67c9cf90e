from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from llorch_worker.broker.jobs.results import StoredState
from llorch_worker.client import stream
from llorch_worker.client.stream import FROM_THE_START, StreamCursor
from llorch_worker.contract import Event, Restarted, Started, Tokens, encode_event


def test_the_time_that_a_reader_spends_on_an_entry_is_not_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(stream, "time", SimpleNamespace(monotonic=lambda: now_s))
    running = StoredState("STARTED")
    event = encode_event(Tokens(index=0, ids=(1,), text="a"))
    cursor = StreamCursor("a", FROM_THE_START, timeout=1.0)
    for _ in cursor.entries([[cursor.key, [("1-0", {"event": event})]]], None):
        now_s += 5.0
    assert list(cursor.entries([], running)) == []
    now_s += 1.1
    with pytest.raises(TimeoutError, match="job a within 1"):
        list(cursor.entries([], running))


def reply(*events: Event, first: int = 1) -> Any:
    """What XREAD brings."""
    entries = [
        (f"{number}-0", {"event": encode_event(event)})
        for number, event in enumerate(events, first)
    ]
    return [("stream", entries)]


def started(model: str) -> Started:
    return Started(
        worker="w", model="m", model_fingerprint=model, prompt_tokens=1, queue_ms=0, attempt=2
    )


def test_a_reader_of_tokens_that_redis_lost_sees_no_text_of_two_models() -> None:
    """The next worker knows of no tokens, so it cannot say that the job begins again."""
    cursor = StreamCursor("job", "0", None)
    first = reply(started("a"), Tokens(index=0, ids=(1, 2), text="a0 a1 "))
    assert len(list(cursor.entries(first, None))) == 2
    again = reply(started("b"), Tokens(index=0, ids=(7,), text="b0 "), first=10)
    events = [entry.event for entry in cursor.entries(again, None)]
    assert events == [
        Restarted(worker="w", attempt=2), started("b"), Tokens(index=0, ids=(7,), text="b0 ")
    ]  # fmt: skip


def test_a_reader_who_resumes_midway_takes_the_next_attempt_for_no_restart() -> None:
    cursor = StreamCursor("job", "5-0", None)
    more = reply(
        Tokens(index=3, ids=(4,), text="a3 "),
        started("a"),
        Tokens(index=4, ids=(5,), text="a4 "),
        first=6,
    )
    assert [entry.event.type for entry in cursor.entries(more, None)] == [
        "tokens", "started", "tokens"
    ]  # fmt: skip
