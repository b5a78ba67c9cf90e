"""The steps of those who send jobs, read streams, cancel and retry."""

from __future__ import annotations

import itertools
import json
from unittest.mock import patch

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import claims, dead_letters
from llorch_worker.broker.messages.message import ENQUEUED_AT
from llorch_worker.broker.waiting.enqueue import enqueue
from llorch_worker.client.stream import FROM_THE_START, StreamEntry
from llorch_worker.contract import (
    TASK_NAME,
    GenerationRequest,
    InternalError,
    encode_event,
)
from tests.broker.steps import TERMS, card, take
from tests.faults.stage import Stage, insist
from tests.faults.steps import STARTED, TOKENS, Acts, Steps
from tests.messages import QUEUE
from tests.store import cancel_asked, id_for_key, message_of, record_of

STEPS = Steps()


@STEPS.breaking("enqueue")
def a_client_sends_a_job(stage: Stage) -> Acts:
    request = GenerationRequest(prompt="x", idempotency_key="k")
    job_ids = map(str, itertools.count())
    yield None

    def send() -> str:
        return enqueue(
            stage.client, stage.app, request,
            model=card(limit=1), job_id=next(job_ids),
        )  # fmt: skip

    # The user sends it again under the same key, as another job.
    sent, _ = insist(send)
    yield [sent]
    assert stage.waiting() == {sent: 1}
    assert id_for_key(stage.store, "toy", "k") == sent


@STEPS.breaking("enqueue", keys.staged(""))
def a_client_sends_a_large_job(stage: Stage) -> Acts:
    with patch.object(keys, "APART_BYTES", 16):
        yield from a_client_sends_a_job(stage)
    (sent,) = stage.waiting()
    headers = json.loads(message_of(stage.store, sent))["headers"]
    assert record_of(stage.store, sent).get("sent") == f"{headers[ENQUEUED_AT]:.6f}"


@STEPS.breaking("LPUSH")
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


@STEPS.breaking("cancel")
def a_user_cancels_a_waiting_job(stage: Stage) -> Acts:
    stage.user.submit(prompt="x", job_id="a")
    yield None
    cancelled, calls = insist(stage.user.job("a").cancel)
    yield ["a"]
    assert cancelled or calls > 1, "it was this call that cancelled it"
    assert take(stage.store) == []


@STEPS.breaking("cancel")
def a_user_cancels_a_running_job(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    yield None
    cancelled, _ = insist(stage.user.job("a").cancel)
    yield ["a"]
    assert cancelled
    assert cancel_asked(stage.store, "a")
    assert claims.renew(stage.store, [claim], lease_ms=60_000) == []


@STEPS.breaking("XREAD")
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


@STEPS.breaking("retry")
def an_operator_retries_a_letter(stage: Stage) -> Acts:
    (claim,) = stage.claimed("a")
    dead_letters.bury(stage.store, claim, "attempts exhausted", TERMS)
    claims.fail(stage.store, claim, InternalError("the first end"), TERMS)
    claims.end(stage.store, claim, TERMS)
    (letter,) = dead_letters.letters(stage.store)
    stage.ends()
    yield None
    outcome, calls = insist(lambda: dead_letters.retry(stage.client, letter))
    yield ["a"]
    assert outcome == "retried" or calls > 1, "it was this call that retried it"
    assert not stage.letters()
    assert not stage.store.exists(keys.result("a"))
    assert stage.events("a") == []
    (again,) = take(stage.store)
    assert again.attempt == 1
