"""A job's owner stays with it, and what its owner forgets leaves no text."""

from __future__ import annotations

import json

import pytest

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import claims, dead_letters
from llorch_worker.broker.messages.message import OWNER
from llorch_worker.broker.scripts import run_script
from llorch_worker.client import Client, Job
from llorch_worker.contract import TASK_NAME, InternalError
from tests.broker.jobs.test_dead_letters import die, die_of_attempts, retry, the_letter
from tests.broker.steps import TERMS, take
from tests.messages import GOOD_BODY, QUEUE, envelope


def owner(client: Client, job: Job) -> str | None:
    found: str | None = client.redis.hget(keys.job(job.id), "owner")
    return found


def forget(client: Client, job: Job) -> bool:
    return bool(run_script(client.redis, "gateway/forget", [job.id, "nobody"]))


def test_a_job_that_redis_lost_comes_back_with_its_owner(producer: Client) -> None:
    job = producer.submit(prompt="secret", owner="alice")
    (claim,) = take(producer.redis)
    producer.redis.flushall()
    assert claims.restore(producer.redis, claim)
    assert owner(producer, job) == "alice"


@pytest.mark.parametrize(("header", "found"), [("mine", "mine"), (7, None)])
def test_an_owner_is_read_beside_a_body_that_cannot_be(
    producer: Client, header: object, found: str | None
) -> None:
    message = envelope(b"{", headers={"id": "a", OWNER: header})
    producer.redis.lpush(QUEUE, json.dumps(message))
    (claim,) = take(producer.redis)
    producer.redis.flushall()
    assert claims.restore(producer.redis, claim)
    assert producer.redis.hget(keys.job("a"), "owner") == found


def test_a_retried_job_has_its_owner_though_its_record_had_expired(producer: Client) -> None:
    job = die_of_attempts(producer, owner="alice")
    producer.redis.delete(keys.job(job.id))
    assert retry(producer, the_letter(producer)) == "retried"
    assert owner(producer, job) == "alice"


@pytest.mark.parametrize(("header", "found"), [("mine", "mine"), (7, None)])
def test_a_retried_job_of_a_stock_producer_has_the_owner_of_its_message(
    producer: Client, header: object, found: str | None
) -> None:
    message = envelope(GOOD_BODY, headers={"id": "a", "task": TASK_NAME, OWNER: header})
    producer.redis.lpush(QUEUE, json.dumps(message))
    die(producer, "w")
    producer.redis.delete(keys.job("a"))
    assert retry(producer, the_letter(producer)) == "retried"
    assert (producer.redis.hget(keys.job("a"), "owner") or None) == found


def test_a_forgotten_job_leaves_no_text_and_no_dead_letter(producer: Client) -> None:
    other, job = die_of_attempts(producer), die_of_attempts(producer, owner="alice")
    assert forget(producer, job)
    assert [letter.id for letter in dead_letters.letters(producer.redis)] == [other.id]
    assert not producer.redis.exists(keys.result(job.id), keys.events(job.id))
    assert owner(producer, job) == "nobody"


def test_a_forgotten_job_frees_its_idempotency_key(producer: Client) -> None:
    job = producer.submit(prompt="x", idempotency_key="k")
    assert not forget(producer, job)
    assert producer.submit(prompt="x", idempotency_key="k").id == job.id
    (claim,) = take(producer.redis)
    assert claims.fail(producer.redis, claim, InternalError("the end"), TERMS)
    assert forget(producer, job)
    assert producer.submit(prompt="x", idempotency_key="k").id != job.id


def test_what_redis_does_not_know_is_forgotten_and_gets_no_record(producer: Client) -> None:
    assert forget(producer, producer.job("unknown"))
    assert not producer.redis.exists(keys.job("unknown"))
