"""Large messages of stock producers: the watcher takes them, and no script copies one."""

from __future__ import annotations

import json
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.messages.message import head_of
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.contract import TASK_NAME
from tests.broker.steps import take
from tests.messages import QUEUE, envelope
from tests.store import follow_ups_in, message_of, record_of, waiting_ids, write_record

BODY: list[Any] = [[], {"prompt": "x" * 2**20, "max_tokens": 1}, {}]


def push(store: redis.Redis, job_id: str, body: Any = BODY, **headers: str) -> str:
    message = json.dumps(envelope(body, headers={"task": TASK_NAME, "id": job_id, **headers}))
    store.lpush(QUEUE, message)
    return message


def pops(store: redis.Redis) -> int:
    return int(store.info("commandstats").get("cmdstat_rpop", {}).get("calls", 0))


def look_to_the_end(store: redis.Redis) -> None:
    """Each look takes one large message."""
    while inbox_watch.look(store, "toy") is not None:
        pass
    assert store.keys(keys.staged("*")) == []


def test_a_large_message_waits_as_any_other_though_no_script_has_seen_it(
    store: redis.Redis,
) -> None:
    sent = {job_id: push(store, job_id, llorch_tenant="acme") for job_id in ("a", "b")}
    push(store, "small", body=[])
    before = pops(store)
    look_to_the_end(store)
    # Of the small one, and of the end of its list.
    assert pops(store) - before <= 2
    assert sorted(waiting_ids(store)) == ["a", "b", "small"]
    assert record_of(store, "a")["tenant"] == "acme"
    assert float(record_of(store, "a")["cost"]) > 2**20 / 4
    assert store.ttl(keys.message("a")) == -1
    claimed = {claim.job_id: claim.message.decode() for claim in take(store)}
    assert {job_id: claimed[job_id] for job_id in sent} == sent


def test_a_claim_leaves_large_messages_to_the_watcher_if_there_is_one(store: redis.Redis) -> None:
    lease = inbox_watch.lease(store, "toy")
    assert lease.take()
    push(store, "a")
    assert take(store) == []
    inbox_watch.look(store, "toy")
    assert [claim.job_id for claim in take(store)] == ["a"]
    lease.leave()
    push(store, "b")
    assert [claim.job_id for claim in take(store)] == ["b"]


def test_a_large_message_whose_body_names_its_job_is_taken_whole(store: redis.Redis) -> None:
    for number in range(2):
        body = {"task": TASK_NAME, "id": f"in the body {number}", "kwargs": BODY[1]}
        store.lpush(QUEUE, json.dumps(envelope(body, headers={})))
    look_to_the_end(store)
    assert len(waiting_ids(store)) == 2


@pytest.mark.parametrize("changes", [1, inbox_watch.MOST_TRIES])
def test_a_list_that_changes_meanwhile_loses_and_doubles_no_job(
    store: redis.Redis, changes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    push(store, "first")
    left = iter(range(changes))

    def read(raw: bytes) -> bytes | None:
        if (number := next(left, None)) is not None:
            push(store, f"later {number}", body=[])
        return head_of(raw)

    monkeypatch.setattr(inbox_watch, "head_of", read)
    look_to_the_end(store)
    later = [f"later {number}" for number in range(changes)]
    assert waiting_ids(store) == ["first", *later]
    assert "duplicates" not in record_of(store, "first")


def test_a_copy_of_a_large_message_changes_nothing(store: redis.Redis) -> None:
    push(store, "a")
    inbox_watch.look(store, "toy")
    push(store, "a")
    inbox_watch.look(store, "toy")
    assert waiting_ids(store) == ["a"]
    assert record_of(store, "a")["duplicates"] == "1"
    assert not store.exists(QUEUE)


def test_a_large_message_that_comes_after_its_cancel_is_kept_for_what_follows(
    store: redis.Redis,
) -> None:
    write_record(store, "a", state="ended")
    sent = push(store, "a")
    inbox_watch.look(store, "toy")
    assert waiting_ids(store) == []
    assert message_of(store, "a") == sent
    assert "a" in follow_ups_in(store)
