"""What the fleet has to do, and what it can do."""

from __future__ import annotations

import os
import time

import pytest
import redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.figures.fleet import ModelLoad, read_fleet
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.recent_jobs import RecentJobs
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.messages.message import ENQUEUED_AT
from llorch_worker.broker.queues import route
from llorch_worker.broker.waiting.waiting import Queue
from llorch_worker.cli.fleet_reading import Reading
from llorch_worker.cli.fleet_tables import notices
from llorch_worker.client import Client
from tests.broker.steps import TERMS, announce, push, take
from tests.broker.test_maxmemory import fill
from tests.messages import QUEUE
from tests.store import add_letter, write_record


def announce_worker(
    store: redis.Redis, hostname: str, *, running: int, recent: RecentJobs | None = None
) -> None:
    card = WorkerCard(
        hostname=hostname,
        pid=os.getpid(),
        model="toy",
        max_context=4096,
        max_sequences=8,
        device="cpu",
        started_at=time.time(),
        last_seen=time.time(),
        engine={"running": running, "waiting": 0, "tokens_per_s": 10.0 * running},
        recent=recent or RecentJobs(),
    )
    registry.announce(store, card)


def only_model(store: redis.Redis) -> ModelLoad:
    [model] = read_fleet(store).models
    return model


def test_what_celery_does_after_a_jobs_end_asks_for_a_worker_where_none_lives(
    store: redis.Redis, client: Client
) -> None:
    """Else a chord whose last part is cancelled while autoscaling has no worker never goes on."""
    announce(store)
    push(store, "part", eta="2999-01-01T00:00:00+00:00")
    assert take(store) == []
    assert client.job("part").cancel()
    assert (only_model(store).work, only_model(store).waiting) == (1, 0)
    announce_worker(store, "w1@h", running=0)
    assert only_model(store).work == 0


def test_an_empty_redis_has_no_fleet(store: redis.Redis) -> None:
    found = read_fleet(store)
    assert (found.workers, found.models, found.dead_letters) == ([], [], 0)


def test_a_key_of_another_type_under_a_lists_name_hides_no_other_list(
    store: redis.Redis, producer: Client
) -> None:
    producer.submit(prompt="x")
    store.set(route("toy", "high").list_key, "x")
    queued = only_model(store).queues
    assert (queued["high"].jobs, queued["normal"].jobs) == (0, 1)


def test_jobs_are_counted_by_priority_and_the_oldest_known_is_timed(
    store: redis.Redis, producer: Client
) -> None:
    announce_worker(store, "gpu0@host", running=0)
    for _ in range(2):
        producer.submit(prompt="x", priority="high")
    producer.submit(prompt="x")
    push(store, "from a stock producer")
    store.lpush(queues.Route(QUEUE, 9).list_key, "of a stock producer")
    store.lpush(f"{QUEUE}:9", "of one with the separator in Celery's documentation")
    store.zadd(keys.scheduled("toy"), {"later": 0})
    seconds, _ = store.time()
    found = only_model(store)
    assert {name: queue.jobs for name, queue in found.queues.items()} == {
        "high": 2, "normal": 2, "low": 2,
    }  # fmt: skip
    assert (found.scheduled, found.waiting) == (1, 6)
    assert found.queues["low"] == Queue(jobs=2, oldest_s=None)
    # The clocks of this test and of Redis are one.
    for age in (found.queues["high"].oldest_s, found.queues["normal"].oldest_s):
        assert age is not None
        assert 0 <= age <= time.time() - seconds + 1


def test_the_next_job_of_a_priority_is_timed(store: redis.Redis, producer: Client) -> None:
    first = producer.submit(prompt="x").id
    producer.submit(prompt="x")
    seconds, _ = store.time()
    write_record(store, first, sent=int(seconds) - 3600)
    oldest_s = only_model(store).queues["normal"].oldest_s
    assert oldest_s == pytest.approx(3600, abs=60)


@pytest.mark.parametrize("time_text", ["1.2.3", ".", "1e9", "9" * 90, '"1"'])
def test_a_time_that_a_stranger_wrote_breaks_nothing(store: redis.Redis, time_text: str) -> None:
    announce(store)
    store.lpush(QUEUE, f'{{"headers": {{"{ENQUEUED_AT}": {time_text}, "id": "x"}}}}')
    found = only_model(store).queues["normal"]
    assert (found.jobs, found.oldest_s) in [(1, None), (1, 0.0)]


def test_jobs_of_a_worker_that_renews_no_lease_are_told(store: redis.Redis) -> None:
    announce(store)
    push(store, "a", "b", "c")
    assert len(take(store)) == 3
    assert only_model(store).orphaned == 0
    seconds, _ = store.time()
    for job_id in ("a", "b"):
        store.zadd(keys.LEASES, {job_id: 1000 * seconds + TERMS.lease_ms // 4})
    found = read_fleet(store)
    assert (found.models[0].orphaned, found.models[0].waiting) == (2, 0)
    # So that a fleet without workers starts one for them.
    assert found.models[0].work == 2
    said = [notice.plain for notice in notices(Reading(found, 0))]
    told = "2 jobs of a silent worker of toy: another worker takes over when the lease ends"
    assert told in said


def test_saturation_is_what_runs_and_waits_by_slots(store: redis.Redis) -> None:
    announce(store)
    push(store, "a", "b")
    assert only_model(store).saturation is None
    announce_worker(store, "gpu0@host", running=8)
    announce_worker(store, "gpu1@host", running=6)
    found = only_model(store)
    assert (found.workers, found.slots, found.running) == (2, 16, 14)
    assert found.saturation == 1.0


def test_the_figures_of_a_models_workers_add_up(store: redis.Redis) -> None:
    lately = RecentJobs(ended=3, failed=1, prompt_tokens=100, cached_tokens=50, e2e_ms={4: 2})
    for hostname in ("gpu0@host", "gpu1@host"):
        announce_worker(store, hostname, running=2, recent=lately)
    found = only_model(store)
    assert found.tokens_per_s == 40
    assert (found.recent.ended, found.recent.failed, found.recent.cache_hits) == (6, 2, 0.5)
    assert found.recent.e2e_ms == {4: 4}


def test_it_is_read_at_maxmemory(store: redis.Redis) -> None:
    announce(store)
    push(store, "a")
    add_letter(store, "a letter")
    fill(store)
    found = read_fleet(store)
    assert (found.models[0].waiting, found.dead_letters) == (1, 1)


def test_suspects_are_counted(store: redis.Redis) -> None:
    announce(store)
    push(store, "a", "b")
    for claim in take(store):
        claims.blame(store, claim, max_attempts=3, alone=False)
    push(store, "c")
    assert (only_model(store).suspects, only_model(store).waiting) == (2, 3)
