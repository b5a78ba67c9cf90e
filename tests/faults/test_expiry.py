"""The keys of a job expire after its end, and not before."""

from __future__ import annotations

from celery import Celery

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Finished, Tokens
from tests.faults.conftest import StartWorker
from tests.services import token_ids, wait_until
from tests.store import leases_in, record_of, ttls

GET_S = 60


def test_a_stream_expires_and_its_result_stays(client: Client, start_worker: StartWorker) -> None:
    start_worker(stream_ttl_s=1, result_ttl_s=60)
    read = client.submit(prompt="x", max_tokens=20)
    assert token_ids(read.stream(timeout=GET_S)) == list(range(20))
    unread = client.submit(prompt="x", max_tokens=20)
    for job in (read, unread):
        assert job.result(GET_S).text.split() == [f"w{i}" for i in range(20)]
        wait_until(lambda job=job: not client.redis.exists(keys.events(job.id)), what="its expiry")
        assert 0 < ttls(client.redis, job.id)[1] <= 60
        assert 0 < ttls(client.redis, job.id)[0] <= 60
        # A late reader still receives the end.
        (entry,) = job.stream(timeout=GET_S)
        assert isinstance(entry.event, Finished)


def test_a_stream_does_not_expire_while_its_job_runs(
    client: Client, start_worker: StartWorker
) -> None:
    # At 5 ms a token, the job lasts twice as long as an unused stream.
    start_worker(stream_ttl_s=1)
    job = client.submit(prompt="x", max_tokens=400)
    assert token_ids(job.stream(timeout=GET_S)) == list(range(400))


def test_every_key_of_an_ended_job_expires(client: Client, start_worker: StartWorker) -> None:
    start_worker()
    # The worker's own keys are there once it has ended a job.
    client.submit(prompt="x", max_tokens=1).result(GET_S)
    before = set(client.redis.keys())
    jobs = [client.submit(prompt="x", max_tokens=5, idempotency_key=str(i)) for i in range(5)]
    for job in jobs:
        list(job.stream(timeout=GET_S))
        job.result(GET_S)
    wait_until(lambda: not leases_in(client.redis))
    left = set(client.redis.keys()) - before
    lasting = {key for key in left if client.redis.ttl(key) == -1}
    assert not lasting


def test_a_job_that_waits_longer_than_everything_is_kept_stays_known(client: Client) -> None:
    with Client(client.settings.model_copy(update={"result_ttl_s": 1}), model="toy") as hasty:
        job = hasty.submit(prompt="x", idempotency_key="once")
        hour_ms = 3_600_000
        assert client.redis.pttl(keys.job(job.id)) == -1
        assert client.redis.pttl(keys.idempotency("toy", "once")) > hour_ms
        assert job.status().state == "queued"
        assert hasty.submit(prompt="x", idempotency_key="once").id == job.id


def test_a_key_lives_as_long_as_its_job_and_then_as_a_result(
    client: Client, start_worker: StartWorker
) -> None:
    start_worker(result_ttl_s=1, stream_ttl_s=1)
    # At 5 ms a token, the job lasts twice as long as a result.
    job = client.submit(prompt="x", max_tokens=400, idempotency_key="once")
    wait_until(lambda: job.status().state == "running")
    key = keys.idempotency("toy", "once")
    assert client.redis.pttl(key) == -1
    assert job.result(GET_S).usage.completion == 400
    assert 0 < client.redis.pttl(key) <= 1_000
    wait_until(lambda: not client.redis.exists(key))
    assert client.submit(prompt="x", max_tokens=1, idempotency_key="once").id != job.id


def test_what_a_half_done_job_needs_outlives_the_time_that_it_is_kept(
    client: Client, start_worker: StartWorker
) -> None:
    worker = start_worker(stream_ttl_s=1, result_ttl_s=1)
    with Celery("stock", broker=client.settings.redis_url, set_as_current=False) as stock:
        kwargs = {"prompt": "x", "max_tokens": 150, "idempotency_key": "once"}
        job = client.job(stock.send_task(TASK_NAME, kwargs=kwargs, queue="llorch.toy").id)
    seen = []
    events = job.stream(timeout=GET_S)
    while len(seen) < 20:
        event = next(events).event
        seen += event.ids if isinstance(event, Tokens) else ()
    worker.process.kill()
    for key in (keys.events(job.id), keys.idempotency("toy", "once")):
        assert client.redis.pttl(key) == -1
    start_worker("w2", stream_ttl_s=60, result_ttl_s=60)
    assert seen + token_ids(events) == list(range(150))
    assert job.result(GET_S).attempts == 2


def test_expires_counts_until_the_first_claim(client: Client, start_worker: StartWorker) -> None:
    worker = start_worker()
    with Celery("stock", broker=client.settings.redis_url, set_as_current=False) as stock:
        kwargs = {"prompt": "x", "max_tokens": 300}
        sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue="llorch.toy", expires=1)
    job = client.job(sent.id)
    wait_until(lambda: job.status().state == "running")
    worker.process.kill()
    wait_until(lambda: float(record_of(client.redis, job.id).get("first_claim_ms") or 0) / 1e3 + 1
               < client.redis.time()[0])  # fmt: skip
    start_worker("w2")
    assert job.result(GET_S).usage.completion == 300
