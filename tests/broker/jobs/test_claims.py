"""What a claim tells those who look at the job, and the worker; and what its end brings."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import patch

import pytest
import redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.jobs import claims, dead_letters, follow_ups
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest
from llorch_worker.broker.jobs.results import decode_state
from llorch_worker.broker.messages.message import TENANT, read_envelope
from llorch_worker.broker.scripts import as_bytes, run_script
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.waiting import waiting
from llorch_worker.contract import TASK_NAME, InternalError
from tests.broker.steps import (
    DAYS_S,
    SETTINGS,
    TERMS,
    announce,
    dying_after,
    look,
    note_seen,
    push,
    sweep,
    take,
)
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.store import (
    add_entry,
    entries_of,
    follow_ups_in,
    leases_in,
    letters_in,
    record_of,
    set_follow_ups,
    set_leases,
    stored_result,
    ttls,
    waiting_ids,
    write_record,
)


def take_one(store: redis.Redis, **headers: str | None) -> Claim:
    push(store, "a", **headers)
    (claim,) = take(store)
    return claim


def finish(store: redis.Redis, claim: Claim, first_entry: int, *events: str) -> int:
    stored: int = run_script(
        store,
        "finish",
        ["a", claim.fence, "{}", 60, "end", 60, "", "", first_entry, *events],
    )
    return stored


def entries(store: redis.Redis) -> list[tuple[str, str]]:
    return entries_of(store, "a")


@pytest.mark.parametrize("eta", [{}, {"eta": None}], ids=["none", "null"])
def test_a_claimed_job_is_started_at_its_worker(
    store: redis.Redis, eta: dict[str, str | None]
) -> None:
    take_one(store, **eta)
    state = decode_state(stored_result(store, "a"))
    assert (state.status, state.worker) == ("STARTED", "w@h")
    assert ttls(store, "a")[1] == -1, "it stays until the job ends"


def test_a_claim_reports_an_earlier_cancel(store: redis.Redis) -> None:
    held = take_one(store)
    assert not held.cancelled
    assert cancel(store, "a", SETTINGS) == "running"
    claims.hand_back(store, held)
    (again,) = take(store)
    assert again.cancelled


def test_a_claim_without_a_cancel_is_not_cancelled(store: redis.Redis) -> None:
    assert not take_one(store).cancelled


def test_a_result_writes_the_missing_entries_once(store: redis.Redis) -> None:
    claim = take_one(store)
    add_entry(store, "a", "first", "1-0")
    add_entry(store, "a", "second", "2-0")
    assert finish(store, claim, 2, "second", "third") == 1
    assert finish(store, claim, 2, "second", "third") == 1, "as if the first reply was lost"
    assert entries(store) == [
        ("1-0", "first"), ("2-0", "second"), ("3-0", "third"), ("4-0", "end"),
    ]  # fmt: skip


def test_a_result_under_a_lost_claim_writes_nothing(store: redis.Redis) -> None:
    claim = take_one(store)
    store.hincrby(keys.job("a"), "fence", 1)
    assert finish(store, claim, 1, "first") == 0
    assert entries(store) == []


def test_an_entry_without_a_job_is_logged_by_its_size_alone(
    store: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store.lpush(QUEUE, "a secret", "{}")
    push(store, "a")
    assert [claim.job_id for claim in take(store)] == ["a"]
    store.lpush(QUEUE, "17")
    assert look(store).look_again_s == 0, "there may be more"
    assert [line.partition(";")[0] for line in caplog.messages] == [
        "refused 2 entries of 10 bytes without a job id",
        "refused an entry of 2 bytes without a job id",
    ]


def test_a_queue_of_junk_is_logged_in_few_lines(
    store: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    store.lpush(QUEUE, *(f"junk {number:04}" for number in range(1_000)))
    while store.llen(QUEUE):
        assert take(store, limit=100) == []
    assert len(letters_in(store)) == 1_000
    assert {line.partition(";")[0] for line in caplog.messages} == {
        "refused 64 entries of 576 bytes without a job id",
        "refused 40 entries of 360 bytes without a job id",
    }
    store.delete(keys.call(queues.place_of("toy", "w@h")))  # expires soon
    left = {keys.DEAD, keys.LETTERS, keys.LETTERS_HELD, keys.shares("toy")}
    assert set(store.scan_iter("*")) == left, "nothing else is left of them"


def test_a_job_without_attempts_left_is_logged_by_its_id(
    store: redis.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    lapsed = replace(TERMS, lease_ms=-1, max_deaths=1)
    push(store, "a")
    assert take(store, lapsed)
    assert sweep(store) == ["a"]
    assert not caplog.messages
    assert not take(store, lapsed)
    (line,) = caplog.messages
    assert line.startswith("job a is a dead letter: 3 attempts without progress, or 1 in all, end")


def test_a_claim_that_a_failover_forgot_cannot_write_beside_the_next_one(
    store: redis.Redis,
) -> None:
    forgotten = take_one(store)
    # A promoted replica, or an append-only file without its last second, knows no record of it.
    store.delete(keys.job("a"), keys.LEASES)
    next_one = take_one(store)
    assert next_one.fence != forgotten.fence
    assert claims.renew(store, [forgotten], lease_ms=1000) == [forgotten]
    assert not claims.hand_back(store, forgotten)
    assert claims.end(store, next_one, TERMS)


def test_a_job_that_redis_lost_is_restored_once_and_is_no_new_job(store: redis.Redis) -> None:
    lost = take_one(store)
    store.flushall()
    assert claims.restore(store, lost)
    assert not claims.restore(store, lost)
    (again,) = take(store)
    assert again.message == lost.message
    assert again.fence > lost.fence
    assert (again.attempt, again.first) == (1, False)


@pytest.mark.parametrize("end", [True, False])
def test_a_job_that_redis_knows_is_not_restored(store: redis.Redis, end: bool) -> None:
    claim = take_one(store)
    if end:
        claims.fail(store, claim, InternalError("the end"), TERMS)
    assert not claims.restore(store, claim)
    assert not take(store)


def test_a_copy_beside_a_restored_job_is_dropped(store: redis.Redis) -> None:
    lost = take_one(store)
    # A stock producer's message came back with older data, in which no worker had claimed it.
    store.flushall()
    push(store, "a")
    assert claims.restore(store, lost)
    assert [claim.job_id for claim in take(store)] == ["a"]


def test_the_first_state_of_a_job_expires_if_it_is_the_last(store: redis.Redis) -> None:
    # As of a chord's body, whose parts failed: nobody has claimed it.
    assert run_script(store, "finish", ["body", "", "{}", 60, "end", 60, ""]) == 1
    assert 0 < store.ttl(keys.result("body")) <= 60


def test_an_acknowledgement_after_the_end_leaves_the_message_to_what_follows(
    store: redis.Redis,
) -> None:
    claim = take_one(store)
    arguments: list[Any] = ["a", claim.fence, "{}", 60, "end", 60, 60_000]
    assert run_script(store, "finish", arguments) == 1
    # The reply was lost, so the worker does not know that the job has ended.
    claims.end(store, claim, TERMS)
    set_follow_ups(store, {"a": 0})
    ((job_id, message, *_),) = follow_ups.take(store, 60)
    assert (job_id, message) == ("a", claim.message.decode())
    assert ttls(store, "a")[0] == -1


def test_what_follows_an_end_is_due_in_time_after_the_clock_was_set_back(
    store: redis.Redis,
) -> None:
    for job_id, lease_ms in (("short", 60_000), ("long", 600_000)):
        push(store, job_id)
        (claim,) = take(store, replace(TERMS, lease_ms=lease_ms))
        assert run_script(store, "finish", [job_id, claim.fence, "{}", 60, "end", 60, lease_ms])
    due = follow_ups_in(store)
    # As after TIME went back by an hour.
    set_follow_ups(store, {job_id: due_ms + 3_600_000 for job_id, due_ms in due.items()})
    assert follow_ups.take(store, 60) == []
    shortened = follow_ups_in(store)
    for job_id, due_ms in due.items():
        assert due_ms <= shortened[job_id] <= due_ms + 60_000


def test_a_key_reserved_under_a_lost_claim_stays_until_the_job_ends(store: redis.Redis) -> None:
    claim = take_one(store)
    claims.hand_back(store, claim)
    key = keys.idempotency("toy", "k")
    assert run_script(store, "reserve_key", ["a", 60], [key]) == "a"
    assert store.ttl(key) == -1
    (again,) = take(store)
    assert store.ttl(key) == -1
    assert claims.end(store, again, TERMS)
    assert store.ttl(key) > 0


def test_a_claim_leaves_redis_time_for_others_whatever_it_drops(store: redis.Redis) -> None:
    document = json.dumps(envelope({"prompt": "x" * 1_000_000}, headers={"id": "dropped"}))
    write_record(store, "dropped", state="ended", list=QUEUE)
    for _ in range(20):
        store.lpush(QUEUE, document)
    push(store, "a")
    first = look(store)
    assert (first.claims, first.look_again_s) == ([], 0)
    assert store.llen(QUEUE) > 10, "parsing all of them would take too long"
    looks = 1
    while not (taken := look(store).claims):
        looks += 1
    assert [claim.job_id for claim in taken] == ["a"]
    assert looks < 20


def snapshot(store: Any) -> dict[str, bytes]:
    """What Redis holds, as a copy of its data would bring it back."""
    return {key: as_bytes(store.dump(key)) for key in store.scan_iter("*")}


def bring_back(store: redis.Redis, kept: dict[str, bytes]) -> None:
    store.flushall()
    for key, value in kept.items():
        store.restore(key, 0, value)


@pytest.mark.parametrize("ahead_s", [0, 3_600], ids=["clock right", "clock behind"])
def test_a_claim_after_the_return_of_an_older_state_has_a_fence_that_nobody_believes_in(
    store: redis.Redis, ahead_s: int
) -> None:
    # As a master with another clock left it.
    push(store, "a")
    seconds, _ = store.time()
    inbox_watch.look(store, "toy")
    write_record(store, "a", fence=(seconds + ahead_s) * 10**6)
    older = snapshot(store)
    believed = set()
    for _ in range(10):
        bring_back(store, older)
        (claim,) = take(store)
        believed.add(claim.fence)
        assert claims.renew(store, [claim], lease_ms=1_000) == []
        # Lost, and claimed by another worker before the data is gone.
        assert claims.hand_back(store, claim)
        (claim,) = take(store)
        believed.add(claim.fence)
    assert len(believed) == 20


def test_a_lost_claim_that_brings_its_job_back_is_not_taken_for_the_next_ones(
    store: redis.Redis,
) -> None:
    push(store, "a")
    seconds, _ = store.time()
    inbox_watch.look(store, "toy")
    write_record(store, "a", fence=(seconds + 3_600) * 10**6)
    (lost,) = take(store)
    set_leases(store, {"a": 1})
    assert sweep(store) == ["a"]
    (held,) = take(store, worker="other@h")
    for _ in range(3):
        store.flushall()
        assert claims.restore(store, lost)
        (lost,) = take(store, worker="third@h")
        assert claims.renew(store, [held], lease_ms=1_000) == [held]


BODY_ONLY = json.dumps(envelope({"id": "Zürich", "task": TASK_NAME}, headers={}))


@pytest.mark.parametrize(
    ("message", "job_id"),
    [
        (json.dumps(envelope(GOOD_BODY, headers={"id": "Zürich"}), ensure_ascii=False), "Zürich"),
        (json.dumps(envelope(GOOD_BODY, headers={"id": "a", "x": "half \ud83d"})), "a"),
        (json.dumps(envelope(GOOD_BODY, headers={"task": TASK_NAME})), "raw"),
        (BODY_ONLY, "Zürich"),
    ],
    ids=["not ASCII", "half a pair", "correlation id", "protocol 1"],
)
def test_a_message_that_lua_cannot_read_is_read_by_python_at_no_cost_of_attempts(
    store: redis.Redis, message: str, job_id: str
) -> None:
    store.lpush(QUEUE, message)
    request = ClaimRequest("toy", queues.queues("toy"), limit=5, worker="w@h")
    first, second = (claims.claim(store, request, TERMS) for _ in range(2))
    assert (first.claims, first.look_again_s) == ([], 0)
    (claim,) = second.claims
    assert (claim.job_id, claim.attempt, claim.first, claim.list_key) == (job_id, 1, True, QUEUE)
    read = read_envelope(claim.message, 2**20)
    assert read["payload"][1] == ({} if message == BODY_ONLY else GOOD_BODY[1])
    assert [key for key in store.scan_iter("*") if "unread" in key] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"body": json.dumps(GOOD_BODY)},
        {"body": '", "headers": {"id": "forged"}, "x": "'},
        {"body": None},
        {"body": {"body": "x", "id": "forged"}},
        {"headers": {"body": "x", "id": "a"}},
        {"headers": {"x": {"body": "", "id": "forged"}, "id": "a", "body": '\\"'}},
    ],
    ids=str,
)
def test_the_id_is_that_of_the_headers_whatever_the_body_is(
    store: redis.Redis, changes: dict[str, Any]
) -> None:
    message = envelope(GOOD_BODY, headers={"id": "a"}) | changes
    for order in (list(message), sorted(message, reverse=True)):
        store.flushall()
        store.lpush(QUEUE, json.dumps({name: message[name] for name in order}))
        assert [claim.job_id for claim in take(store)] == ["a"]


def test_a_message_that_lua_cannot_read_outlives_the_worker_that_took_it(
    store: redis.Redis,
) -> None:
    store.lpush(QUEUE, BODY_ONLY)
    with dying_after("claim"), suppress(redis.ConnectionError):
        take(store)
    assert store.llen(QUEUE) == 0
    set_leases(store, dict.fromkeys(leases_in(store), 1))
    assert len(sweep(store)) == 1
    assert take(store) == []
    assert [claim.job_id for claim in take(store)] == ["Zürich"]


def test_bytes_that_are_not_utf_8_stop_no_reader(store: redis.Redis) -> None:
    raw = json.dumps(envelope(GOOD_BODY, headers={"id": "a", "x": "@"})).encode()
    store.lpush(QUEUE, raw.replace(b"@", b"\xff"))
    assert cancel(store, "a", SETTINGS, heard_by="toy") == "queued"
    assert take(store) == []
    (followed,) = follow_ups.take(store, 60)
    assert followed.job_id == "a"
    store.flushall()
    store.lpush(QUEUE, raw.replace(b"@", b"\xff"))
    lapsed = replace(TERMS, lease_ms=-1, max_deaths=1)
    assert take(store, lapsed)
    assert sweep(store) == ["a"]
    assert not take(store, lapsed)
    (letter,) = dead_letters.letters(store)
    assert (letter.id, letter.body(2**20)) == ("a", GOOD_BODY)
    assert dead_letters.retry(store, letter) == "retried"


def call_of(worker: str = "w@h", limit: int = 10) -> ClaimRequest:
    return ClaimRequest("toy", queues.queues("toy"), limit, worker)


def lose_reply(store: redis.Redis, request: ClaimRequest) -> ClaimRequest:
    """Redis runs the claim, and its caller hears nothing; the call to send again."""
    real = claims.run_script

    def run(client: redis.Redis, name: str, *args: Any) -> Any:
        real(client, name, *args)
        raise redis.ConnectionError

    with patch.object(claims, "run_script", run), pytest.raises(redis.ConnectionError):
        claims.claim(store, request, TERMS)
    return replace(request, sent_before=True)


def test_a_claim_whose_reply_was_lost_gives_the_same_jobs_again(store: redis.Redis) -> None:
    push(store, *(f"job{number}" for number in range(3)))
    call = lose_reply(store, call_of(limit=2))
    state = {job_id: store.hgetall(keys.job(job_id)) for job_id in ("job0", "job1")}
    for _ in range(2):  # that reply may be lost, too
        found = claims.claim(store, call, TERMS)
        assert [claim.job_id for claim in found.claims] == ["job0", "job1"]
        assert [str(claim.fence) for claim in found.claims] == [
            each["fence"] for each in state.values()
        ]
        assert found.look_again_s == 0
    assert all(claim.first and claim.attempt == 1 for claim in found.claims)
    assert {job_id: store.hgetall(keys.job(job_id)) for job_id in state} == state
    assert [claim.job_id for claim in take(store)] == ["job2"]
    assert claims.end(store, found.claims[0], TERMS)


def test_a_job_whose_message_is_gone_is_left_out_when_its_call_is_sent_again(
    store: redis.Redis,
) -> None:
    push(store, "whole", "damaged")
    call = lose_reply(store, call_of())
    store.delete(keys.message("damaged"))
    assert [claim.job_id for claim in claims.claim(store, call, TERMS).claims] == ["whole"]


def test_what_happened_to_a_job_since_its_claims_reply_was_lost_is_seen(store: redis.Redis) -> None:
    push(store, "swept", "cancelled", "again")
    for claim in reversed(take(store)):
        claims.hand_back(store, claim)
    call = lose_reply(store, call_of())
    store.zadd(keys.LEASES, {"swept": 0})
    assert sweep(store) == ["swept"]
    cancel(store, "cancelled", SETTINGS)
    found = {claim.job_id: claim for claim in claims.claim(store, call, TERMS).claims}
    assert {job_id: claim.cancelled for job_id, claim in found.items()} == {
        "cancelled": True,
        "again": False,
    }
    assert not any(claim.first for claim in found.values())
    assert [claim.job_id for claim in take(store)] == ["swept"]


@pytest.mark.parametrize("message", ["eta", "raw"])
def test_a_job_that_must_go_back_does_so_when_its_call_is_sent_again(
    store: redis.Redis, message: str
) -> None:
    if message == "eta":
        push(store, "a", eta=(datetime.now(UTC) + timedelta(hours=1)).isoformat())
    else:
        store.lpush(QUEUE, BODY_ONLY)
    call = lose_reply(store, call_of())
    assert claims.claim(store, call, TERMS).claims == []
    assert not store.zcard(keys.LEASES)
    assert store.zcard(keys.scheduled("toy")) + store.zcard(keys.waiting("toy")) == 1


@pytest.mark.parametrize("others", [0, 1])
def test_a_call_that_never_arrived_claims_when_it_is_sent_again(
    store: redis.Redis, others: int
) -> None:
    push(store, "a", "b")
    earlier = claims.claim(store, call_of(limit=others), TERMS).claims if others else []
    found = claims.claim(store, replace(call_of(), sent_before=True), TERMS).claims
    assert [claim.job_id for claim in [*earlier, *found]] == ["a", "b"]
    assert store.pttl(keys.call(queues.place_of("toy", "w@h"))) > 0


@pytest.mark.parametrize("waits", [False, True])
def test_a_claim_of_large_messages_whose_reply_was_lost_gives_them_again(
    store: redis.Redis, waits: bool
) -> None:
    text = "x" * keys.APART_BYTES
    push(store, "a", "b", note=text)
    if waits:
        inbox_watch.look(store, "toy")
    call = lose_reply(store, call_of())
    for _ in range(2):
        found = claims.claim(store, call, TERMS).claims
        assert [(claim.job_id, text in claim.message.decode()) for claim in found] == [
            ("a", True),
            ("b", True),
        ]


def test_a_claim_that_loses_redis_amid_its_large_messages_gives_all_again(
    store: redis.Redis,
) -> None:
    push(store, "a", "b", note="x" * keys.APART_BYTES)
    real = claims._large_message
    call = call_of()

    def read(client: redis.Redis, job_id: str) -> bytes:
        if job_id == "b":
            raise redis.ConnectionError
        return real(client, job_id)

    with patch.object(claims, "_large_message", read), pytest.raises(redis.ConnectionError):
        claims.claim(store, call, TERMS)
    found = claims.claim(store, replace(call, sent_before=True), TERMS).claims
    assert [(claim.job_id, claim.attempt) for claim in found] == [("a", 1), ("b", 1)]


def test_a_claim_leaves_large_messages_that_would_take_it_long_to_read(store: redis.Redis) -> None:
    """Their leases would lapse before the worker holds the jobs."""
    push(store, "a", "b", "c", "d", note="x" * 2**21)
    while inbox_watch.look(store, "toy") is not None:
        pass
    taken = look(store)
    assert ([claim.job_id for claim in taken.claims], taken.look_again_s) == (["a", "b"], 0)
    assert [claim.job_id for claim in take(store)] == ["c", "d"]


def test_a_claim_whose_large_message_somebody_deletes_is_left_to_lapse(store: redis.Redis) -> None:
    push(store, "a", "b", note="x" * keys.APART_BYTES)
    real = claims.run_script

    def run(client: redis.Redis, name: str, *args: Any) -> Any:
        reply = real(client, name, *args)
        store.delete(keys.message("a"))
        return reply

    with patch.object(claims, "run_script", run):
        assert [claim.job_id for claim in take(store)] == ["b"]
    set_leases(store, {"a": 0})
    assert sweep(store) == ["a"]
    assert take(store) == []
    assert waiting_ids(store) == []


def test_a_dead_letter_keeps_a_large_message(store: redis.Redis) -> None:
    text = "x" * keys.APART_BYTES
    push(store, "a", note=text)
    terms = replace(TERMS, max_deaths=1)
    take(store, terms)
    set_leases(store, {"a": 0})
    sweep(store)
    assert take(store, terms) == []
    (letter,) = letters_in(store)
    assert text in json.loads(letter)["message"]


def test_a_new_process_under_a_workers_name_gets_no_claims_of_the_old_one(
    store: redis.Redis,
) -> None:
    push(store, "a")
    lose_reply(store, call_of())
    assert claims.claim(store, replace(call_of(), sent_before=True), TERMS).claims == []


def test_a_job_that_comes_while_none_waits_is_claimed_without_waiting(store: redis.Redis) -> None:
    push(store, "a", "b")
    assert [claim.job_id for claim in take(store, limit=1)] == ["a"]
    assert waiting_ids(store) == ["b"]
    push(store, "c")
    assert [claim.job_id for claim in take(store, limit=2)] == ["b", "c"]


def test_a_tenant_of_a_stock_producer_has_a_name_as_long_as_a_request_may_give(
    store: redis.Redis,
) -> None:
    longest = "t" * 100
    push(store, "a", **{TENANT: longest})
    push(store, "b", **{TENANT: longest + "t"})
    inbox_watch.look(store, "toy")
    assert [record_of(store, job_id)["tenant"] for job_id in "ab"] == [longest, ""]


def test_a_call_claims_from_the_queues_of_its_model_alone(store: redis.Redis) -> None:
    push(store, "a")
    both = (*queues.queues("other"), *queues.queues("toy"))
    found = claims.claim(store, ClaimRequest("other", both, limit=3, worker="w@h"), TERMS)
    assert found.claims == []
    found = claims.claim(store, ClaimRequest("toy", both, limit=3, worker="w@h"), TERMS)
    assert [claim.job_id for claim in found.claims] == ["a"]


def unfit(store: redis.Redis, count: int, **fields: str | int) -> None:
    """Lets so many jobs wait at the head, with these ``fields`` in their records."""
    names = [f"unfit-{number}" for number in range(count)]
    push(store, *names)
    while inbox_watch.look(store, "toy") is not None:
        pass
    for name in names:
        write_record(store, name, **fields)
    note_context(store, 512)


def note_context(store: redis.Redis, context: int, ago_s: float = -DAYS_S) -> None:
    """As if a worker with this context had been seen last so long ago."""
    seconds, _ = store.time()
    store.zadd(keys.contexts("toy"), {context: (seconds - ago_s) * 1e3})


def search(store: redis.Redis, **options: Any) -> tuple[int, list[str]]:
    """How many calls a worker makes until it has no more reason to look at once, and what it
    claimed."""
    request = ClaimRequest("toy", queues.queues("toy"), 10, "w@h", max_context=256, **options)
    found: list[str] = []
    for calls in range(1, 100):
        taken = claims.claim(store, replace(request, call=str(calls)), TERMS)
        found += [claim.job_id for claim in taken.claims]
        if taken.look_again_s != 0:
            return calls, found
    raise AssertionError("it looks for ever")


@pytest.mark.parametrize("needs", ["least_context", "needs_fingerprint"])
def test_jobs_that_a_worker_cannot_take_hide_none_behind_them(
    store: redis.Redis, needs: str
) -> None:
    place = queues.place_of("toy", "other@h")
    note_seen(store, place, ago_s=-DAYS_S)
    store.set(keys.worker(place), '{"fingerprint":"512"}')
    unfit(store, 1_500, **{needs: "512"})
    push(store, "fits")
    calls, found = search(store)
    assert found == ["fits"]
    assert calls > 2, "a call reads no more than a bound"
    push(store, "next")
    assert search(store)[1] == ["next"], "found where the search stopped"
    # As if a scheduled job with an early score came back.
    push(store, "early")
    inbox_watch.look(store, "toy")
    store.zadd(keys.waiting("toy"), {"early": store.zscore(keys.waiting("toy"), "unfit-800") - 1})
    store.delete(*store.keys(keys.searched("*")))  # it expires
    assert search(store)[1] == ["early"]
    assert store.zcard(keys.waiting("toy")) == 1_500


def test_a_job_waits_some_minutes_for_a_larger_context_and_then_goes_to_any_worker(
    store: redis.Redis,
) -> None:
    unfit(store, 1, least_context=512)
    note_context(store, 512, ago_s=registry.AWAITED_S - 60)
    note_context(store, 1024, ago_s=registry.AWAITED_S + 1)
    assert search(store)[1] == []
    note_context(store, 512, ago_s=registry.AWAITED_S + 1)
    note_context(store, 511, ago_s=0)
    assert search(store)[1] == ["unfit-0"], "its engine refuses it"


def test_a_job_whose_model_has_no_room_for_it_any_more_goes_to_another_model_that_has(
    store: redis.Redis,
) -> None:
    place = queues.place_of("toy", "other@h")
    note_seen(store, place, ago_s=-DAYS_S)
    unfit(store, 1, needs_fingerprint="a", least_context=200)
    store.set(keys.worker(place), '{"fingerprint":"a","max_context":200}')
    assert search(store, fingerprint="b")[1] == []
    store.set(keys.worker(place), '{"fingerprint":"a","max_context":199}')
    assert search(store, fingerprint="b")[1] == ["unfit-0"]


def test_a_search_does_not_prolong_what_is_known_of_other_callers_searches(
    store: redis.Redis,
) -> None:
    unfit(store, 1_500, least_context=512)
    search(store, fingerprint="a")
    # As if that search had stopped before the other begins.
    (known,) = store.keys(keys.searched("*"))
    store.pexpire(known, 10**7)
    search(store, fingerprint="b")
    assert store.pttl(known) > 10**6, "it expires with its own search"


def test_suspects_that_a_worker_cannot_take_now_hide_none_behind_them(store: redis.Redis) -> None:
    unfit(store, 1_500, strikes=1)
    push(store, "fits")
    (held, *_) = take(store, limit=1)
    assert held.suspect
    assert search(store, held=(held,))[1] == ["fits"]


def test_low_jobs_that_a_worker_cannot_take_delay_no_high_ones(store: redis.Redis) -> None:
    unfit(store, 600, least_context=512, came_ms=1)
    for name, score in store.zrange(keys.waiting("toy"), 0, -1, withscores=True):
        store.zadd(keys.waiting("toy"), {name: score + keys.SCORES_A_CLASS})
    store.lpush(queues.queues("toy")[0], json.dumps(envelope(GOOD_BODY, headers={"id": "high"})))
    push(store, "normal")
    assert search(store)[1] == ["high", "normal"]


@pytest.mark.parametrize("suffix", ["message", "cancel"])
def test_a_job_may_have_the_id_of_another_and_a_suffix(store: redis.Redis, suffix: str) -> None:
    for job_id in (f"a:{suffix}", "a"):
        push(store, job_id)
        inbox_watch.look(store, "toy")
    first, second = take(store)
    assert (first.job_id, second.job_id) == (f"a:{suffix}", "a")
    assert cancel(store, "a", SETTINGS) == "running"
    for claim in (first, second):
        assert claims.hand_back(store, claim)
    assert [(claim.job_id, claim.cancelled) for claim in take(store)] == [
        (f"a:{suffix}", False), ("a", True),
    ]  # fmt: skip


def test_a_strange_key_in_place_of_a_record_stops_no_other_job(store: redis.Redis) -> None:
    announce(store)
    push(store, "broken", "late", "good", eta=None)
    inbox_watch.look(store, "toy")
    store.zrem(keys.waiting("toy"), "late")
    store.zadd(keys.scheduled("toy"), {"late": 1})
    for job_id in ("broken", "late"):
        store.delete(keys.job(job_id))
        store.set(keys.job(job_id), "somebody's")
    set_leases(store, {"late": 1})
    assert sweep(store) == []
    assert inbox_watch.look(store, "toy") is None
    assert waiting(store, "toy").queues["normal"].jobs == 2
    assert [claim.job_id for claim in take(store)] == ["good"]
