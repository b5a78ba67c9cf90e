"""A model that generates and reads texts claims the jobs of each kind by themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis

from llorch_worker.broker import keys, queues
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest
from llorch_worker.broker.queues import place_of, route
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.enqueue import enqueue
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, TEXT_TASKS, EmbedRequest, GenerationRequest
from tests.broker.steps import TERMS, announce, card, note_seen, push
from tests.messages import QUEUE
from tests.store import announce_model, record_of

WRITES, READS = keys.wake(QUEUE), keys.wake(QUEUE + queues.TEXTS_SUFFIX)
HIGH = f"{QUEUE}{queues.HIGH_SUFFIX}"
TEXT = EmbedRequest(input="x")

Send = Callable[..., list[str]]


def claim(store: redis.Redis, kind: Any, limit: int = 10, **options: Any) -> list[Claim]:
    request = ClaimRequest("toy", queues.queues("toy"), limit, "w@h", kind=kind, **options)
    return claims.claim(store, request, TERMS).claims


def ids(found: list[Claim]) -> list[str]:
    return [each.job_id for each in found]


@pytest.fixture(params=["client", "stock"])
def send(request: pytest.FixtureRequest, producer: Client) -> Send:
    """Sends jobs of these letters: r reads texts, w writes. Returns their ids."""

    def through_client(letters: str, priority: Any = "normal", begin: int = 0) -> list[str]:
        made = [f"{letter}{at}" for at, letter in enumerate(letters, begin)]
        for job_id in made:
            asked = (
                EmbedRequest(input="x", priority=priority)
                if job_id[0] == "r"
                else GenerationRequest(prompt="x", priority=priority)
            )
            enqueue(producer.redis, producer._app, asked, model=card(), job_id=job_id)
        return made

    def through_inbox(letters: str, priority: Any = "normal", begin: int = 0) -> list[str]:
        made = [f"{letter}{at}" for at, letter in enumerate(letters, begin)]
        for job_id in made:
            task = "llorch.score" if job_id[0] == "r" else "llorch.generate"
            push(producer.redis, job_id, task=task)
            producer.redis.lmove(QUEUE, route("toy", priority).list_key, "LEFT", "LEFT")
        return made

    return through_client if request.param == "client" else through_inbox


def test_each_kind_is_claimed_by_itself(store: redis.Redis, send: Send) -> None:
    send("rwrrw")
    send("rw", priority="high", begin=5)
    assert ids(claim(store, "generation")) == ["w6", "w1", "w4"]
    texts = claim(store, "texts", limit=3)
    assert ids(texts) == ["r5", "r0", "r2"]
    assert {each.reads for each in texts} == {True}
    send("w", begin=7)
    others = claim(store, "any")
    assert [(each.job_id, each.reads) for each in others] == [("w7", False), ("r3", True)]


@pytest.mark.parametrize(
    ("tasks", "woken"),
    [
        # Its workers claim each kind by itself.
        ((TASK_NAME, *TEXT_TASKS), {READS}),
        # All that they claim reads texts.
        (TEXT_TASKS, {WRITES}),
        # A worker that reads texts, too, may have been announced before this one.
        ((TASK_NAME,), {WRITES, READS}),
        (None, {WRITES, READS}),
    ],
)
def test_a_text_wakes_those_alone_who_may_claim_it(
    producer: Client, tasks: tuple[str, ...] | None, woken: set[str]
) -> None:
    store, found = producer.redis, card()
    if tasks is not None:
        found = found.model_copy(update={"tasks": tasks})
        announce_model(store, "toy", found.model_dump_json())
    for asked, keys_of_it in ((GenerationRequest(prompt="x"), {WRITES}), (TEXT, woken)):
        enqueue(store, producer._app, asked, model=found, job_id=asked.task)
        assert {*store.keys(keys.wake("*"))} == keys_of_it
        store.delete(WRITES, READS)
    for job in claim(store, "any"):
        claims.hand_back(store, job)
    assert {*store.keys(keys.wake("*"))} == woken | {WRITES}
    assert ids(claim(store, "texts")) == ["llorch.embed"]


@pytest.mark.parametrize(("kind", "letters"), [("generation", "wwr"), ("texts", "rrw")])
def test_who_finds_jobs_of_the_other_kind_in_the_inbox_wakes_others_for_them(
    store: redis.Redis, kind: str, letters: str
) -> None:
    announce(store)
    for job_id in letters:
        task = "llorch.embed" if job_id == "r" else "llorch.generate"
        push(store, f"{job_id}{store.llen(QUEUE)}", task=task)
    inbox_watch.wake(store, "toy", [QUEUE])
    assert len(claim(store, kind)) == 2
    assert store.llen(READS if kind == "generation" else WRITES) == 1
    assert ids(claim(store, "any")) == [f"{letters[-1]}2"]


def test_the_watcher_wakes_for_each_kind_that_waits(store: redis.Redis, send: Send) -> None:
    both = card().model_copy(update={"tasks": (TASK_NAME, *TEXT_TASKS)})
    announce_model(store, "toy", both.model_dump_json())
    texts = keys.wake(HIGH + queues.TEXTS_SUFFIX)
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert not store.keys(keys.wake("*"))
    send("r", priority="high")
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert {*store.keys(keys.wake("*"))} == {texts, f"{texts}{keys.FULL_SUFFIX}"}
    send("w", begin=1)
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert {*store.keys(keys.wake("*"))} == {WRITES, texts, f"{texts}{keys.FULL_SUFFIX}"}
    send("rw", begin=2)
    inbox_watch.look(store, "toy", wakes_anyway=True)
    assert {*store.keys(keys.wake("*"))} == {WRITES, READS, texts, f"{texts}{keys.FULL_SUFFIX}"}


def test_who_has_no_room_for_texts_claims_high_ones(store: redis.Redis, send: Send) -> None:
    send("rw", priority="high")
    send("r", begin=2)
    inbox_watch.look(store, "toy", wakes_anyway=True)
    # A claim of the other kind leaves their wake-ups alone.
    assert ids(claim(store, "generation")) == ["w1"]
    request = ClaimRequest("toy", (HIGH,), 4, "w@h", kind="texts", urgent=True)
    assert ids(claims.claim(store, request, TERMS).claims) == ["r0"]


def test_any_number_of_the_other_kind_hides_no_job(store: redis.Redis, send: Send) -> None:
    [job_id] = send("w")
    [other] = send("r", begin=1)
    inbox_watch.look(store, "toy")
    for kind, its, begin in (("generation", job_id, keys.SCORES_OF_TEXTS), ("texts", other, 0)):
        first = keys.SCORES_A_CLASS + begin
        hiding = {f"{kind}{at}": first + at / 2 for at in range(1_000)}
        store.zadd(keys.waiting("toy"), hiding)
        assert ids(claim(store, kind)) == [its]
        # Nobody has looked at them: they would be found gone.
        assert store.zcard(keys.waiting("toy")) >= len(hiding)
        store.zrem(keys.waiting("toy"), *hiding)


def test_a_worker_leaves_others_their_share_of_its_kind(store: redis.Redis, send: Send) -> None:
    note_seen(store, place_of("toy", "w@h"), place_of("toy", "other@h"))
    send("rrrrrrrrrrrrrrrrwwww")
    assert len(claim(store, "generation", limit=16)) == 2
    assert len(claim(store, "texts", limit=16)) == 8


@pytest.mark.parametrize("way", ["handed back", "swept", "restored", "scheduled"])
def test_a_job_that_comes_back_is_of_its_kind(store: redis.Redis, send: Send, way: str) -> None:
    send("rw")
    [first] = claim(store, "texts")
    if way == "handed back":
        claims.hand_back(store, first)
    elif way == "swept":
        store.zadd(keys.LEASES, {first.job_id: 1})
        claims.sweep(store, lease_ms=TERMS.lease_ms)
    elif way == "restored":
        store.delete(keys.job(first.job_id), keys.result(first.job_id))
        assert claims.restore(store, first)
    else:
        claims._release(store, first, "scheduled", due_ms=1)
        store.hdel(keys.job(first.job_id), "score")
        inbox_watch.look(store, "toy")
    assert ids(claim(store, "generation")) == ["w1"]
    [again] = claim(store, "texts")
    assert (again.job_id, again.reads) == ("r0", True)


def test_a_lost_reply_is_given_again_whatever_else_was_claimed_since(
    store: redis.Redis, send: Send
) -> None:
    send("rw")
    request = ClaimRequest("toy", queues.queues("toy"), 4, "w@h", kind="texts")
    first = claims.claim(store, request, TERMS).claims
    assert ids(claim(store, "generation")) == ["w1"]
    again = claims.claim(store, replace(request, sent_before=True), TERMS).claims
    assert [(each.job_id, each.fence) for each in again] == [(first[0].job_id, first[0].fence)]


def test_each_kind_has_shares_of_its_own(producer: Client) -> None:
    store = producer.redis
    for at in range(8):
        request = EmbedRequest(input="x" * 400_000, tenant="a")
        enqueue(store, producer._app, request, model=card(), job_id=f"r{at}")
    for at, tenant in enumerate("bab"):
        asked = GenerationRequest(prompt="x", tenant=tenant)
        enqueue(store, producer._app, asked, model=card(), job_id=f"w{at}")
    assert ids(claim(store, "generation")) == ["w0", "w1", "w2"]
    producer.job("r3").cancel()
    assert record_of(store, "r3")["state"] == "ended"
    assert ids(claim(store, "texts")) == [f"r{at}" for at in range(8) if at != 3]
