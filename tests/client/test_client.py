from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest

from llorch_worker.client import AsyncClient, BrokerUnavailable, Client, StreamEntry
from llorch_worker.contract import (
    Finished,
    GenerationRequest,
    InvalidRequest,
    ModelNotServed,
    Started,
    Tokens,
)
from llorch_worker.settings import Settings
from tests.latch import Latch
from tests.services import (
    RedisServer,
    WorkerProcess,
    free_port,
    own_redis,
    running_worker,
    wait_until,
)
from tests.store import jobs_that_wait, lose_stream

GET_S = 60


def ids_of(entries: list[StreamEntry]) -> list[int]:
    return [i for entry in entries if isinstance(entry.event, Tokens) for i in entry.event.ids]


@pytest.mark.parametrize("wrong", ["Once upon a time", {"prompt": "x"}, ["x"]])
def test_a_positional_argument_that_is_no_request_is_answered_with_the_right_call(
    client: Client, wrong: Any
) -> None:
    with pytest.raises(TypeError, match=r"submit\(prompt=\.\.\.\)"):
        client.submit(wrong)

    async def submit() -> None:
        async with AsyncClient(client.settings) as other:
            await other.submit(wrong)

    with pytest.raises(TypeError, match=r"submit\(prompt=\.\.\.\)"):
        asyncio.run(submit())


def test_every_reader_sees_every_event_once_and_in_order(
    toy_worker: WorkerProcess, client: Client
) -> None:
    job = client.submit(prompt="x", max_tokens=100)
    seen: list[list[StreamEntry]] = [[] for _ in range(4)]

    def read(into: list[StreamEntry]) -> None:
        with Client(client.settings) as other:
            into.extend(other.job(job.id).stream(timeout=GET_S))

    readers = [threading.Thread(target=read, args=(into,)) for into in seen]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    late = list(job.stream(timeout=GET_S))
    for entries in (*seen, late):
        assert isinstance(entries[0].event, Started)
        assert isinstance(entries[-1].event, Finished)
        assert ids_of(entries) == list(range(100))
    assert seen == [late] * 4


def test_a_reader_resumes_after_any_entry(toy_worker: WorkerProcess, client: Client) -> None:
    job = client.submit(prompt="x", max_tokens=60)
    whole = list(job.stream(timeout=GET_S))
    for position, entry in enumerate(whole[:-1]):
        assert list(job.stream(from_id=entry.entry_id, timeout=GET_S)) == whole[position + 1 :]


def test_a_reader_that_resumes_after_the_end_gets_the_end_again(
    toy_worker: WorkerProcess, client: Client
) -> None:
    job = client.submit(prompt="x", max_tokens=2)
    last = list(job.stream(timeout=GET_S))[-1]
    (again,) = job.stream(from_id=last.entry_id, timeout=GET_S)
    assert again.event == last.event


def test_a_stream_that_expired_still_ends(toy_worker: WorkerProcess, client: Client) -> None:
    job = client.submit(prompt="x", max_tokens=2)
    job.result(GET_S)
    wait_until(lambda: lose_stream(client.redis, job.id))
    (entry,) = job.stream(timeout=GET_S)
    assert isinstance(entry.event, Finished)


def test_a_job_is_found_again_by_its_id(toy_worker: WorkerProcess, client: Client) -> None:
    job = client.submit(prompt="x", max_tokens=2)
    with Client(client.settings.redis_url) as other:
        assert other.job(job.id).result(GET_S).id == job.id


def test_a_result_is_waited_for_and_a_timeout_leaves_the_job_alone(
    toy_worker: WorkerProcess, client: Client, latch: Latch
) -> None:
    job = client.submit(prompt=latch.prompt(), max_tokens=100)
    with pytest.raises(TimeoutError, match=job.id):
        job.result(timeout=0.05)
    latch.open()
    with pytest.raises(TimeoutError, match="nobody sent this"):
        list(client.job("nobody sent this").stream(timeout=0.05))
    assert len(job.result(GET_S).choices[0].token_ids) == 100


def test_the_status_follows_the_job(
    toy_worker: WorkerProcess, client: Client, latch: Latch
) -> None:
    assert client.job("nobody sent this").status().state == "unknown"
    job = client.submit(prompt=latch.prompt(), max_tokens=2)
    wait_until(lambda: job.status().state == "running")
    assert job.status().worker == toy_worker.hostname
    latch.open()
    job.result(GET_S)
    status = job.status()
    assert (status.state, status.ended) == ("succeeded", True)


def test_a_request_object_is_sent_unchanged(toy_worker: WorkerProcess, client: Client) -> None:
    request = GenerationRequest(prompt="x", max_tokens=3, metadata={"who": "me"})
    assert client.submit(request).result(GET_S).metadata == {"who": "me"}
    with pytest.raises(TypeError, match="not both"):
        client.submit(request, max_tokens=4)


def test_every_fault_is_reported_before_anything_is_sent(
    toy_worker: WorkerProcess, client: Client
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        client.submit(prompt="", max_tokens=0, wrong=1)
    assert {fault.field for fault in caught.value.faults} == {"prompt", "max_tokens", "wrong"}
    assert jobs_that_wait(client.redis) == 0


def test_the_same_idempotency_key_is_the_same_job(
    toy_worker: WorkerProcess, client: Client
) -> None:
    first = client.submit(prompt="x", max_tokens=2, idempotency_key="once")
    again = client.submit(prompt="x", max_tokens=2, idempotency_key="once")
    other = client.submit(prompt="x", max_tokens=2, idempotency_key="twice")
    assert again.id == first.id != other.id
    assert first.result(GET_S) == again.result(GET_S)


def test_a_model_must_be_named_if_there_are_several(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("several")
    with own_redis() as server, Client(server.url) as client:
        with pytest.raises(ModelNotServed, match="llorch worker"):
            client.submit(prompt="x")
        with running_worker(server.url, folder, name="a", model_name="first"):
            assert client.submit(prompt="x", max_tokens=1).result(GET_S).model == "first"
            with running_worker(server.url, folder, name="b", model_name="second"):
                with pytest.raises(InvalidRequest, match="first, second"):
                    client.submit(prompt="x")
                with Client(server.url, model="second") as fixed:
                    assert fixed.submit(prompt="x", max_tokens=1).result(GET_S).model == "second"
        # Both workers are gone now. Their jobs wait.
        waiting = client.submit(prompt="x", max_tokens=1, model="second")
        assert waiting.status().state == "queued"
        with pytest.raises(InvalidRequest, match="first, second"):
            client.submit(prompt="x")


def test_jobs_without_a_models_name_do_not_read_all_workers_each(
    toy_worker: WorkerProcess, client: Client
) -> None:
    """A fleet may have a thousand."""
    jobs = [client.submit(prompt="x", max_tokens=1)]
    client.redis.config_resetstat()
    jobs += [client.submit(prompt="x", max_tokens=1) for _ in range(50)]
    stats = client.redis.info("commandstats")
    assert stats.get("cmdstat_smembers", {"calls": 0})["calls"] < len(jobs) / 2
    assert {job.result(GET_S).model for job in jobs} == {jobs[0].result(GET_S).model}


def test_an_unreachable_redis_is_one_sentence_with_a_remedy_and_without_the_password() -> None:
    url = f"redis://user:hunter2@127.0.0.1:{free_port()}/0"
    began_s = time.monotonic()
    with Client(url) as client:
        for use in (
            lambda: client.submit(prompt="x"),
            lambda: client.job("a").result(5),
            lambda: next(iter(client.job("a").stream())),
            lambda: client.job("a").cancel(),
            lambda: client.job("a").status(),
            client.models,
            client.workers,
        ):
            with pytest.raises(BrokerUnavailable, match="correct the URL") as caught:
                use()
            assert "hunter2" not in str(caught.value)
            assert "\n" not in str(caught.value)
    assert time.monotonic() - began_s < 20


def test_a_malformed_url_is_refused_as_such() -> None:
    with pytest.raises(BrokerUnavailable, match="not a Redis URL"):
        Client("http://localhost")


def test_settings_come_from_the_environment(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLORCH_REDIS_URL", redis_server.url)
    with Client() as client:
        assert client.settings.redis_url == redis_server.url
        assert client.settings == Settings()
