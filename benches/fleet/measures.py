"""Loads on a fleet of stubs or of whole workers, and what Redis reports of them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import redis
from celery import Celery

from benches.fleet.stubs import MODEL
from llorch_worker.bench.instruments.percentiles import percentiles_ms
from llorch_worker.broker import keys, registry
from llorch_worker.broker.connection import connect
from llorch_worker.broker.enqueue import enqueue
from llorch_worker.broker.placement import Placement
from llorch_worker.broker.producer import producer_app
from llorch_worker.broker.queues import normal_queue
from llorch_worker.contract import TASK_NAME, GenerationRequest
from tests.services import own_redis, running_worker, wait_until

SETTLE_S = 13.0
"""Until the watcher has counted the workers, and looks as rarely as it does when all are idle."""
IDLE_S = 10.0
GIVE_UP_S = 60.0
REQUEST = {"prompt": "x", "max_tokens": 1}
PRODUCERS = ("ours", "placed", "stock")
BEGINNINGS = 64

Push = Callable[[int], None]


@dataclass(frozen=True)
class Usage:
    """What Redis has done so far."""

    commands: float
    """Also those inside scripts."""
    cpu_us: float
    wakes: float
    """Waits for a ring that began."""
    at_s: float

    @classmethod
    def read(cls, client: redis.Redis) -> Usage:
        stats: dict[str, Any] = client.info("commandstats")
        cpu: dict[str, Any] = client.info("cpu")
        return cls(
            commands=sum(each["calls"] for each in stats.values()),
            cpu_us=1e6 * (cpu["used_cpu_user"] + cpu["used_cpu_sys"]),
            wakes=stats.get("cmdstat_blpop", {"calls": 0})["calls"],
            at_s=time.monotonic(),
        )

    def __sub__(self, other: Usage) -> Usage:
        return Usage(*(mine - its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> Usage:
        return Usage(*(factor * mine for mine in astuple(self)))


class Stubs:
    """A process of stubs."""

    def __init__(self, url: str, first: int, workers: int, slots: int, service_s: float) -> None:
        command = [sys.executable, "-m", "benches.fleet.stubs", url]
        self._process = subprocess.Popen(
            [*command, *map(str, (first, workers, slots, service_s))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> dict[str, list[tuple[str, int]]]:
        """Which stub claimed which jobs, each with its time in us."""
        claimed: dict[str, list[tuple[str, int]]] = json.loads(self._process.communicate()[0])
        return claimed


@contextmanager
def stubs(url: str, *workers: int, slots: int = 4, service_s: float = 0.0) -> Iterator[list[Stubs]]:
    """A process for each number of ``workers``."""
    first = [sum(workers[:i]) for i in range(len(workers))]
    started = [Stubs(url, at, n, slots, service_s) for at, n in zip(first, workers, strict=True)]
    try:
        for each in started:
            each.wait_ready()
        yield started
    finally:
        for each in started:
            each.kill()


@contextmanager
def real_workers(url: str, workers: int) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        for number in range(workers):
            options: dict[str, Any] = {"name": f"real{number}", "fresh": True, "TOY_STEP_MS": 1}
            running.enter_context(
                running_worker(url, Path(folder), model_name=MODEL, max_sequences=4, **options)
            )
        yield


class Producer:
    """Pushes jobs, by itself or as a stock producer, and remembers when.

    Redis runs on this machine, so both have one clock.
    """

    def __init__(self, client: redis.Redis, url: str) -> None:
        self.sent_us: dict[str, float] = {}
        self._client = client
        self._app = producer_app(url)
        self._placement = Placement(client)
        self._card = registry.ModelCard(name=MODEL, max_context=4096, last_seen=0)
        with Celery("stock", broker="memory://", set_as_current=False) as app:
            message = app.amqp.as_task_v2("@ID@", TASK_NAME, kwargs=REQUEST)
            headers = message.headers | {"id": "@ID@"}
        body = json.dumps(message.body)
        self._message = json.dumps(
            {
                "body": body, "content-encoding": "utf-8", "content-type": "application/json",
                "headers": headers,
                "properties": {
                    "correlation_id": "@ID@", "delivery_tag": "@ID@", "delivery_mode": 2,
                    "priority": 0, "body_encoding": "",
                    "delivery_info": {"exchange": "", "routing_key": normal_queue(MODEL)},
                },
            }
        )  # fmt: skip

    def stock(self, jobs: int) -> None:
        """Pushes them at once, with one LPUSH each and nothing else."""
        ids = [str(uuid4()) for _ in range(jobs)]
        with self._client.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.lpush(normal_queue(MODEL), self._message.replace("@ID@", job_id))
            self.sent_us |= dict.fromkeys(ids, time.time() * 1e6)
            pipe.execute()

    def ours(self, jobs: int) -> None:
        self._enqueue(jobs, None)

    def placed(self, jobs: int) -> None:
        self._enqueue(jobs, f"{len(self.sent_us) % BEGINNINGS}")

    def _enqueue(self, jobs: int, affinity_key: str | None) -> None:
        for _ in range(jobs):
            job_id = str(uuid4())
            request = GenerationRequest.model_validate(REQUEST | {"affinity_key": affinity_key})
            self.sent_us[job_id] = time.time() * 1e6
            places = self._placement.candidates(request, MODEL)
            enqueue(
                self._client, self._app, request, model=self._card, job_id=job_id, places=places
            )

    def wait(self) -> float:
        """Until all have ended; returns the seconds that it took."""
        began_s = time.monotonic()
        left = set(self.sent_us)
        while left:
            if time.monotonic() - began_s > GIVE_UP_S:
                raise TimeoutError(f"{len(left)} of {len(self.sent_us)} jobs did not end")
            with self._client.pipeline(transaction=False) as pipe:
                asked = list(left)
                for job_id in asked:
                    pipe.hget(keys.job(job_id), "state")
                left = {
                    i for i, state in zip(asked, pipe.execute(), strict=True) if state != "ended"
                }
            time.sleep(0.1)
        return time.monotonic() - began_s

    def latencies_s(self, claimed_us: dict[str, float]) -> list[float]:
        return [(claimed_us[i] - sent) / 1e6 for i, sent in self.sent_us.items()]


def spread(counts: list[int]) -> str:
    return f"{min(counts)} / {statistics.median(counts):.0f} / {max(counts)}"


@dataclass(frozen=True)
class Steady:
    """Jobs one by one, at a rate."""

    commands: float
    """A job; those of an idle fleet are subtracted."""
    cpu_us: float
    """Of Redis, a job; that of an idle fleet is subtracted."""
    wakes: float
    """Waits for a ring that began, a job."""
    p50_ms: float
    p99_ms: float
    jobs_a_worker: str
    idle_commands: float
    """A second and worker."""
    jobs_per_s: float


def pace(push: Push, rate: float, jobs: int) -> None:
    began_s = time.monotonic()
    for number in range(jobs):
        time.sleep(max(0.0, began_s + number / rate - time.monotonic()))
        push(1)


def measure(client: redis.Redis, push: Push, rate: float, jobs: int) -> tuple[Usage, Usage, float]:
    """Usage of an idle second, what one job adds to it, and the rate that was reached."""
    first = Usage.read(client)
    time.sleep(IDLE_S)
    before = Usage.read(client)
    idle = (before - first) * (1 / (before.at_s - first.at_s))
    pace(push, rate, jobs)
    took_s = time.monotonic() - before.at_s
    time.sleep(0.5)
    busy = Usage.read(client) - before
    return idle, (busy - idle * busy.at_s) * (1 / jobs), jobs / took_s


def check_all_live(client: redis.Redis, workers: int) -> None:
    """Jobs are neither placed with a worker that counts as gone nor shared with it."""
    living = len(registry.living(client, MODEL))
    if living != workers:
        raise RuntimeError(f"Redis knows {living} of {workers} workers")


def steady(workers: int, name: str, *, rate: float, jobs: int, real: bool = False) -> Steady:
    """``name``: the producer, one of :data:`PRODUCERS`."""
    with own_redis() as server, connect(server.url) as client, ExitStack() as fleet:
        producer = Producer(client, server.url)
        push: Push = getattr(producer, name)
        started = []
        if real:
            fleet.enter_context(real_workers(server.url, workers))
        else:
            started = fleet.enter_context(stubs(server.url, workers))
        time.sleep(SETTLE_S)
        idle, used, reached = measure(client, push, rate, jobs)
        producer.wait()
        check_all_live(client, workers)
        if real:
            fences = {i: float(client.hget(keys.job(i), "fence") or 0) for i in producer.sent_us}
            names = [client.hget(keys.job(i), "worker") for i in producer.sent_us]
            counts = [names.count(name) for name in set(names)]
            counts += [0] * (workers - len(counts))
        else:
            claimed = started[0].end()
            fences = {i: float(at) for jobs_ in claimed.values() for i, at in jobs_}
            counts = [len(jobs_) for jobs_ in claimed.values()]
        waits = percentiles_ms(producer.latencies_s(fences))
        return Steady(
            used.commands, used.cpu_us, used.wakes, waits.p50,
            waits.p99, spread(counts), idle.commands / workers, reached,
        )  # fmt: skip


@dataclass(frozen=True)
class Burst:
    jobs: int
    claimed_s: float
    """From the push, or the first claim, to the last."""
    jobs_a_worker: str
    commands: float
    wakes: float


def burst(workers: int, jobs: int, slots: int) -> Burst:
    """Many jobs at once for an idle fleet."""
    with own_redis() as server, connect(server.url) as client:
        producer = Producer(client, server.url)
        with stubs(server.url, workers, slots=slots, service_s=1.0) as (fleet,):
            time.sleep(SETTLE_S)
            before = Usage.read(client)
            producer.stock(jobs)
            wait_until(lambda: not client.llen(normal_queue(MODEL)), timeout_s=GIVE_UP_S)
            after = Usage.read(client)
            producer.wait()
            claimed = fleet.end()
        return _burst(producer, claimed, before, after)


def start(workers: int, jobs: int, slots: int) -> Burst:
    """All workers start at once, while the jobs wait."""
    with own_redis() as server, connect(server.url) as client:
        producer = Producer(client, server.url)
        producer.stock(jobs)
        before = Usage.read(client)
        with stubs(server.url, workers, slots=slots, service_s=1.0) as (fleet,):
            wait_until(lambda: not client.llen(normal_queue(MODEL)), timeout_s=GIVE_UP_S)
            after = Usage.read(client)
            producer.wait()
            claimed = fleet.end()
        first_us = min(at for jobs_ in claimed.values() for _, at in jobs_)
        producer.sent_us = dict.fromkeys(producer.sent_us, first_us)
        return _burst(producer, claimed, before, after)


def _burst(
    producer: Producer,
    claimed: dict[str, list[tuple[str, int]]],
    before: Usage,
    after: Usage,
) -> Burst:
    fences = {i: float(at) for jobs_ in claimed.values() for i, at in jobs_}
    jobs = len(producer.sent_us)
    return Burst(
        jobs,
        max(producer.latencies_s(fences)),
        spread([len(jobs_) for jobs_ in claimed.values()]),
        (after.commands - before.commands) / jobs,
        (after.wakes - before.wakes) / jobs,
    )


def half_die(workers: int, jobs: int, slots: int) -> float:
    """Half of the workers are killed with all slots full; seconds until all jobs have ended."""
    with own_redis() as server, connect(server.url) as client:
        producer = Producer(client, server.url)
        sizes = (workers // 2, workers - workers // 2)
        with stubs(server.url, *sizes, slots=slots, service_s=0.5) as (dying, _):
            time.sleep(SETTLE_S)
            producer.stock(jobs)
            wait_until(lambda: client.zcard(keys.LEASES) >= min(jobs, workers * slots) * 0.9)
            dying.kill()
            return producer.wait()
