"""Batches whose gateway dies, whose Redis goes away, or whose time ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from tests.gateway.test_batches import api_of, begun, documents, ended, line
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, running_worker, stopped, wait_until
from tests.sizes import sized
from tests.store import job_ids, record_of

WINDOW = 16
"""The lines that are in the queue at a time."""
LINES = sized(usual=1_100, full=2_000)
"""Two parts of the answers."""
LATCHED = LINES // 3, 2 * LINES // 3
REFUSED = {n for n in range(LINES) if n % sized(usual=5, full=1) and n not in LATCHED}
"""Lines that are no job: in the usual size most, which are answered soon."""


@pytest.fixture
def quick_worker(own_server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    with running_worker(
        own_server.url, tmp_path, model_name="toy", max_sequences=WINDOW, TOY_STEP_MS=1
    ) as worker:
        yield worker


@pytest.fixture
def start(own_server: RedisServer, tmp_path: Path) -> Iterator[Callable[..., GatewayProcess]]:
    """Starts gateways over one folder of files."""
    with ExitStack() as gateways:
        number = iter(range(100))

        def start(**settings: object) -> GatewayProcess:
            folder = tmp_path / f"gateway{next(number)}"
            folder.mkdir()
            settings = {"files": tmp_path / "files", "batch_window": WINDOW} | settings
            return gateways.enter_context(running_gateway(own_server.url, folder, **settings))

        yield start


def halting(api: openai.OpenAI, latch: Latch) -> tuple[Batch, int]:
    """Begins a batch that stands still at the latch, with a full window in the queue.

    Returns it and the number of its lines.
    """
    free: list[dict[str, Any]] = [{}] * sized(usual=WINDOW, full=600)
    bodies = [*free, *[{"prompt": latch.prompt(), "max_tokens": 2}] * WINDOW, *free]
    batch = begun(api, [line(f"{n}", **body) for n, body in enumerate(bodies)])
    return batch, len(bodies)


def done_lines(api: openai.OpenAI, batch: Batch) -> int:
    counts = api.batches.retrieve(batch.id).request_counts
    return 0 if counts is None else counts.completed + counts.failed


@contextmanager
def taken_over(
    start: Callable[..., GatewayProcess], latch: Latch, redis_url: str
) -> Iterator[tuple[GatewayProcess, Batch]]:
    """A gateway, which the block stops, and its batch under way, which another then completes."""
    first = start()
    with api_of(first) as api, connect(redis_url) as client:
        batch = begun(api, [line("a", prompt=latch.prompt(), max_tokens=2)])
        wait_until(lambda: client.hget(keys.gateway_document(batch.id), "fence"))
        yield first, batch
    latch.open()
    with api_of(start()) as api:
        assert ended(api, batch).status == "completed"


def each_line_once(
    api: openai.OpenAI,
    done: Batch,
    lines: int,
    redis_url: str,
    refused: Collection[int] = (),
) -> None:
    assert done.status == "completed"
    jobs_of = [n for n in range(lines) if n not in refused]
    answers, errors = (documents(api, file) for file in (done.output_file_id, done.error_file_id))
    assert [answer["custom_id"] for answer in answers] == [f"{n}" for n in jobs_of]
    assert [error["custom_id"] for error in errors] == [f"{n}" for n in sorted(refused)]
    assert done.request_counts is not None
    assert done.request_counts.completed == len(jobs_of)
    assert done.request_counts.total == lines
    # No line ran as two jobs.
    ids = [answer["response"]["request_id"] for answer in answers]
    with connect(redis_url) as client:
        jobs = job_ids(client)
        runs = Counter(record_of(client, job_id).get("attempts") for job_id in ids)
    assert jobs == set(ids)
    assert runs == {"1": len(jobs_of)}


def test_other_gateways_take_a_batch_over_and_every_line_is_there_once(
    own_server: RedisServer,
    quick_worker: WorkerProcess,
    start: Callable[..., GatewayProcess],
    make_latch: Callable[[str], Latch],
) -> None:
    gateway = start()
    latches = {n: make_latch(f"{n}") for n in LATCHED}
    bodies: dict[int, dict[str, Any]] = {n: {"stream": True} for n in REFUSED}
    bodies |= {n: {"prompt": latch.prompt(), "max_tokens": 2} for n, latch in latches.items()}
    with api_of(gateway) as api:
        batch = begun(api, [line(f"{n}", **bodies.get(n, {})) for n in range(LINES)])
    for number, latch in latches.items():
        with api_of(gateway) as api:
            # What came before has ended; of what follows, some has and some waits in the queue.
            wait_until(lambda api=api, number=number: done_lines(api, batch) >= number)
        successor = start()
        gateway.kill()
        latch.open()
        gateway = successor
    with api_of(gateway) as api:
        each_line_once(api, ended(api, batch), LINES, own_server.url, REFUSED)


def test_a_gateway_that_was_only_paused_changes_nothing_any_more(
    own_server: RedisServer,
    quick_worker: WorkerProcess,
    start: Callable[..., GatewayProcess],
    latch: Latch,
) -> None:
    first = start()
    with api_of(first) as api:
        batch, lines = halting(api, latch)
        wait_until(lambda: done_lines(api, batch) > 0)
    with stopped(first.process):
        latch.open()
        second = start()
        with api_of(second) as api:
            done = ended(api, batch)
    with api_of(second) as api:
        wait_until(lambda: "another gateway has taken it" in first.log.read_text())
        assert api.batches.retrieve(batch.id) == done
        each_line_once(api, done, lines, own_server.url)


def test_a_batch_goes_on_after_its_gateway_died_and_redis_clock_was_set_back(
    own_server: RedisServer,
    own_worker: WorkerProcess,
    start: Callable[..., GatewayProcess],
    latch: Latch,
) -> None:
    with taken_over(start, latch, own_server.url) as (first, batch):
        first.process.kill()
        first.process.wait()
        with connect(own_server.url) as client:
            # As after TIME went back by an hour.
            client.zincrby(keys.BATCH_LEASES, 3_600_000, batch.id)


def test_a_gateway_that_stops_hands_its_batches_over(
    own_server: RedisServer,
    own_worker: WorkerProcess,
    start: Callable[..., GatewayProcess],
    latch: Latch,
) -> None:
    with taken_over(start, latch, own_server.url) as (first, batch):
        first.process.terminate()
        first.process.wait()
        with connect(own_server.url) as client:
            # Its lease has ended, not run out.
            assert client.zscore(keys.BATCH_LEASES, batch.id) <= client.time()[0] * 1e3 + 1e3


def test_a_batch_waits_for_redis(
    own_server: RedisServer,
    quick_worker: WorkerProcess,
    start: Callable[..., GatewayProcess],
    latch: Latch,
) -> None:
    with api_of(start()) as api:
        batch, lines = halting(api, latch)
        wait_until(lambda: done_lines(api, batch) > 0)
        own_server.halt()
        own_server.start()
        latch.open()
        each_line_once(api, ended(api, batch), lines, own_server.url)


def test_a_batch_expires_with_what_it_has(
    own_server: RedisServer,
    own_worker: WorkerProcess,
    start: Callable[..., GatewayProcess],
    latch: Latch,
) -> None:
    with api_of(start()) as api, connect(own_server.url) as client:
        held = [line(f"{n}", prompt=latch.prompt(), max_tokens=2) for n in range(3)]
        batch = begun(api, [line("done"), *held], completion_window="1h")
        assert batch.expires_at == batch.created_at + 3600
        wait_until(lambda: done_lines(api, batch) == 1)
        # A window of an hour is the shortest, so that the record must say that it began before.
        document = client.hget(keys.gateway_document(batch.id), "document")
        client.hset(
            keys.gateway_document(batch.id),
            mapping={
                "document": document.replace(f'"expires_at":{batch.expires_at}', '"expires_at":1'),
                "fence": "taken away",
            },
        )
        done = ended(api, batch)
        assert (done.status, bool(done.expired_at)) == ("expired", True)
        assert [a["custom_id"] for a in documents(api, done.output_file_id)] == ["done"]
        errors = documents(api, done.error_file_id)
        assert [e["custom_id"] for e in errors] == ["0", "1", "2"]
        assert {e["error"]["code"] for e in errors} == {"batch_expired"}
