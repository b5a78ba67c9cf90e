"""The jobs that run and wait, as a page of them is shown."""

from __future__ import annotations

from redis import Redis

from llorch_worker.broker import keys, scripts
from llorch_worker.broker.figures.listed_jobs import Listing, listed_jobs
from llorch_worker.broker.jobs import journal
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.waiting import position
from llorch_worker.client import Client
from llorch_worker.contract import Started, Tokens
from tests.broker.steps import announce, push, take


def ids(found: Listing) -> list[str]:
    return [job.id for job in found.jobs]


def test_a_filter_finds_a_job_behind_more_of_others_than_are_listed(producer: Client) -> None:
    for _ in range(3):
        producer.submit(prompt="x")
    own = producer.submit(prompt="x", owner="key").id
    found = listed_jobs(producer.redis, 2, owner="key")
    assert ids(found) == [own]
    assert found.whole


def test_those_that_run_come_first_and_then_those_that_are_claimed_next(producer: Client) -> None:
    store = producer.redis
    runs = producer.submit(prompt="secret", tenant="acme").id
    (claim,) = take(store, limit=1, worker="gpu0@h")
    waiting = [
        producer.submit(prompt="secret", priority=priority, tenant=tenant, owner=owner).id  # type: ignore[arg-type]
        for priority, tenant, owner in (
            ("low", None, ""), ("normal", None, ""), ("normal", "acme", "key"),
            ("normal", "acme", ""), ("high", None, ""),
        )
    ]  # fmt: skip
    with store.pipeline() as pipe:
        scripts.load(store, "append")
        events = (
            Started(worker="gpu0@h", model="toy", prompt_tokens=1, queue_ms=0),
            Tokens(index=0, ids=(1, 2), text="secret"),
            Tokens(index=2, ids=(3,), text="secret"),
        )
        journal.queue_append(pipe, claim, 1, events)
        pipe.execute()
    found = listed_jobs(store, 50)
    low, first, second, third, high = waiting
    assert ids(found) == [runs, high, first, second, third, low]
    assert (found.running, found.waiting, found.scheduled, found.whole) == (1, 5, 0, True)
    running, urgent, *_ = found.jobs
    assert (running.state, running.worker, running.tokens) == ("running", "gpu0@h", 3)
    assert (running.tenant, running.model, running.attempts) == ("acme", "toy", 1)
    assert (urgent.state, urgent.priority, urgent.place) == ("waiting", "high", 1)
    for job in found.jobs[1:]:
        known = position(store, job.id)
        assert known is not None
        assert job.place == known.place
        assert job.age_s is not None
    assert "secret" not in found.model_dump_json()
    assert ids(listed_jobs(store, 2)) == [runs, high]
    assert ids(listed_jobs(store, 9, states=["waiting"])) == [high, first, second, third, low]
    assert ids(listed_jobs(store, 9, states=["running"])) == [runs]
    assert ids(listed_jobs(store, 9, tenant="acme")) == [runs, second, third]
    assert (
        ids(listed_jobs(store, 9, tenant="key"))
        == ids(listed_jobs(store, 9, owner="key"))
        == [second]
    )
    assert ids(listed_jobs(store, 9, worker="gpu0@h")) == [runs]
    assert ids(listed_jobs(store, 9, model="other")) == []
    assert ids(listed_jobs(store, 9, ids=[third, "unknown"])) == [third]


def test_a_stock_producers_jobs_and_strange_messages_are_listed_as_far_as_they_say_who_they_are(
    store: Redis,
) -> None:
    announce(store)
    push(store, "stock", 'evil"}\x1b')
    store.lpush("llorch.toy", b"\xff no message", "[]")
    store.execute_command("LPUSH", "llorch.toy", b'{"headers": {"id": "a\xff\x01b"}}')
    for job_id, event in {
        "odd": "no json",
        "odder": "[]",
        "oddest": '{"index": "x", "ids": {}}',
    }.items():
        store.hset(keys.job(job_id), "state", "claimed")
        store.zadd(keys.LEASES, {job_id: 1})
        store.xadd(keys.events(job_id), {"event": event})
    assert listed_jobs(store, 9).waiting == 5
    inbox_watch.look(store, "toy")
    found = listed_jobs(store, 9)
    assert found.waiting == 5
    assert [job.tokens for job in found.jobs if job.id.startswith("odd")] == [0, 0, 0]
    assert "stock" in ids(found)
    (job,) = (each for each in found.jobs if each.id == "stock")
    assert (job.model, job.priority, job.tenant, job.place) == ("toy", "normal", "", 1)


def test_of_very_many_only_the_first_are_looked_at(producer: Client) -> None:
    store = producer.redis
    push(store, *(f"stock{number}" for number in range(2_500)))
    while inbox_watch.look(store, "toy") is not None:
        pass
    late = producer.submit(prompt="x", tenant="acme").id
    found = listed_jobs(store, 50)
    assert (len(found.jobs), found.waiting) == (50, 2_501)
    assert late in ids(found), "tenants have fair shares"
