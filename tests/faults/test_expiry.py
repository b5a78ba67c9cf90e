"""The keys of a job expire after its end, and not before."""

from __future__ import annotations

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.contract import Finished
from tests.faults.conftest import StartWorker
from tests.services import token_ids, wait_until

GET_S = 60


def test_a_stream_expires_and_its_result_stays(client: Client, start_worker: StartWorker) -> None:
    start_worker(stream_ttl_s=1, result_ttl_s=60)
    read = client.submit(prompt="x", max_tokens=20)
    assert token_ids(read.stream(timeout=GET_S)) == list(range(20))
    unread = client.submit(prompt="x", max_tokens=20)
    for job in (read, unread):
        assert job.result(GET_S).text.split() == [f"w{i}" for i in range(20)]
        wait_until(lambda job=job: not client.redis.exists(keys.events(job.id)), what="its expiry")
        assert 0 < client.redis.ttl(keys.result(job.id)) <= 60
        assert 0 < client.redis.ttl(keys.job(job.id)) <= 60
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
    before = set(client.redis.keys())
    jobs = [client.submit(prompt="x", max_tokens=5, idempotency_key=str(i)) for i in range(5)]
    for job in jobs:
        list(job.stream(timeout=GET_S))
        job.result(GET_S)
    wait_until(lambda: not client.redis.exists(keys.LEASES))
    left = set(client.redis.keys()) - before
    lasting = {key for key in left if client.redis.ttl(key) == -1}
    assert not lasting
