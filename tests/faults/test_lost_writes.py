"""A job that is claimed again while it still runs here: its stream and its result agree.

Redis loses the tail of its append-only file, or the lease lapses while the worker is cut off.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading

import pytest

from llorch_worker.broker import keys
from llorch_worker.client import AsyncClient, Client, Job
from llorch_worker.client.stream import StreamEntry
from llorch_worker.contract import TERMINAL_EVENTS, Tokens, decode_event
from llorch_worker.settings import Settings
from tests.broker.steps import sweep
from tests.faults.conftest import StartWorker
from tests.faults.proxy import FaultProxy
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, token_ids, wait_until
from tests.store import held_ids, leases_in
from tests.toy_generation import token_id

TOKENS, SEED = 200, 7
TRIES = 40 if os.environ.get("LLORCH_FULL_SIZE") else 1
GET_S = 60
QUICK = {"TOY_STEP_MS": 4, "max_sequences": 2}


class Reader:
    """Reads a job's stream while it grows."""

    def __init__(self, client: Client, job: Job) -> None:
        self._entries: list[StreamEntry] = []
        self._read = self._follow(client.settings, job.id)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._read))
        self._thread.start()

    async def _follow(self, settings: Settings, job_id: str) -> None:
        async with AsyncClient(settings) as client:
            # A busy machine may take seconds to restart Redis.
            async for entry in client.job(job_id).stream(patience_s=GET_S):
                self._entries.append(entry)

    def assert_saw_each_token_once(self) -> None:
        self._thread.join(GET_S)
        assert not self._thread.is_alive()
        assert_whole(self._entries)


def assert_whole(entries: list[StreamEntry]) -> None:
    """Every token once and in order, its text, and one end."""
    assert token_ids(entries) == [token_id(SEED, index) for index in range(TOKENS)]
    text = "".join(e.event.text for e in entries if isinstance(e.event, Tokens))
    assert text == "".join(f"w{index} " for index in range(TOKENS))
    ends = [entry for entry in entries if isinstance(entry.event, TERMINAL_EVENTS)]
    assert ends == entries[-1:]


def assert_agree(job: Job) -> None:
    """The stream, read from its start, and the result have the same tokens."""
    choice = job.result(GET_S).choices[0]
    entries = list(job.stream(timeout=GET_S))
    assert_whole(entries)
    assert list(choice.token_ids) == token_ids(entries)


def assert_settled(client: Client, job: Job, reader: Reader) -> None:
    assert_agree(job)
    reader.assert_saw_each_token_once()
    wait_until(lambda: not held_ids(client.redis), what="every claim to be settled")


def begun(client: Client, job: Job, tokens: int) -> Job:
    """Waits until the stream has about ``tokens`` tokens."""

    def written() -> int:
        last = client.redis.xrevrange(keys.events(job.id), count=1)
        event = decode_event(last[0][1]["event"]) if last else None
        return event.index + len(event.ids) if isinstance(event, Tokens) else 0

    wait_until(lambda: written() >= tokens, what=f"{tokens} tokens")
    return job


def submit(client: Client, prompt: str = "x") -> Job:
    return client.submit(prompt=prompt, max_tokens=TOKENS, seed=SEED)


@pytest.fixture
def worker(own_server: RedisServer, client: Client, start_worker: StartWorker) -> WorkerProcess:
    return start_worker("w1", **QUICK)


@pytest.mark.parametrize("attempt", range(TRIES))
def test_a_job_whose_claim_redis_lost_goes_on_under_a_second_claim(
    own_server: RedisServer, client: Client, worker: WorkerProcess, attempt: int
) -> None:
    with worker.paused():
        job = submit(client)
        before_the_claim = own_server.file_bytes
    reader = Reader(client, job)
    begun(client, job, random.Random(attempt).randrange(1, TOKENS))
    own_server.restart_from(before_the_claim)
    assert_settled(client, job, reader)


def test_a_first_run_that_ends_after_the_second_claim_leaves_the_end_to_it(
    own_server: RedisServer, client: Client, start_worker: StartWorker, latch: Latch
) -> None:
    # The worker learns of the lost claim by the second one, before it renews its leases.
    worker = start_worker("w1", max_sequences=2, lease_s=60, sweep_s=15)
    with worker.paused():
        job = submit(client, latch.prompt(after=TOKENS - 1))
        before_the_claim = own_server.file_bytes
    reader = Reader(client, begun(client, job, TOKENS - 1))
    own_server.restart_from(before_the_claim)
    wait_until(lambda: held_ids(client.redis), what="the second claim")
    latch.open()
    assert_settled(client, job, reader)


@pytest.mark.parametrize("attempt", range(TRIES))
def test_a_job_whose_stream_lost_its_tail_writes_it_again(
    own_server: RedisServer, client: Client, worker: WorkerProcess, attempt: int
) -> None:
    dice = random.Random(attempt)
    job = submit(client)
    reader = Reader(client, job)
    kept = dice.randrange(1, TOKENS // 2)
    begun(client, job, kept)
    file_bytes = own_server.file_bytes
    begun(client, job, dice.randrange(kept + 1, TOKENS))
    own_server.restart_from(file_bytes)
    assert_settled(client, job, reader)


def test_a_result_that_redis_lost_with_entries_before_it_is_stored_again(
    own_server: RedisServer, client: Client, worker: WorkerProcess, latch: Latch
) -> None:
    job = submit(client, latch.prompt(after=TOKENS - 1))
    begun(client, job, 50)
    file_bytes = own_server.file_bytes
    begun(client, job, TOKENS - 1)
    reader = Reader(client, job)
    own_server.restart_from(file_bytes)
    latch.open()
    assert_agree(job)
    reader.assert_saw_each_token_once()


@pytest.mark.parametrize("attempt", range(TRIES))
def test_a_job_that_lapsed_while_its_worker_was_cut_off_goes_on_there(
    client: Client,
    proxy: FaultProxy,
    start_worker: StartWorker,
    attempt: int,
) -> None:
    start_worker("w1", url=proxy.url, TOY_STEP_MS=15, max_sequences=2)
    job = submit(client)
    reader = Reader(client, job)
    begun(client, job, random.Random(attempt).randrange(1, 60))
    proxy.hold()
    wait_until(lambda: lapsed(client, job), what="the lease to lapse")
    assert sweep(client.redis) == [job.id]
    proxy.heal()
    assert_settled(client, job, reader)


def lapsed(client: Client, job: Job) -> bool:
    seconds, microseconds = client.redis.time()
    until_ms = leases_in(client.redis).get(job.id)
    return bool(until_ms < seconds * 1e3 + microseconds / 1e3)
