"""What a gateway's key may use: a job is admitted once, and its end corrects what it reserved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.broker.scripts import run_script
from llorch_worker.client import Client
from tests.broker.jobs.test_usage import DONE, finish
from tests.broker.steps import SETTINGS, take

PLACES, RATES = keys.key_jobs("alice"), keys.key_rates("alice")
MINUTE_MS, DAY_MS = 60_000, 86_400_000
USED = DONE.usage.prompt + DONE.usage.completion


def admit(
    store: redis.Redis, job_id: str, *rates: Any, tokens: int = 0, most: int = 0
) -> tuple[str, int, list[int]]:
    """The verdict, the wait in ms, and what is left of each rate."""
    arguments = [job_id, "alice", most, 60, 60, tokens, *rates]
    verdict, wait_ms, *figures = run_script(store, "gateway/admit", arguments, [PLACES, RATES])
    return verdict, wait_ms, figures[::2]


def later(store: redis.Redis, ms: float) -> None:
    """As if so much time had passed."""
    store.hincrbyfloat(RATES, "at", -ms)


def test_a_rate_admits_its_limit_at_once_and_then_evenly(store: redis.Redis) -> None:
    rate = ("requests_minute", 3, MINUTE_MS)
    began_ms = store.time()[0] * 1_000
    left = [admit(store, str(n), *rate) for n in range(4)]
    took_ms = (store.time()[0] + 1) * 1_000 - began_ms
    assert [verdict for verdict, _, _ in left] == ["admitted"] * 3 + ["rate"]
    assert [each for _, _, each in left] == [[2], [1], [0], [0]]
    wait_ms = left[-1][1]
    assert 20_000 - took_ms <= wait_ms <= 20_000
    later(store, wait_ms)
    assert [admit(store, f"later {n}", *rate)[0] for n in range(2)] == ["admitted", "rate"]
    later(store, DAY_MS)
    assert admit(store, "a day later", *rate) == ("admitted", 0, [2])


def test_each_limit_can_keep_a_job_out_and_then_none_is_charged(store: redis.Redis) -> None:
    rates = ("requests_minute", 9, MINUTE_MS, "tokens_day", 100, DAY_MS)
    assert admit(store, "a", *rates, tokens=60, most=2) == ("admitted", 0, [8, 40])
    assert admit(store, "b", *rates, tokens=41, most=2)[0] == "rate"
    assert admit(store, "c", *rates, tokens=40, most=1)[0] == "jobs"
    assert admit(store, "d", *rates, tokens=40, most=2) == ("admitted", 0, [7, 0])


def test_a_job_is_admitted_once_however_often_its_sender_asks(producer: Client) -> None:
    rate = ("requests_day", 5, DAY_MS)
    for sent in (False, False, True):
        if sent:
            producer.submit(prompt="x", job_id="a")
        assert admit(producer.redis, "a", *rate) == ("admitted", 0, [4])


def ended(client: Client) -> None:
    (claim,) = take(client.redis)
    for _ in range(2):  # the first reply was lost
        assert finish(client.redis, claim, keep_s=0)


def cancelled(client: Client) -> None:
    assert cancel(client.redis, "a", SETTINGS) == "queued"


def withdrawn(client: Client) -> None:
    client.redis.hdel(keys.job("a"), "sent", "state")
    for _ in range(2):
        run_script(client.redis, "gateway/withdraw", ["a"], [PLACES])


def withdrawn_though_sent(client: Client) -> None:
    run_script(client.redis, "gateway/withdraw", ["a"], [PLACES])


@pytest.mark.parametrize("guess", [1, 50])
@pytest.mark.parametrize(
    ("end", "used"),
    [(ended, USED), (cancelled, 0), (withdrawn, 0), (withdrawn_though_sent, None)],
)
def test_the_end_of_a_job_corrects_what_was_reserved_for_it(
    producer: Client, end: Callable[[Client], None], used: int | None, guess: int
) -> None:
    rates = ("tokens_minute", 100, MINUTE_MS, "tokens_day", 1000, DAY_MS)
    assert admit(producer.redis, "a", *rates, tokens=guess)[2] == [100 - guess, 1000 - guess]
    producer.submit(prompt="x", job_id="a")
    end(producer)
    used = guess if used is None else used
    for rate in ("tokens_minute", "tokens_day"):
        assert float(producer.redis.hget(RATES, rate) or 0) == used


def test_what_no_limit_counts_any_more_is_forgotten(store: redis.Redis) -> None:
    admit(store, "a", "tokens_day", 10, DAY_MS, tokens=10)
    assert admit(store, "b", "requests_day", 10, DAY_MS)[0] == "admitted"
    assert store.hget(RATES, "tokens_day") is None
    assert 0 < store.ttl(RATES) <= 60
