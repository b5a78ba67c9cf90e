"""What an older version left in Redis is found, and nothing of it is lost or done twice."""

from __future__ import annotations

import json

import pytest
import redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.jobs import follow_ups
from llorch_worker.broker.waiting import inbox_watch, older_version
from tests.broker.steps import note_seen, sweep, take
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.store import message_of, set_follow_ups, write_record

PLACE = queues.place_of("toy", "gpu0@host")
STEP = queues.STEP_SEPARATOR
TENANTS = f"llorch:tenants:{QUEUE}{STEP}t"


def message(job_id: str) -> str:
    return json.dumps(envelope(GOOD_BODY, headers={"id": job_id}))


def left_behind(store: redis.Redis, *lists: str) -> list[str]:
    ids = [f"job{number}" for number in range(len(lists))]
    for name, job_id in zip(lists, ids, strict=True):
        store.lpush(name, message(job_id))
    return ids


def test_jobs_of_every_list_are_moved_and_run_once(store: redis.Redis) -> None:
    note_seen(store, PLACE)
    store.hset(TENANTS, mapping={"acme": 2, "*": 1, "/acme": 1, "*turns": 3})
    ids = left_behind(
        store,
        f"{QUEUE}:suspects",
        f"{QUEUE}{STEP}t",
        f"{TENANTS}/acme",
        f"{QUEUE}:high{STEP}t",
        f"{QUEUE}{STEP}9t",
        PLACE,
        f"{PLACE}:high",
        f"{PLACE}{STEP}9",
        QUEUE,
    )
    # Some were claimed before, and came back.
    for job_id in ids[:2]:
        write_record(store, job_id, state="queued", attempts=1, fence=1, strikes=1, progress=0)
    assert older_version.move(store, "toy") == len(ids) - 1, "what is in its inbox stays"
    assert older_version.move(store, "toy") == 0
    inbox_watch.look(store, "toy")
    found = {claim.job_id: claim.list_key for claim in take(store, limit=20)}
    assert set(found) | {ids[1]} == set(ids), "two suspects do not run together"
    assert [job_id for job_id, name in found.items() if name == f"{QUEUE}:high"] == [ids[3], ids[6]]
    assert [job_id for job_id, name in found.items() if STEP in name] == [ids[4], ids[7]]
    assert not list(store.scan_iter("llorch:tenants:*"))


def test_jobs_that_wait_for_their_eta_do_so_here(store: redis.Redis) -> None:
    write_record(store, "a", state="scheduled", list=QUEUE, message=message("a"), attempts=0)
    store.zadd(f"{QUEUE}:scheduled", {"a": 5})
    assert older_version.move(store, "toy") == 1
    assert store.zscore(keys.scheduled("toy"), "a") == 5
    assert message_of(store, "a") == message("a")
    inbox_watch.look(store, "toy")
    assert [claim.job_id for claim in take(store)] == ["a"]


def test_jobs_of_dead_workers_and_what_follows_ends_go_on(store: redis.Redis) -> None:
    write_record(store, "ran", state="claimed", fence=5, list=QUEUE, message=message("ran"))
    store.zadd(keys.LEASES, {"ran": 1})
    write_record(store, "over", state="ended", fence=5, list=QUEUE, message=message("over"))
    set_follow_ups(store, {"over": 0})
    older_version.move(store, "toy")
    assert sweep(store) == ["ran"]
    assert [claim.message.decode() for claim in take(store)] == [message("ran")]
    (followed,) = follow_ups.take(store, 60)
    assert (followed.job_id, followed.message) == ("over", message("over"))


@pytest.mark.parametrize("moved", [True, False])
def test_a_job_that_its_worker_handed_back_goes_on(store: redis.Redis, moved: bool) -> None:
    # As every worker does that is stopped for the update. A client may look before a worker does.
    store.rpush(QUEUE, message("back"))
    write_record(store, "back", state="queued", attempts=1, fence=7, first_claim_ms=1, sent=1)
    if moved:
        older_version.move(store, "toy")
    inbox_watch.look(store, "toy")
    (claim,) = take(store)
    assert (claim.job_id, claim.attempt, claim.first) == ("back", 2, False)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (f"{QUEUE}{STEP}9", f"{QUEUE}{STEP}9"),
        (PLACE, QUEUE),
        (f"{PLACE}:high", f"{QUEUE}:high"),
        (f"{PLACE}{STEP}9", f"{QUEUE}{STEP}9"),
        (f"{QUEUE}:suspects", QUEUE),
        (f"{QUEUE}{STEP}t", QUEUE),
        (f"{QUEUE}:high{STEP}t", f"{QUEUE}:high"),
        (f"{QUEUE}{STEP}9t", f"{QUEUE}{STEP}9"),
        (f"llorch:tenants:{QUEUE}{STEP}9t/acme", f"{QUEUE}{STEP}9"),
        (f"llorch:tenants:{PLACE}:high{STEP}t/acme", f"{QUEUE}:high"),
    ],
)
def test_jobs_that_ran_or_have_an_eta_come_back_where_workers_look(
    store: redis.Redis, old: str, new: str
) -> None:
    for job_id, state in (("ran", "claimed"), ("due", "scheduled")):
        write_record(store, job_id, state=state, fence=5, list=old, message=message(job_id))
    store.zadd(keys.LEASES, {"ran": 1})
    store.zadd(f"{QUEUE}:scheduled", {"due": 5})
    older_version.move(store, "toy")
    assert sweep(store) == ["ran"]
    inbox_watch.look(store, "toy")
    assert {claim.job_id: claim.list_key for claim in take(store)} == {"ran": new, "due": new}


def test_jobs_of_other_models_are_left_to_their_workers(store: redis.Redis) -> None:
    for name in ("llorch.other", "llorch.toys@gpu0.host"):
        write_record(store, name, state="claimed", fence=5, list=name, message=message(name))
        store.zadd(keys.LEASES, {name: 1})
    older_version.move(store, "toy")
    for name in ("llorch.other", "llorch.toys@gpu0.host"):
        assert store.hget(keys.job(name), "message") == message(name)


@pytest.mark.parametrize("field", ["takes_direct_jobs", "tenant_weights"])
def test_workers_of_an_older_version_are_named_while_they_live(
    store: redis.Redis, field: str
) -> None:
    note_seen(store, PLACE)
    store.set(keys.worker(PLACE), json.dumps({"hostname": "gpu0@host", field: ""}))
    found = older_version.living(store, "toy")
    expected = "1 worker of an older version of this package still serves toy; stop them first"
    assert found is None if field == "tenant_weights" else expected in (found or "")


def test_somebodys_keys_in_the_way_are_left_alone(store: redis.Redis) -> None:
    store.set(f"{QUEUE}:suspects", "somebody's")
    store.set(f"{QUEUE}:scheduled", "somebody's")
    assert older_version.move(store, "toy") == 0
    assert store.get(f"{QUEUE}:suspects") == "somebody's"
