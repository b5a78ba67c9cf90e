"""Readers of jobs survive the deaths of gateways, workers and Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llorch_worker.client import Client
from tests.gateway import sse
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, running_worker, wait_until
from tests.store import entries_of
from tests.toy_generation import token_id

TOKENS, SEED = 60, 3
AWAY_S = 3.0
QUICK_LEASE = {"lease_s": 3, "sweep_s": 0.5, "TOY_STEP_MS": 5, "model_name": "toy"}


@pytest.fixture
def gateways(
    own_server: RedisServer, tmp_path: Path
) -> Iterator[tuple[GatewayProcess, GatewayProcess]]:
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder in folders:
        folder.mkdir()
    with (
        running_gateway(own_server.url, folders[0]) as first,
        running_gateway(own_server.url, folders[1]) as second,
    ):
        yield first, second


def submit(gateway: GatewayProcess, prompt: str, **fields: Any) -> str:
    body = {"prompt": prompt, "max_tokens": TOKENS, "seed": SEED, **fields}
    answer = httpx.post(f"{gateway.url}/v1/jobs", json=body)
    assert answer.status_code == 202, answer.text
    return str(answer.json()["id"])


class Reader:
    """Reads a job's events in a thread, until they end or the connection breaks."""

    def __init__(self, gateway: GatewayProcess, job_id: str) -> None:
        self.found: list[sse.ServerSentEvent] = []
        self._url = f"{gateway.url}/v1/jobs/{job_id}/events"
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def has(self, tokens: int) -> Reader:
        wait_until(lambda: len(sse.token_ids(self.found)) >= tokens, what=f"{tokens} tokens")
        return self

    def end(self) -> list[sse.ServerSentEvent]:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.found

    def _read(self) -> None:
        try:
            with httpx.stream("GET", self._url, timeout=60) as response:
                self.found.extend(sse.events(response.iter_lines()))
        except httpx.TransportError:
            pass


def assert_whole(found: list[sse.ServerSentEvent]) -> None:
    assert sse.token_ids(found) == [token_id(SEED, i) for i in range(TOKENS)]
    assert sse.text(found) == "".join(f"w{i} " for i in range(TOKENS))
    assert [e.type for e in found if e.type not in ("started", "tokens")] == ["finished"]


def test_a_reader_whose_gateway_is_killed_goes_on_at_another(
    gateways: tuple[GatewayProcess, GatewayProcess], own_worker: WorkerProcess, latch: Latch
) -> None:
    first, second = gateways
    job_id = submit(first, latch.prompt(after=20))
    reader = Reader(first, job_id).has(20)
    first.kill()
    found = reader.end()
    latch.open()
    assert_whole(found + sse.read(second.url, job_id, found[-1].id))


def test_a_reader_notices_the_death_of_a_worker_only_as_a_pause(
    gateways: tuple[GatewayProcess, GatewayProcess],
    own_server: RedisServer,
    latch: Latch,
    tmp_path: Path,
) -> None:
    first, second = gateways
    with running_worker(own_server.url, tmp_path, **QUICK_LEASE) as doomed:
        job_id = submit(first, latch.prompt(after=20))
        reader = Reader(first, job_id).has(20)
        doomed.process.kill()
        doomed.process.wait()
    seen = reader.found[-1].id
    latch.open()
    with running_worker(own_server.url, tmp_path, name="w2", **QUICK_LEASE):
        found = reader.end()
        assert_whole(found)
        assert [e.type for e in found].count("started") == 2
        # And so does one who comes back after the death.
        place = [e.id for e in found].index(seen)
        assert_whole(found[: place + 1] + sse.read(second.url, job_id, seen))


def test_a_reader_bears_seconds_without_redis(
    gateways: tuple[GatewayProcess, GatewayProcess],
    own_server: RedisServer,
    own_worker: WorkerProcess,
    latch: Latch,
) -> None:
    first, second = gateways
    job_id = submit(first, latch.prompt(after=20))
    reader = Reader(first, job_id).has(20)
    own_server.halt()
    answer = httpx.post(f"{second.url}/v1/jobs", json={"prompt": "x"}, timeout=60)
    assert answer.status_code == 503
    assert answer.json()["error"]["llorch_code"] == "REDIS_UNREACHABLE"
    assert int(answer.headers["retry-after"]) > 0
    latch.open()
    threading.Event().wait(AWAY_S)
    own_server.start()
    assert_whole(reader.end())
    assert_whole(sse.read(second.url, job_id))
    assert httpx.get(f"{second.url}/v1/jobs/{job_id}").json()["status"] == "succeeded"


def test_a_reader_who_comes_back_after_redis_lost_its_last_writes_sees_nothing_twice(
    gateways: tuple[GatewayProcess, GatewayProcess],
    own_server: RedisServer,
    own_client: Client,
    make_latch: Any,
    tmp_path: Path,
) -> None:
    first, second = gateways
    latch = make_latch("end")
    with running_worker(own_server.url, tmp_path, **QUICK_LEASE):
        job_id = submit(first, latch.prompt(after=TOKENS - 10))
        reader = Reader(first, job_id)

        def written() -> int:
            return sum("tokens" in event for _, event in entries_of(own_client.redis, job_id))

        wait_until(lambda: written() >= 2)
        kept = own_server.file_bytes
        reader.has(TOKENS - 10)
        seen = list(reader.found)
        own_server.restart_from(kept)
        latch.open()
        assert_whole(seen + sse.read(second.url, job_id, seen[-1].id))
        assert_whole(reader.end())
