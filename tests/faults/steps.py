"""Each step of a job's way, most of them one script, as the part that runs it calls it.

A step is a generator. Up to its first ``yield`` it prepares, without faults. Up to its second it
acts, and connections break; it goes on as its caller does, until it has an answer or gives up. It
yields the ids of its jobs, and then says what must be true, whatever broke.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import redis

from llorch_worker.broker import claims, dead_letters, keys, queues, worker_queues
from llorch_worker.broker.claims import Claim
from llorch_worker.broker.enqueue import enqueue
from llorch_worker.broker.held_claims import HELD_CLAIMS, LastEntries
from llorch_worker.broker.results import decode_state
from llorch_worker.broker.scripts import digest
from llorch_worker.client.stream import FROM_THE_START, StreamEntry
from llorch_worker.contract import (
    TASK_NAME,
    GenerationRequest,
    InternalError,
    InvalidRequest,
    Started,
    Tokens,
    encode_event,
)
from llorch_worker.worker.publisher import Publisher
from tests.broker.jobs import TERMS, card, push, take
from tests.broker.test_results import RESULT
from tests.faults.proxy import contains
from tests.faults.stage import SCRIPTS, Stage, insist
from tests.messages import QUEUE

Acts = Generator[Sequence[str] | None, None, None]
STARTED = Started(worker="w@h", model="toy", attempt=1, prompt_tokens=1, queue_ms=0)
TOKENS = Tokens(index=0, ids=(7, 8, 9), text="seven eight nine")


@dataclass(frozen=True)
class Step:
    script: str
    """The script whose call breaks, or a command of Redis."""
    play: Callable[[Stage], Acts]

    def __str__(self) -> str:
        return f"{self.script}-{self.play.__name__}"

    def calls(self, request: bytes) -> bool:
        """Whether the request calls the script, or is the command."""
        script = self.script
        wanted = ("EVALSHA", digest(script)) if script in SCRIPTS else (script,)
        return contains(*wanted)(request)

    def has_source(self, request: bytes) -> bool:
        """Whether the request brings the script itself."""
        return contains(SCRIPTS[self.script])(request)


STEPS: list[Step] = []


def step(*script_names: str) -> Callable[[Callable[[Stage], Acts]], Callable[[Stage], Acts]]:
    def register(play: Callable[[Stage], Acts]) -> Callable[[Stage], Acts]:
        STEPS.extend(Step(script, play) for script in script_names)
        return play

    return register


@step("enqueue")
def a_client_sends_a_job(stage: Stage) -> Acts:
    request = GenerationRequest(prompt="x", idempotency_key="k")
    job_ids = map(str, itertools.count())
    yield None

    def send() -> str:
        return enqueue(
            stage.client, stage.app, request,
            model=card(limit=1), job_id=next(job_ids), ttl_s=60,
        )  # fmt: skip

    # The user sends it again under the same key, as another job.
    sent, _ = insist(send)
    yield [sent]
    assert stage.waiting() == {sent: 1}
    assert stage.store.get(keys.idempotency("toy", "k")) == sent


@step("LPUSH")
def a_stock_producer_sends_a_job(stage: Stage) -> Acts:
    yield None

    def send() -> None:
        stage.stock.send_task(
            TASK_NAME, kwargs={"prompt": "x"}, queue=QUEUE, task_id="a",
            retry_policy={"interval_start": 0, "interval_step": 0},
        )  # fmt: skip

    # Celery and its user send the message again, under the same id. The copies are one job.
    insist(send)
    (claim,) = take(stage.store)
    yield ["a"]
    assert claim.attempt == 1


@step("claim")
def a_worker_claims(stage: Stage) -> Acts:
    push(stage.store, "a", "b")
    yield None
    taken, _ = insist(lambda: take(stage.channel))
    yield ["a", "b"]
    # It renews only what it knows of. The rest comes back.
    stage.lapse(*taken)
    assert stage.waiting() + Counter(claim.job_id for claim in taken) == {"a": 1, "b": 1}


@step("append")
def a_worker_writes_tokens(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    lost: list[str] = []
    publisher = Publisher(
        stage.client, stage.app.settings, on_lost=lost.append, on_cancelled=lost.append
    )
    publisher.open(claim, 1)
    publisher.append("a", STARTED)
    publisher.append("a", TOKENS)
    yield None
    publisher.start()
    written = publisher.flush("a", lambda: bool(lost))
    publisher.close(timeout_s=10)
    yield ["a"]
    assert written
    assert [event["type"] for event in stage.events("a")] == ["started", "tokens"]
    assert stage.events("a")[1]["ids"] == list(TOKENS.ids)
    assert stage.record("a")["progress"] == "1"


@step("renew")
def a_worker_renews_its_leases(stage: Stage) -> Acts:
    held = stage.claimed("a", "b")
    stage.store.zadd(keys.LEASES, {"a": 1, "b": 1})
    yield None
    lost, _ = insist(lambda: claims.renew(stage.client, held, lease_ms=60_000))
    yield ["a", "b"]
    assert not lost
    assert claims.sweep(stage.store) == []


@step("finish")
def a_worker_stores_a_result(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    HELD_CLAIMS.add(claim)
    HELD_CLAIMS.leave_entries(claim, LastEntries(1, (STARTED, TOKENS)))
    try:
        yield None
        stage.backend.store_result("a", RESULT, "SUCCESS")
        yield ["a"]
        assert HELD_CLAIMS.has_ended(claim), "the result is stored, and the claim was not lost"
    finally:
        HELD_CLAIMS.discard(claim)
    assert decode_state(stage.store.get(keys.result("a"))).end == RESULT
    assert [event["type"] for event in stage.events("a")] == ["started", "tokens", "finished"]


@step("release")
def a_worker_acknowledges_an_ended_job(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    claims.fail(stage.store, claim, InternalError("the end"), TERMS)
    yield None
    ended, _ = insist(lambda: claims.end(stage.channel, claim, TERMS))
    yield ["a"]
    assert ended
    assert "message" not in stage.record("a")


@step("release")
def a_worker_hands_a_job_back(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    insist(lambda: claims.hand_back(stage.channel, claim))
    yield ["a"]
    (again,) = take(stage.store)
    assert again.attempt == 1


@step("release")
def a_worker_lets_a_lease_lapse(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    insist(lambda: claims.lapse(stage.client, claim))
    yield ["a"]
    assert claims.sweep(stage.store) == ["a"]


@step("sweep")
def a_worker_sweeps(stage: Stage) -> Acts:
    stage.claimed("a", "b")
    stage.store.zadd(keys.LEASES, {"a": 1, "b": 2})
    yield None
    insist(lambda: claims.sweep(stage.client))
    yield ["a", "b"]
    assert stage.waiting() == {"a": 1, "b": 1}
    assert {stage.record(job_id)["attempts"] for job_id in "ab"} == {"1"}


@step("cancel")
def a_user_cancels_a_waiting_job(stage: Stage) -> Acts:
    push(stage.store, "a")
    yield None
    cancelled, calls = insist(stage.user.job("a").cancel)
    yield ["a"]
    assert cancelled or calls > 1, "it was this call that cancelled it"
    assert take(stage.store) == []


@step("cancel")
def a_user_cancels_a_running_job(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    cancelled, _ = insist(stage.user.job("a").cancel)
    yield ["a"]
    assert cancelled
    assert stage.store.exists(keys.cancel("a"))
    assert claims.renew(stage.store, [claim], lease_ms=60_000) == []


@step("XREAD")
def a_user_reads_a_stream(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    for number, event in enumerate((STARTED, TOKENS), start=1):
        entry = {"event": encode_event(event)}
        stage.store.xadd(keys.events("a"), entry, id=f"{number}-0")
    claims.fail(stage.store, claim, InternalError("the end"), TERMS)
    yield None
    seen: list[StreamEntry] = []

    def follow() -> None:
        after = seen[-1].entry_id if seen else FROM_THE_START
        for entry in stage.user.job("a").stream(from_id=after, timeout=10):
            seen.append(entry)

    insist(follow)
    yield ["a"]
    assert [entry.event.type for entry in seen] == ["started", "tokens", "failed"]


def refuse(client: redis.Redis, claim: Claim) -> None:
    """As a channel refuses a message that kombu cannot read."""
    dead_letters.bury(client, claim, dead_letters.MALFORMED)
    claims.fail(client, claim, InvalidRequest("the end"), TERMS)
    claims.end(client, claim, TERMS)


@step("bury", "finish", "release")
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


@step("bury")
def a_worker_keeps_a_letter(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    buried, _ = insist(lambda: dead_letters.bury(stage.channel, claim, "malformed"))
    yield ["a"]
    assert buried
    assert stage.letters() == ["a"]


@step("retry")
def an_operator_retries_a_letter(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    dead_letters.bury(stage.store, claim, "attempts exhausted")
    claims.fail(stage.store, claim, InternalError("the first end"), TERMS)
    claims.end(stage.store, claim, TERMS)
    (letter,) = dead_letters.letters(stage.store)
    stage.ends()
    yield None
    outcome, calls = insist(lambda: dead_letters.retry(stage.client, letter, stream_ttl_s=60))
    yield ["a"]
    assert outcome == "retried" or calls > 1, "it was this call that retried it"
    assert not stage.letters()
    assert not stage.store.exists(keys.result("a"))
    assert stage.events("a") == []
    (again,) = take(stage.store)
    assert again.attempt == 1


@step("reroute")
def a_worker_moves_the_jobs_of_one_that_is_gone(stage: Stage) -> Acts:
    queue = queues.worker_queue("toy", "gone@host")
    push(stage.store, "a", "b")
    stage.store.rename(queues.normal_queue("toy"), queue)
    stage.store.zadd(keys.WORKER_QUEUES, {queue: 0})
    yield None
    insist(lambda: worker_queues.reroute(stage.client, grace_s=0))
    yield ["a", "b"]
    assert not stage.store.exists(queue)
    assert [claim.job_id for claim in take(stage.store)] == ["a", "b"]
