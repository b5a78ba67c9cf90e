"""A job enters its queue whole or not at all."""

from __future__ import annotations

import base64
import json
import threading
import time
from contextlib import suppress
from typing import Any
from unittest.mock import patch

import pytest
import redis
from celery import Celery

from llorch_worker.broker import keys, queues
from llorch_worker.broker.connections.connection import broker_errors
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.cancellation import end_waiting
from llorch_worker.broker.jobs.results import SUCCESS, result_meta
from llorch_worker.broker.messages.message import TENANT, encode_json
from llorch_worker.broker.scripts import run_script
from llorch_worker.broker.waiting import waiting
from llorch_worker.broker.waiting.enqueue import enqueue
from llorch_worker.client import BrokerUnavailable, Client, Job
from llorch_worker.contract import (
    TASK_NAME,
    AttemptsExhausted,
    Choice,
    DeadlineExceeded,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    IdempotencyKeyReused,
    InternalError,
    InvalidRequest,
    LlorchError,
    OutOfMemory,
    QueueFull,
    Timings,
    Usage,
)
from tests.broker.steps import TERMS, announce, card, load, take
from tests.broker.test_maxmemory import append
from tests.store import lose, message_of, record_of, waiting_ids

QUEUE = "llorch.toy"


def stored(client: Client) -> dict[str, Any]:
    """Everything in Redis."""
    return {key: client.redis.dump(key) for key in client.redis.keys("*")}


def test_the_message_is_the_one_that_a_stock_producer_sends(
    producer: Client, stock: Celery
) -> None:
    fields = {"prompt": "x", "max_tokens": 2, "model": "toy"}
    ours = producer.submit(**fields)
    stock.send_task(
        TASK_NAME, kwargs=fields, task_id=ours.id, queue=QUEUE, headers={"llorch_enqueued_at": 1.0}
    )
    (text,) = producer.redis.lrange(QUEUE, 0, -1)
    theirs, mine = json.loads(text), json.loads(message_of(producer.redis, ours.id))
    (*mine_called, embed), (*theirs_called, their_embed) = (
        json.loads(base64.b64decode(each["body"])) for each in (mine, theirs)
    )
    assert mine_called == theirs_called
    assert mine.keys() == theirs.keys()
    assert mine["properties"].keys() == theirs["properties"].keys()
    different = ("llorch_enqueued_at", "argsrepr", "kwargsrepr", "origin")
    for headers in (mine["headers"], theirs["headers"]):
        assert all(headers.pop(name) for name in different)
    theirs["headers"].pop("ignore_result")
    # Ours leaves out what Celery's workers take for granted.
    for some, every in ((mine["headers"], theirs["headers"]), (embed, their_embed)):
        assert some.items() <= every.items()
        left_out = [every[name] for name in every.keys() - some.keys()]
        assert all(value in (None, 0, {}, [None, None]) for value in left_out)


def test_a_short_job_that_waits_takes_little_memory(producer: Client) -> None:
    job = producer.submit(prompt="x" * 32, max_tokens=64)
    held = (keys.job(job.id), keys.message(job.id))
    assert sum(producer.redis.memory_usage(key) for key in held) < 1_150


@pytest.mark.parametrize("priority", ["high", "normal", "low"])
def test_a_job_waits_with_those_of_its_priority(producer: Client, priority: Any) -> None:
    job = producer.submit(prompt="x", priority=priority)
    found = load(producer.redis).queues
    assert {name for name, queue in found.items() if queue.jobs} == {priority}
    record = record_of(producer.redis, job.id)
    assert record["list"] == queues.route("toy", priority).list_key
    assert record["state"] == "waiting"


def test_the_time_of_enqueueing_is_by_redis_clock(
    producer: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_s = producer.redis.time()[0]
    with monkeypatch.context() as wrong:
        wrong.setattr(time, "time", lambda: 1.0)
        job = producer.submit(prompt='"@ENQUEUED_AT@"', metadata={"@ENQUEUED_AT@": 1})
    enqueued_s = json.loads(message_of(producer.redis, job.id))["headers"]["llorch_enqueued_at"]
    assert before_s <= enqueued_s <= producer.redis.time()[0] + 1
    assert record_of(producer.redis, job.id).get("sent") == f"{enqueued_s:.6f}"


LARGE = "x" * keys.APART_BYTES


class Died(Exception):
    pass


def staged(client: Client) -> list[str]:
    return list(client.redis.keys(keys.staged("*")))


def test_a_large_message_is_stored_and_claimed_as_a_small_one_is(producer: Client) -> None:
    job = producer.submit(prompt=LARGE)
    message = message_of(producer.redis, job.id)
    headers = json.loads(message)["headers"]
    assert record_of(producer.redis, job.id).get("sent") == f"{headers['llorch_enqueued_at']:.6f}"
    assert producer.redis.ttl(keys.message(job.id)) == -1
    with patch.object(claims, "_PIECE_BYTES", len(message) // 2):
        (claim,) = take(producer.redis)
    assert claim.message.decode() == message
    assert LARGE in base64.b64decode(json.loads(message)["body"]).decode()
    assert staged(producer) == []


def test_no_script_gets_or_returns_a_large_message(producer: Client) -> None:
    sizes: list[int] = []
    real = redis.connection.Connection.send_packed_command

    def send(self: Any, command: Any, **options: Any) -> None:
        sent = b"".join(command)
        sizes.extend([len(sent)] if b"EVAL" in sent[:20] else [])
        real(self, command, **options)

    with patch.object(redis.connection.Connection, "send_packed_command", send):
        producer.submit(prompt=LARGE)
    assert sizes
    assert max(sizes) < keys.APART_BYTES
    store = producer.redis
    with patch.object(claims, "_large_message", lambda *_: b"apart"):
        assert [claim.message for claim in take(store)] == [b"apart"]


@pytest.mark.parametrize("more", [0, 1])
def test_a_message_at_the_bound_is_whole(producer: Client, more: int) -> None:
    producer.submit(prompt="x")
    (short,) = take(producer.redis)
    room = keys.APART_BYTES - len(short.message)
    # Three characters of the prompt are four of its base64.
    job = producer.submit(prompt="x" * (room * 3 // 4 + 3 * more))
    assert abs(producer.redis.strlen(keys.message(job.id)) - keys.APART_BYTES) <= 4
    (claim,) = take(producer.redis)
    assert claim.message.decode() == message_of(producer.redis, job.id)


def test_a_producer_that_dies_before_its_script_leaves_a_large_message_that_expires(
    producer: Client,
) -> None:
    def die(*_: object) -> Any:
        raise redis.ConnectionError

    dies = patch("llorch_worker.broker.waiting.enqueue.run_script", die)
    with dies, pytest.raises(BrokerUnavailable):
        producer.submit(prompt=LARGE)
    (key,) = staged(producer)
    assert 0 < producer.redis.ttl(key) <= 60
    assert take(producer.redis) == []


def test_a_large_message_that_redis_lost_before_the_script_is_sent_with_it(
    producer: Client,
) -> None:
    real = producer.redis.set

    def lose_it(name: str, *args: Any, **options: Any) -> Any:
        real(name, *args, **options)
        producer.redis.delete(name)

    with patch.object(producer.redis, "set", lose_it):
        job = producer.submit(prompt=LARGE)
    (claim,) = take(producer.redis)
    assert claim.message.decode() == message_of(producer.redis, job.id)


def test_a_large_job_whose_reply_was_lost_is_sent_once(producer: Client) -> None:
    job = producer.submit(prompt=LARGE)
    message = message_of(producer.redis, job.id)
    producer.submit(prompt=LARGE + "another", job_id=job.id)
    assert message_of(producer.redis, job.id) == message
    assert producer.redis.ttl(keys.message(job.id)) == -1
    assert waiting_ids(producer.redis) == [job.id]


def test_two_calls_that_send_one_large_job_at_once_mix_no_messages(producer: Client) -> None:
    real = producer.redis.set

    def overtaken(*args: Any, **options: Any) -> None:
        real(*args, **options)
        dies = patch("llorch_worker.broker.waiting.enqueue.run_script", side_effect=Died)
        with patch.object(producer.redis, "set", real), dies, suppress(Died):
            producer.submit(prompt=LARGE, tenant="another", job_id="a")

    with patch.object(producer.redis, "set", overtaken):
        producer.submit(prompt=LARGE, job_id="a")
    headers = json.loads(message_of(producer.redis, "a"))["headers"]
    assert record_of(producer.redis, "a").get("sent") == f"{headers['llorch_enqueued_at']:.6f}"
    assert TENANT not in headers


@pytest.mark.parametrize("why", ["full", "known", "other", "no memory"])
def test_a_large_job_that_is_refused_leaves_nothing(producer: Client, why: str) -> None:
    if why == "full":
        announce(producer.redis, 1)
    producer.submit(prompt=LARGE, idempotency_key="once")
    before = stored(producer)
    match why:
        case "known":
            producer.submit(prompt=LARGE, idempotency_key="once")
        case "other":
            with pytest.raises(IdempotencyKeyReused):
                producer.submit(prompt=LARGE + "y", idempotency_key="once")
        case "full":
            with pytest.raises(QueueFull):
                producer.submit(prompt=LARGE)
        case _:
            real = producer.redis.set

            def fill(*args: Any, **options: Any) -> None:
                real(*args, **options)
                producer.redis.config_set("maxmemory-policy", "noeviction")
                producer.redis.config_set("maxmemory", 1)

            with patch.object(producer.redis, "set", fill), pytest.raises(QueueFull):
                producer.submit(prompt=LARGE)
    assert stored(producer) == before


def test_a_full_queue_refuses_and_keeps_nothing(producer: Client) -> None:
    announce(producer.redis, 3)
    for priority in ("high", "normal", "low"):
        producer.submit(prompt="x", priority=priority)
    before = stored(producer)
    with pytest.raises(QueueFull, match="3 jobs for 'toy' wait") as caught:
        producer.submit(prompt="x", idempotency_key="again")
    assert caught.value.document().retriable
    assert "LLORCH_QUEUE_LIMIT" in caught.value.message
    assert stored(producer) == before
    assert len(take(producer.redis, limit=1)) == 1
    producer.submit(prompt="x", idempotency_key="again")


def test_every_list_counts_towards_the_limit(producer: Client) -> None:
    lists = queues.inbox_of("toy")
    announce(producer.redis, len(lists) + 1)
    producer.submit(prompt="x")
    for name in lists:
        producer.redis.lpush(name, "somebody's")
    assert load(producer.redis).waiting == len(lists) + 1
    with pytest.raises(QueueFull, match=f"{len(lists) + 1} jobs"):
        producer.submit(prompt="x")
    producer.redis.delete(lists[-1])
    producer.submit(prompt="x")


def test_another_models_queue_does_not_count(producer: Client) -> None:
    announce(producer.redis, 1)
    announce(producer.redis, 1, "other")
    producer.submit(prompt="x", model="other")
    producer.submit(prompt="x")


def test_a_limit_of_zero_is_no_limit(producer: Client) -> None:
    for _ in range(50):
        producer.submit(prompt="x")
    assert load(producer.redis).waiting == 50


def test_the_first_job_of_an_idempotency_key_is_found_in_a_full_queue_too(
    producer: Client,
) -> None:
    announce(producer.redis, 1)
    first = producer.submit(prompt="x", idempotency_key="once")
    assert producer.submit(prompt="x", idempotency_key="once").id == first.id
    assert load(producer.redis).waiting == 1


def test_the_limit_is_exact_under_many_producers(producer: Client) -> None:
    announce(producer.redis, 25)
    ends: list[str] = []

    def produce() -> None:
        for _ in range(20):
            try:
                producer.submit(prompt="x")
                ends.append("sent")
            except QueueFull:
                ends.append("full")

    threads = [threading.Thread(target=produce) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (ends.count("sent"), ends.count("full")) == (25, 135)
    assert load(producer.redis).waiting == 25


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": 'ü \u2028 "quoted" \\ {"a": null} @fields@ @body@\x00'},
        {"prompt_token_ids": [1, 2], "logit_bias": {17: -1.5}, "temperature": 0, "seed": 2**62},
        {"messages": [{"role": "user", "content": "é"}], "stop": ["\n", "🙂"], "model": "toy"},
        {"prompt": "x", "metadata": {"é": [None, True, 1e300, 2**70, {}]}, "priority": "low"},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_job_arrives_as_it_was_written(
    producer: Client, stock: Celery, fields: dict[str, Any]
) -> None:
    request = GenerationRequest(**fields)
    # The second comes from the same form as the first.
    jobs = [producer.submit(request) for _ in range(2)]
    for job in jobs:
        message = json.loads(message_of(producer.redis, job.id))
        body = base64.b64decode(message["body"]).decode()
        for character in "üé🙂":
            assert (character in body) == (character in str(fields))
        arguments, arrived, _ = json.loads(body)
        assert arguments == []
        assert arrived == {**json.loads(json.dumps(request.wire())), "model": "toy"}
        assert GenerationRequest(**arrived) == request.model_copy(update={"model": "toy"})
        assert message["headers"]["id"] == message["headers"]["root_id"] == job.id


@pytest.mark.parametrize("key", [None, "once"])
def test_an_enqueue_whose_answer_was_lost_is_sent_again_and_counts_once(
    producer: Client, key: str | None
) -> None:
    request = GenerationRequest(prompt="x", idempotency_key=key)
    for _ in range(2):
        job_id = enqueue(producer.redis, producer._app, request, model=card(1), job_id="mine")
        assert job_id == "mine"
    assert waiting_ids(producer.redis) == ["mine"]


def test_redis_at_maxmemory_refuses_clearly_and_keeps_nothing(producer: Client) -> None:
    producer.submit(prompt="x")
    producer.redis.config_set("maxmemory", 1)
    before = stored(producer)
    with pytest.raises(QueueFull, match="maxmemory") as caught:
        producer.submit(prompt="x", idempotency_key="again")
    assert caught.value.document().retriable
    assert "\n" not in caught.value.message
    assert stored(producer) == before
    producer.redis.config_set("maxmemory", 0)
    producer.submit(prompt="x", idempotency_key="again")
    assert len(waiting_ids(producer.redis)) == 2


def test_a_write_refused_at_maxmemory_is_one_sentence(producer: Client) -> None:
    producer.redis.config_set("maxmemory", 1)
    with (
        pytest.raises(BrokerUnavailable, match=r"at its maxmemory.*raise maxmemory") as caught,
        broker_errors(producer.settings.redis_url),
    ):
        producer.redis.set("a", "b")
    assert "No Redis" not in str(caught.value)


def test_jobs_that_ended_while_they_waited_do_not_count_against_the_limit(
    producer: Client,
) -> None:
    announce(producer.redis, limit=3)

    def fill() -> list[str]:
        ids = [producer.submit(prompt="x", tenant="acme").id for _ in range(3)]
        with pytest.raises(QueueFull):
            producer.submit(prompt="x")
        return ids

    for job_id in fill():
        producer.job(job_id).cancel()
    waiting = fill()
    assert [claim.job_id for claim in take(producer.redis)] == waiting
    fill()


def test_a_purge_leaves_the_limit_as_it_was(producer: Client) -> None:
    announce(producer.redis, limit=1)
    producer.submit(prompt="x").cancel()
    producer.submit(prompt="x")
    assert waiting.purge(producer.redis, QUEUE) == 1
    producer.submit(prompt="x")
    with pytest.raises(QueueFull):
        producer.submit(prompt="x")


def test_a_purged_job_that_was_claimed_before_leaves_nothing_and_frees_its_key(
    producer: Client,
) -> None:
    job = producer.submit(prompt="x", idempotency_key="k")
    (claim,) = take(producer.redis)
    append(producer.redis, claim)
    assert claims.hand_back(producer.redis, claim)
    assert waiting.purge(producer.redis, QUEUE) == 1
    assert not producer.redis.keys(f"*{job.id}*")
    assert producer.submit(prompt="y", idempotency_key="k").id != job.id


def end_as(producer: Client, job: Job, end: LlorchError | GenerationResult | Exception) -> None:
    """As the worker that claims the job ends it."""
    (claim,) = take(producer.redis)
    assert claim.job_id == job.id
    if isinstance(end, Exception):
        assert claims.fail(producer.redis, claim, end, TERMS)
        return
    document = encode_json(result_meta(job.id, SUCCESS, end))
    assert run_script(producer.redis, "finish", [job.id, claim.fence, document, 60, "end", 60, ""])


def result_of(job: Job, finish_reason: FinishReason, tokens: int) -> GenerationResult:
    return GenerationResult(
        id=job.id,
        model="toy",
        choices=(
            Choice(index=0, text="", token_ids=(1,) * tokens, finish_reason=finish_reason),
            Choice(index=1, text="", token_ids=(), finish_reason="deadline"),
        ),
        usage=Usage(prompt=1, completion=tokens),
        seed=1,
        timings=Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0),
        worker="gpu0@host",
    )


KEYED: dict[str, Any] = {"prompt": "x", "max_tokens": 9, "idempotency_key": "once"}


@pytest.mark.parametrize(
    "end",
    [
        InternalError("a defect"),
        OutOfMemory("the device is full"),
        ValueError("no error of ours"),
        ("deadline", 0),
    ],
    ids=str,
)
def test_a_key_is_free_again_after_an_end_that_a_repetition_may_mend(
    producer: Client, end: Any
) -> None:
    first = producer.submit(**KEYED)
    end_as(producer, first, result_of(first, *end) if isinstance(end, tuple) else end)
    second = producer.submit(**KEYED)
    assert second.id != first.id
    assert producer.submit(**KEYED).id == second.id, "which waits"
    # What is known of the first job is left alone.
    assert first.status().ended


def test_a_key_is_free_again_after_a_deadline_that_passed_while_the_job_waited(
    producer: Client,
) -> None:
    first = producer.submit(**KEYED, deadline_s=60)
    end_waiting(producer.redis, first.id, DeadlineExceeded("too late"), producer.settings)
    assert producer.submit(**KEYED, deadline_s=60).id != first.id


@pytest.mark.parametrize(
    "end",
    [
        InvalidRequest("it breaks a rule"),
        AttemptsExhausted("it killed three workers"),
        ("length", 9),
        ("deadline", 2),
        "cancelled",
    ],
    ids=str,
)
def test_a_key_stays_with_an_end_that_a_repetition_would_only_repeat(
    producer: Client, end: Any
) -> None:
    first = producer.submit(**KEYED)
    if end == "cancelled":
        assert first.cancel()
    else:
        end_as(producer, first, result_of(first, *end) if isinstance(end, tuple) else end)
    assert producer.submit(**KEYED).id == first.id


def test_a_key_of_a_job_that_redis_has_lost_is_free(producer: Client) -> None:
    first = producer.submit(**KEYED)
    lose(producer.redis, first.id)
    assert producer.submit(**KEYED).id != first.id


def test_another_request_with_the_same_key_is_refused_and_leaves_nothing(producer: Client) -> None:
    first = producer.submit(**KEYED, metadata={"a": 1, "b": [2]})
    before = stored(producer)
    assert producer.submit(metadata={"b": [2], "a": 1}, **KEYED).id == first.id
    for changed in ({"prompt": "y"}, {"max_tokens": 10}, {"seed": 1}, {"metadata": {"a": 2}}):
        with pytest.raises(IdempotencyKeyReused, match=f"job {first.id}") as caught:
            producer.submit(**{**KEYED, "metadata": {"a": 1, "b": [2]}, **changed})
        assert (caught.value.code, caught.value.retriable) == ("INVALID_REQUEST", False)
        assert caught.value.faults[0].field == "idempotency_key"
    assert stored(producer) == before


def test_a_key_that_is_free_again_gives_one_job_to_all_who_repeat(producer: Client) -> None:
    end_as(producer, producer.submit(**KEYED), InternalError("a defect"))
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(producer.submit(**KEYED).id)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(found), len(set(found))) == (8, 1)
    assert waiting_ids(producer.redis) == found[:1]


def test_what_the_makers_of_the_model_set_is_in_the_message_and_not_in_the_digest(
    producer: Client,
) -> None:
    ids = []
    for temperature in (0.6, 0.1):
        model = card().model_copy(update={"generation_config": {"temperature": temperature}})
        producer.redis.hset(keys.MODELS, "toy", model.model_dump_json())
        # It has read the model's card a moment ago.
        with Client(producer.settings, model="toy") as other:
            ids.append(other.submit(**KEYED).id)
    assert ids[0] == ids[1]
    message = message_of(producer.redis, ids[0])
    _, kwargs, _ = json.loads(base64.b64decode(json.loads(message)["body"]))
    assert (kwargs["temperature"], kwargs["generation_config"]) == (0.6, ["temperature"])
