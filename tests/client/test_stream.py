from __future__ import annotations

from types import SimpleNamespace

import pytest

from llorch_worker.broker.results import StoredState
from llorch_worker.client import stream
from llorch_worker.client.stream import FROM_THE_START, StreamCursor
from llorch_worker.contract import Tokens, encode_event


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
