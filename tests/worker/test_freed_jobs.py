"""A worker frees all of a job when the job has ended, without a garbage collection."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.latch import Latch
from tests.messages import QUEUE, envelope
from tests.services import RedisServer, WorkerProcess, begun, running_worker, wait_until
from tests.store import write_record

GET_S = 60


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    with running_worker(
        redis_server.url,
        tmp_path_factory.mktemp("watched"),
        app="tests.worker.watched_app",
        model_name="toy",
        max_sequences=4,
        TOY_STEP_MS=5,
        LLORCH_LEASE_S=1,
        LLORCH_SWEEP_S=0.2,
    ) as worker:
        yield worker


@pytest.fixture
def assert_freed(worker: WorkerProcess) -> Callable[..., None]:
    """``assert_freed(job_id, parts)``: so many parts were made of it, and nothing holds one."""

    def check(job_id: str, parts: int) -> None:
        def held() -> list[str]:
            made, freed = (
                re.findall(rf"{verb} a (\w+) of job {re.escape(job_id)}\n", worker.text())
                for verb in ("made", "freed")
            )
            assert len(made) == parts, made
            for part in freed:
                made.remove(part)
            return made

        wait_until(lambda: not held(), what=f"the parts of job {job_id} to be freed")

    return check


FIELDS = {"prompt": "x", "max_tokens": 1}


@pytest.mark.parametrize(
    ("fields", "end", "parts"),
    [
        # The request of the contract is not made of a wrong one.
        (FIELDS, "SUCCESS", 4),
        (FIELDS | {"surplus": 1}, "FAILURE", 3),
        (FIELDS | {"max_tokens": -1}, "FAILURE", 3),
        (FIELDS | {"prompt": "w " * 5000}, "FAILURE", 4),
        (FIELDS | {"prompt": "raise ValueError"}, "FAILURE", 4),
        (FIELDS | {"prompt": "raise MemoryError"}, "FAILURE", 4),
        (FIELDS | {"prompt": "raise GeneratorExit"}, "FAILURE", 4),
    ],
    ids=["good", "unknown field", "wrong field", "too long", "defect", "memory", "exit"],
)
def test_a_job_that_has_ended_is_kept_nowhere(
    stock: Celery, assert_freed: Callable[..., None], fields: dict[str, Any], end: str, parts: int
) -> None:
    sent = stock.send_task(TASK_NAME, kwargs=fields, queue=QUEUE)
    sent.get(timeout=GET_S, propagate=False)
    assert sent.state == end
    assert_freed(sent.id, parts)


def test_a_job_whose_tokens_redis_first_refused_is_kept_nowhere(
    client: Client, assert_freed: Callable[..., None]
) -> None:
    client.redis.script_flush()
    job = client.submit(prompt="x", max_tokens=30)
    job.result(GET_S)
    assert_freed(job.id, 4)


def test_a_cancelled_job_is_kept_nowhere(
    client: Client, assert_freed: Callable[..., None], latch: Latch
) -> None:
    job = begun(client.submit(prompt=latch.prompt(1), max_tokens=9))
    job.cancel()
    wait_until(lambda: job.status().state == "cancelled")
    assert_freed(job.id, 4)


def test_a_job_that_goes_on_elsewhere_is_kept_nowhere(
    client: Client, assert_freed: Callable[..., None], latch: Latch
) -> None:
    job = begun(client.submit(prompt=latch.prompt(2), max_tokens=9))
    # As if another worker had it. That one never was, so that the job comes back.
    write_record(client.redis, job.id, fence=1)
    latch.open()
    assert job.result(GET_S).attempts == 2
    assert_freed(job.id, 8)


@pytest.mark.parametrize(
    ("headers", "options"),
    [({"task": "no.such"}, {}), ({"task": TASK_NAME}, {"callbacks": 3})],
    ids=["unknown task", "wrong options"],
)
def test_a_message_that_is_no_task_is_kept_nowhere(
    client: Client,
    assert_freed: Callable[..., None],
    headers: dict[str, Any],
    options: dict[str, Any],
) -> None:
    job_id = f"of {headers['task']}"
    message = envelope([[], FIELDS, options], headers=headers | {"id": job_id})
    client.redis.lpush(QUEUE, json.dumps(message))
    wait_until(lambda: client.job(job_id).status().state == "failed")
    assert_freed(job_id, 2)


def test_a_job_inside_celerys_map_is_kept_nowhere(
    stock: Celery, assert_freed: Callable[..., None]
) -> None:
    inner = {"task": TASK_NAME, "args": [], "kwargs": {}}
    sent = stock.send_task("celery.map", kwargs={"task": inner, "it": [["x"]]}, queue=QUEUE)
    sent.get(timeout=GET_S, propagate=False)
    assert_freed(sent.id, 3)
