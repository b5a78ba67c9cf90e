"""The steps of workers."""

from __future__ import annotations

import json
from dataclasses import replace

import redis
from celery.app.task import Context

from llorch_worker.broker import keys, queues
from llorch_worker.broker.jobs import claims, dead_letters, follow_ups
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS, LastEntries
from llorch_worker.broker.jobs.results import decode_state
from llorch_worker.broker.scripts import run_script
from llorch_worker.broker.waiting import inbox_watch, older_version
from llorch_worker.contract import (
    TASK_NAME,
    InternalError,
    InvalidRequest,
    Restarted,
    encode_event,
)
from llorch_worker.worker.publisher import Publisher
from tests.broker.jobs.test_results import RESULT
from tests.broker.steps import SETTINGS, TERMS, push, sweep, take
from tests.faults.stage import Stage, insist
from tests.faults.steps import STARTED, TOKENS, Acts, Steps
from tests.messages import QUEUE, envelope
from tests.store import (
    add_entry,
    entries_of,
    follow_ups_in,
    message_of,
    set_follow_ups,
    set_leases,
    stored_result,
    write_record,
)

STEPS = Steps()

PART_OF_A_CHORD = "celery-taskset-meta-g.j"
"""A key that only Celery's own script for parts of chords names."""


def claim_until_heard(stage: Stage) -> list[Claim]:
    """The same call again and again, as a worker sends it."""
    call = ClaimRequest("toy", queues.queues("toy"), limit=10, worker="w@h")

    def send() -> list[Claim]:
        nonlocal call
        request, call = call, replace(call, sent_before=True)
        return claims.claim(stage.channel, request, TERMS).claims

    return insist(send)[0]


@STEPS.breaking("claim")
def a_worker_claims(stage: Stage) -> Acts:
    push(stage.store, "a", "b")
    yield None
    taken = claim_until_heard(stage)
    yield ["a", "b"]
    assert [claim.job_id for claim in taken] == ["a", "b"], "none waits for its lease to lapse"
    assert [claim.attempt for claim in taken] == [1, 1]
    assert not stage.waiting()


@STEPS.breaking("reread")
def a_worker_puts_a_message_back_that_lua_cannot_read(stage: Stage) -> Acts:
    message = envelope({"id": "a", "task": TASK_NAME}, headers={})
    stage.store.lpush(QUEUE, json.dumps(message))
    yield None
    taken = claim_until_heard(stage) or take(stage.store)
    yield ["a"]
    assert [claim.job_id for claim in taken] == ["a"]


@STEPS.breaking("append")
def a_worker_writes_tokens(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    lost: list[object] = []
    publisher = Publisher(
        stage.client, stage.app.settings, on_lost=lost.append, on_cancelled=lost.append
    )
    publisher.open(claim, 1)
    publisher.append(claim, STARTED)
    publisher.append(claim, TOKENS)
    yield None
    publisher.start()
    written = publisher.flush(claim, lambda: bool(lost))
    publisher.close()
    yield ["a"]
    assert written
    assert [event["type"] for event in stage.events("a")] == ["started", "tokens"]
    assert stage.events("a")[1]["ids"] == list(TOKENS.ids)
    assert stage.record("a")["progress"] == "1"


@STEPS.breaking("renew")
def a_worker_renews_its_leases(stage: Stage) -> Acts:
    held = stage.claimed("a", "b")
    set_leases(stage.store, {"a": 1, "b": 1})
    yield None
    lost, _ = insist(lambda: claims.renew(stage.client, held, lease_ms=60_000))
    yield ["a", "b"]
    assert not lost
    assert sweep(stage.store) == []


@STEPS.breaking("finish")
def a_worker_stores_a_result(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    HELD_CLAIMS.add(claim)
    HELD_CLAIMS.leave_entries(claim, LastEntries(1, (STARTED, TOKENS)))
    try:
        yield None
        request = Context(id="a", properties={"delivery_tag": claim.tag})
        stage.backend.store_result("a", RESULT, "SUCCESS", request=request)
        yield ["a"]
        assert HELD_CLAIMS.has_ended(claim), "the result is stored, and the claim was not lost"
    finally:
        HELD_CLAIMS.discard(claim)
    assert decode_state(stored_result(stage.store, "a")).end == RESULT
    assert [event["type"] for event in stage.events("a")] == ["started", "tokens", "finished"]


@STEPS.breaking("finish", PART_OF_A_CHORD, "followed_up")
def a_worker_ends_a_part_of_a_chord(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    HELD_CLAIMS.add(claim)
    request = Context(
        id="a", properties={"delivery_tag": claim.tag},
        group="g", chord={"task": "sum", "chord_size": 2},
    )  # fmt: skip
    try:
        yield None
        # Celery takes an error of this call for one of the task, and fails its chord.
        stage.backend.mark_as_done("a", RESULT, request=request)
        yield ["a"]
    finally:
        HELD_CLAIMS.discard(claim)
    assert decode_state(stored_result(stage.store, "a")).end == RESULT
    # What it could not do or note, the next worker does.
    if follow_ups_in(stage.store):
        set_follow_ups(stage.store, {"a": 0})
        assert [ended.job_id for ended in follow_ups.take(stage.store, 60)] == ["a"]
        stage.backend.on_chord_part_return(request, "SUCCESS", RESULT)
    assert stage.store.zcard(PART_OF_A_CHORD) == 1


@STEPS.breaking("take_due")
def a_worker_takes_what_follows_an_end(stage: Stage) -> Acts:
    push(stage.store, "a")
    assert cancel(stage.store, "a", SETTINGS, heard_by="toy") == "queued"
    assert take(stage.store) == []
    stage.ends()
    yield None
    insist(lambda: follow_ups.take(stage.client, 60))
    yield []
    # It is this worker's for a while, and then another's, until one has done it.
    set_follow_ups(stage.store, {"a": 0})
    assert [ended.job_id for ended in follow_ups.take(stage.store, 60)] == ["a"]


@STEPS.breaking("reserve_key")
def a_worker_reserves_a_key(stage: Stage) -> Acts:
    stage.claimed("a")
    key = keys.idempotency("toy", "k")
    yield None
    owner, _ = insist(lambda: run_script(stage.client, "reserve_key", ["a", 60], [key]))
    yield ["a"]
    assert owner == "a"
    assert stage.store.get(key) == "a"
    assert stage.store.ttl(key) == -1


@STEPS.breaking("release")
def a_worker_acknowledges_an_ended_job(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    claims.fail(stage.store, claim, InternalError("the end"), TERMS)
    yield None
    insist(lambda: claims.end(stage.channel, claim, TERMS))
    yield ["a"]
    # What follows the end needs the message.
    (ended,) = follow_ups.take(stage.store, 60)
    assert ended.message
    follow_ups.note_done(stage.store, "a", TERMS.result_ttl_s, ended.fence)
    assert not message_of(stage.store, "a")


@STEPS.breaking("release")
def a_worker_hands_a_job_back(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    insist(lambda: claims.hand_back(stage.channel, claim))
    yield ["a"]
    (again,) = take(stage.store)
    assert again.attempt == 1


@STEPS.breaking("release")
def a_worker_hands_a_job_over(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    place = queues.place_of("toy", "other@host")
    yield None
    insist(lambda: claims.hand_back(stage.client, claim, fingerprint="another", place=place))
    yield ["a"]
    stage.store.zadd(keys.live("toy"), {place: 10**15})
    stage.store.set(keys.worker(place), '{"fingerprint":"another"}')
    assert take(stage.store) == []
    stage.store.delete(keys.worker(place))
    (again,) = take(stage.store)
    assert again.attempt == 1, "nobody serves that model any more"


@STEPS.breaking("restart")
def a_worker_begins_a_job_again(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    add_entry(stage.store, "a", encode_event(TOKENS), "1-0")
    restarted = Restarted(worker="w@h", attempt=1)
    yield None
    insist(lambda: claims.restart(stage.client, claim, 2, restarted))
    yield ["a"]
    assert entries_of(stage.store, "a") == [("2-0", encode_event(restarted))]


@STEPS.breaking("restore")
def a_worker_restores_a_job_that_redis_lost(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    stage.store.delete(keys.job("a"), keys.result("a"), keys.LEASES)
    stage.ends()
    yield None
    insist(lambda: claims.restore(stage.channel, claim))
    yield ["a"]
    (again,) = take(stage.store)
    assert (again.message, again.attempt, again.first) == (claim.message, 1, False)


@STEPS.breaking("release")
def a_worker_lets_a_lease_lapse(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    insist(lambda: claims.lapse(stage.client, claim, max_attempts=3))
    yield ["a"]
    assert sweep(stage.store) == ["a"]


@STEPS.breaking("release")
def a_worker_blames_a_job_for_its_engines_death(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    insist(lambda: claims.blame(stage.client, claim, max_attempts=3, alone=True))
    yield ["a"]
    assert stage.record("a")["strikes"] == "1"
    assert stage.waiting() == {"a": 1}


@STEPS.breaking("sweep")
def a_worker_sweeps(stage: Stage) -> Acts:
    stage.claimed("a", "b")
    set_leases(stage.store, {"a": 1, "b": 2})
    yield None
    insist(lambda: sweep(stage.client))
    yield ["a", "b"]
    assert stage.waiting() == {"a": 1, "b": 1}
    assert {stage.record(job_id)["attempts"] for job_id in "ab"} == {"1"}


def refuse(client: redis.Redis, claim: Claim) -> None:
    """As a channel refuses a message that kombu cannot read."""
    dead_letters.bury(client, claim, dead_letters.MALFORMED, TERMS)
    claims.fail(client, claim, InvalidRequest("the end"), TERMS)
    claims.end(client, claim, TERMS)


@STEPS.breaking("bury", "finish", "release")
def a_worker_refuses_a_message(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    try:
        refuse(stage.channel, claim)
    except redis.ConnectionError:
        # The lease lapses, and the next worker gets it.
        stage.lapse()
        for again in take(stage.store):
            refuse(stage.store, again)
    yield ["a"]
    assert stage.letters() == ["a"]


@STEPS.breaking("bury")
def a_worker_keeps_a_letter(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    buried, _ = insist(lambda: dead_letters.bury(stage.channel, claim, "malformed", TERMS))
    yield ["a"]
    assert buried
    assert stage.letters() == ["a"]


@STEPS.breaking("watch")
def a_watcher_moves_an_inbox(stage: Stage) -> Acts:
    push(stage.store, "a", "b", "b")
    yield None
    insist(lambda: inbox_watch.look(stage.client, "toy"))
    yield ["a", "b"]
    assert not stage.store.llen(QUEUE)
    assert [claim.job_id for claim in take(stage.store)] == ["a", "b"]


@STEPS.breaking("watch", "LINDEX", keys.staged(""))
def a_watcher_takes_a_large_message(stage: Stage) -> Acts:
    push(stage.store, "a", "b", "b")
    yield None
    insist(lambda: inbox_watch._take_large(stage.client, "toy", ("toy", 0, QUEUE)))
    yield ["a", "b"]
    assert not stage.store.llen(QUEUE)
    assert [claim.job_id for claim in take(stage.store)] == ["a", "b"]


@STEPS.breaking("move_list")
def a_worker_moves_the_jobs_of_an_older_version(stage: Stage) -> Acts:
    push(stage.store, "a", "b")
    stage.store.rename(QUEUE, f"{QUEUE}:suspects")
    write_record(stage.store, "a", state="queued", fence=1, attempts=1)
    yield None
    insist(lambda: older_version.move(stage.client, "toy"))
    yield ["a", "b"]
    assert [claim.job_id for claim in take(stage.store)] == ["a", "b"]


@STEPS.breaking("move_messages")
def a_worker_moves_the_messages_of_jobs_of_an_older_version(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    stage.store.delete(keys.message("a"))
    write_record(stage.store, "a", message=claim.message.decode())
    yield None
    insist(lambda: older_version.move(stage.client, "toy"))
    yield ["a"]
    assert message_of(stage.store, "a") == claim.message.decode()
