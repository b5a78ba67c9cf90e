"""The time until an idle worker claims a job, and the load that waiting puts on Redis.

    python -m benches.queue_latency [jobs]

Starts a redis-server and a worker with the toy engine. For each priority, and for a stock Celery
producer, jobs are enqueued one at a time, and the time from the enqueue to the claim is read from
Redis' own clock: the ``llorch_enqueued_at`` header, or the moment before a stock producer's send,
against the claim in the job's record. Bounds: 10 ms, and 200 commands a second when idle.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
from celery import Celery

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.services import own_redis, running_worker, wait_until

JOBS = 100
PAUSE_S = 0.03
IDLE_WINDOW_S = 5.0
GET_S = 30.0


def redis_ms(client: redis.Redis) -> float:
    """Redis' clock, in ms."""
    seconds, microseconds = client.time()
    return float(seconds) * 1e3 + float(microseconds) / 1e3


def claimed_ms(client: redis.Redis, job_id: str) -> float:
    found = wait_until(lambda: client.hget(keys.job(job_id), "first_claim_ms"))
    assert found is not None
    return float(found)


def latencies_ms(client: Client, submit: Callable[[], str], jobs: int) -> list[float]:
    """From before the enqueue to the claim, so it includes the round trip of the enqueue."""
    found = []
    for _ in range(jobs):
        # Let the worker become idle.
        time.sleep(PAUSE_S)
        before_ms = redis_ms(client.redis)
        job_id = submit()
        # The claim's time is in whole milliseconds, rounded down.
        found.append(max(0.0, claimed_ms(client.redis, job_id) + 0.5 - before_ms))
        client.job(job_id).result(GET_S)
    return found


def commands_per_s(client: redis.Redis) -> float:
    def processed() -> int:
        return int(client.info("stats")["total_commands_processed"])

    before = processed()
    time.sleep(IDLE_WINDOW_S)
    return (processed() - before - 1) / IDLE_WINDOW_S


def main(jobs: int) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        own_redis() as server,
        running_worker(server.url, Path(folder), model_name="toy", fresh=True, TOY_STEP_MS=1),
        Client(server.url, model="toy") as client,
        Celery("stock", broker=server.url, set_as_current=False) as stock,
    ):
        ask: dict[str, Any] = {"prompt": "x", "max_tokens": 1}

        def stock_submit(**options: object) -> str:
            sent = stock.send_task(TASK_NAME, kwargs=ask, queue="llorch.toy", **options)
            return str(sent.id)

        producers: dict[str, Callable[[], str]] = {
            "high": lambda: client.submit(**ask, priority="high").id,
            "normal": lambda: client.submit(**ask).id,
            "low": lambda: client.submit(**ask, priority="low").id,
            "stock": stock_submit,
            "stock, priority=3": lambda: stock_submit(priority=3),
            "stock, priority=6": lambda: stock_submit(priority=6),
        }
        stock_submit()
        print(f"enqueue to claim by an idle worker, ms ({jobs} jobs each)")
        print(f"{'':20}{'p50':>8}{'p99':>8}{'max':>8}")
        for name, submit in producers.items():
            found = sorted(latencies_ms(client, submit, jobs))
            p99 = found[min(len(found) - 1, round(0.99 * len(found)))]
            print(f"{name:20}{statistics.median(found):8.1f}{p99:8.1f}{found[-1]:8.1f}")
        print(f"commands a second of an idle worker: {commands_per_s(client.redis):.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else JOBS)
