"""A worker tells that it is here, and hears of another with its name."""

from __future__ import annotations

import os
import threading
import time
from contextlib import closing

import pytest

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.worker.announcer import Announcer
from tests.services import RedisServer
from tests.waiting import wait_until


def card(started_at: float) -> WorkerCard:
    return WorkerCard(
        hostname="w@h",
        pid=os.getpid(),
        model="m",
        max_context=128,
        max_sequences=4,
        device="cpu",
        started_at=started_at,
        last_seen=time.time(),
        engine={},
    )


def test_two_workers_of_one_name_warn_once_each(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(registry, "ANNOUNCE_INTERVAL_S", 0.01)
    iterations = {1.0: 0, 2.0: 0}

    def made(started_at: float) -> WorkerCard:
        iterations[started_at] += 1
        return card(started_at)

    def warnings() -> list[str]:
        return [text for text in caplog.messages if "another worker" in text]

    with connect(redis_server.url) as client:
        # Of one that died without a word, and is no second one.
        registry.announce(client, card(0.0))
        with closing(Announcer(client, "w@h", lambda: made(1.0))) as first:
            first.start()
            wait_until(lambda: iterations[1.0] > 3)
            assert warnings() == []
            with closing(Announcer(client, "w@h", lambda: made(2.0))) as second:
                second.start()
                wait_until(lambda: len(warnings()) == 2)
                so_far = dict(iterations)
                wait_until(lambda: all(iterations[each] > so_far[each] + 5 for each in iterations))
        assert len(warnings()) == 2
        assert "w@h" in warnings()[0]


def test_of_two_announcements_at_once_that_of_the_later_model_stays(
    redis_server: RedisServer,
) -> None:
    models = ["before", "after"]

    def made() -> WorkerCard:
        model = models.pop(0)
        if models:
            # The seat changes its model, and says so, before this card is written.
            later.start()
            later.join(0.2)
        return card(1.0).model_copy(update={"hostname": "seat@h", "model": model})

    with connect(redis_server.url) as client:
        announcer = Announcer(client, "seat@h", made)
        later = threading.Thread(target=announcer.attempt)
        announcer.attempt()
        later.join()
        told = [each.model for each in registry.workers(client) if each.hostname == "seat@h"]
        announcer.close()
    assert told == ["after"]


def test_a_worker_that_has_withdrawn_is_not_announced_once_more(redis_server: RedisServer) -> None:
    with connect(redis_server.url) as client:
        announcer = Announcer(client, "w@h", lambda: card(1.0))
        announcer.start()
        announcer.close()
        announcer.attempt()  # of a seat that had changed before, on a thread of its own
        assert registry.living(client, "m") == []
