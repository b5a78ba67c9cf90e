"""Readers that are slow, vanish or never read cost the worker no memory."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.client.stream import StreamEntry
from tests.faults.conftest import StartWorker
from tests.faults.proxy import LOCALHOST
from tests.faults.witness import Witness
from tests.services import RedisServer, WorkerProcess, token_ids

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
            # Listens, and asks for the whole stream again and again, and reads no reply.
            for command in (
                request("SUBSCRIBE", keys.events_channel(0, job.id)),
                request("XREAD", "STREAMS", keys.events(job.id), 0) * 20,
            ):
                deaf = stack.enter_context(socket.create_connection((LOCALHOST, own_server.port)))
                deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                deaf.sendall(command)
            # One reader vanishes midway, and one pauses there.
            assert list(islice(job.stream(timeout=GET_S), 2))
            slow.append(job.stream(timeout=GET_S))
            next(slow[-1])
        witness.assert_whole(*jobs)
        assert resident_bytes(worker) - before < ALLOWED_GROWTH_BYTES
        for number, reader in enumerate(slow):
            result = jobs[number % len(jobs)].result(0)
            assert token_ids(reader) == list(result.choices[0].token_ids)
    assert worker.process.poll() is None
