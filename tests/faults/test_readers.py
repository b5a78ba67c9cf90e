"""Slow readers, readers that vanish and readers that never read cost the worker nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.client.stream import StreamEntry
from llorch_worker.contract import Finished, Tokens
from tests.faults.conftest import StartWorker
from tests.faults.proxy import LOCALHOST
from tests.faults.witness import Witness
from tests.services import RedisServer, WorkerProcess, wait_until

GET_S = 60
MIB = 2**20
TOKENS = 2000
READERS = 30
ALLOWED_GROWTH_BYTES = 24 * MIB


def resident_bytes(worker: WorkerProcess) -> int:
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def request(*words: object) -> bytes:
    encoded = [str(word).encode() for word in words]
    parts = b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in encoded)
    return b"*%d\r\n%s" % (len(encoded), parts)


def tokens_of(entries: Iterator[StreamEntry]) -> list[int]:
    return [i for entry in entries if isinstance(entry.event, Tokens) for i in entry.event.ids]


def test_readers_that_do_not_read_cost_the_worker_no_memory(
    own_server: RedisServer, client: Client, witness: Witness, start_worker: StartWorker
) -> None:
    worker = start_worker(TOY_STEP_MS=1)
    witness.assert_whole(witness.send(TOKENS))
    before = resident_bytes(worker)
    jobs = [witness.begun(witness.send(TOKENS)) for _ in range(4)]
    slow: list[Iterator[StreamEntry]] = []
    with ExitStack() as stack:
        for number in range(READERS):
            job = jobs[number % len(jobs)]
            # One that asks for everything, again and again, and takes no answer.
            deaf = stack.enter_context(socket.create_connection((LOCALHOST, own_server.port)))
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.sendall(request("SET", keys.watchers(job.id), 1, "EX", 5))
            deaf.sendall(request("XREAD", "STREAMS", keys.events(job.id), 0) * 20)
            # One that vanishes in the midst, and one that pauses there.
            assert list(islice(job.stream(timeout=GET_S), 2))
            slow.append(job.stream(timeout=GET_S))
            next(slow[-1])
        witness.assert_whole(*jobs)
        assert resident_bytes(worker) - before < ALLOWED_GROWTH_BYTES
        for number, reader in enumerate(slow):
            result = jobs[number % len(jobs)].result(0)
            assert tokens_of(reader) == list(result.choices[0].token_ids)
    assert worker.process.poll() is None


def test_a_stream_expires_and_its_result_stays(client: Client, start_worker: StartWorker) -> None:
    start_worker(stream_ttl_s=1, result_ttl_s=60)
    read = client.submit(prompt="x", max_tokens=20)
    assert tokens_of(read.stream(timeout=GET_S)) == list(range(20))
    unread = client.submit(prompt="x", max_tokens=20)
    for job in (read, unread):
        assert job.result(GET_S).text.split() == [f"w{i}" for i in range(20)]
        wait_until(lambda job=job: not client.redis.exists(keys.events(job.id)), what="its expiry")
        assert 0 < client.redis.ttl(keys.result(job.id)) <= 60
        assert 0 < client.redis.ttl(keys.job(job.id)) <= 60
        # Who comes late is told the end all the same.
        (entry,) = job.stream(timeout=GET_S)
        assert isinstance(entry.event, Finished)


def test_a_stream_does_not_expire_under_a_job_that_runs(
    client: Client, start_worker: StartWorker
) -> None:
    # Twice as long as a stream is kept after its last entry.
    start_worker(stream_ttl_s=1)
    job = client.submit(prompt="x", max_tokens=400)
    assert tokens_of(job.stream(timeout=GET_S)) == list(range(400))


def test_nothing_that_a_job_left_stays_for_ever(client: Client, start_worker: StartWorker) -> None:
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
