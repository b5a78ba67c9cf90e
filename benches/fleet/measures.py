"""Loads on a fleet of stubs or of whole workers, and what Redis reports of them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import astuple, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import redis

from benches.fleet.stubs import MODEL
from llorch_worker.bench.instruments.percentiles import percentiles_ms
from llorch_worker.broker.celery.producer import producer_app
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.affinity import Affinity
from llorch_worker.broker.queues import normal_queue
from llorch_worker.broker.waiting.enqueue import enqueue
from llorch_worker.broker.waiting.waiting import length
from llorch_worker.contract import GenerationRequest
from tests.messages import GOOD_BODY, envelope
from tests.services import own_redis, running_worker, wait_until
from tests.store import leases_in, record_of

SETTLE_S = 13.0
"""Until the watcher has counted the workers, and looks as rarely as it does when all are idle."""
IDLE_S = 10.0
GIVE_UP_S = 60.0
REQUEST = {"prompt": "x", "max_tokens": 1}
MESSAGE = json.dumps(envelope(GOOD_BODY))
"""A stock producer's, with ``raw`` in place of the job's id."""
PRODUCERS = ("ours", "placed", "stock")
BEGINNINGS = 64

Push = Callable[[int], None]
Claimed = dict[str, list[tuple[str, int]]]
"""Which stub claimed which jobs, each with its time in us."""


@dataclass(frozen=True)
class Usage:
    """What Redis has done so far."""

    commands: float
    """Also those inside scripts."""
    cpu_us: float
    wakes: float
    """Waits for a wake-up that began."""
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

    def end(self) -> Claimed:
        claimed: Claimed = json.loads(self._process.communicate()[0])
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
    # The table has standard output; workers of tests print their logs there.
    with redirect_stdout(sys.stderr), TemporaryDirectory() as folder, ExitStack() as running:
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
        self._affinity = Affinity(client)
        self._card = registry.ModelCard(name=MODEL, max_context=4096, last_seen=0)

    def stock(self, jobs: int) -> None:
        """Pushes them at once, with one LPUSH each and nothing else."""
        ids = [str(uuid4()) for _ in range(jobs)]
        with self._client.pipeline(transaction=False) as pipe:
            for job_id in ids:
                pipe.lpush(normal_queue(MODEL), MESSAGE.replace('"raw', f'"{job_id}'))
            self.sent_us |= dict.fromkeys(ids, time.time() * 1e6)
            pipe.execute()

    def ours(self, jobs: int, affinity_key: str | None = None) -> None:
        for _ in range(jobs):
            job_id = str(uuid4())
            request = GenerationRequest.model_validate(REQUEST | {"affinity_key": affinity_key})
            self.sent_us[job_id] = time.time() * 1e6
            places = self._affinity.candidates(request, MODEL)
            enqueue(
                self._client, self._app, request, model=self._card, job_id=job_id, places=places
            )

    def placed(self, jobs: int) -> None:
        for _ in range(jobs):
            self.ours(1, f"{len(self.sent_us) % BEGINNINGS}")

    def wait(self) -> float:
        """Until all have ended; returns the seconds that it took."""
        began_s, left = time.monotonic(), list(self.sent_us)

        def all_ended() -> bool:
            while left and record_of(self._client, left[-1]).get("state") == "ended":
                left.pop()
            return not left

        wait_until(all_ended, timeout_s=GIVE_UP_S)
        return time.monotonic() - began_s


def spread(counts: list[int]) -> str:
    return f"{min(counts)} / {statistics.median(counts):.0f} / {max(counts)}"


def measure(client: redis.Redis, push: Push, rate: float, jobs: int) -> tuple[Usage, Usage, float]:
    """Usage of an idle second, what one job adds to it, and the rate that was reached."""
    first = Usage.read(client)
    time.sleep(IDLE_S)
    before = Usage.read(client)
    idle = (before - first) * (1 / (before.at_s - first.at_s))
    for number in range(jobs):
        time.sleep(max(0.0, before.at_s + number / rate - time.monotonic()))
        push(1)
    took_s = time.monotonic() - before.at_s
    time.sleep(0.5)
    busy = Usage.read(client) - before
    return idle, (busy - idle * busy.at_s) * (1 / jobs), jobs / took_s


def check_all_live(client: redis.Redis, workers: int) -> None:
    """Jobs are neither placed with a worker that counts as gone nor shared with it."""
    living = len(registry.living(client, MODEL))
    if living != workers:
        raise RuntimeError(f"Redis knows {living} of {workers} workers")


def steady(workers: int, name: str, *, rate: float, jobs: int, real: bool) -> tuple[str, ...]:
    """Jobs one by one, at a rate. ``name``: the producer, one of :data:`PRODUCERS`.

    Returns jobs/s; commands, us of Redis and waits for a wake-up, a job, without an idle fleet's;
    p50 and p99 in ms until a claim; commands a second and idle worker; and jobs a worker.
    """
    with own_redis() as server, connect(server.url) as client, ExitStack() as fleet:
        producer = Producer(client, server.url)
        started = []
        if real:
            fleet.enter_context(real_workers(server.url, workers))
        else:
            started = fleet.enter_context(stubs(server.url, workers))
        time.sleep(SETTLE_S)
        idle, used, reached = measure(client, getattr(producer, name), rate, jobs)
        producer.wait()
        check_all_live(client, workers)
        if real:
            records = {job_id: record_of(client, job_id) for job_id in producer.sent_us}
            claimed_us = {i: float(record.get("fence", 0)) for i, record in records.items()}
            names = [record.get("worker") for record in records.values()]
            counts = [names.count(name) for name in set(names)]
            counts += [0] * (workers - len(counts))
        else:
            claimed_us, counts = _claims(started[0].end())
        waits = percentiles_ms([(claimed_us[i] - at) / 1e6 for i, at in producer.sent_us.items()])
        figures = f"{used.commands:.1f} {used.cpu_us:.0f} {used.wakes:.2f}".split()
        figures += f"{waits.p50:.2f} {waits.p99:.2f} {idle.commands / workers:.1f}".split()
        return f"{reached:.1f}", *figures, spread(counts)


def _claims(claimed: Claimed) -> tuple[dict[str, float], list[int]]:
    """When each job was claimed, in us, and how many jobs each stub claimed."""
    times = {i: float(at) for jobs in claimed.values() for i, at in jobs}
    return times, [len(jobs) for jobs in claimed.values()]


def burst(workers: int, jobs: int, slots: int, *, waiting: bool) -> str:
    """Many jobs at once for an idle fleet or, ``waiting``, before all its workers start."""
    with own_redis() as server, connect(server.url) as client, ExitStack() as fleet:
        producer = Producer(client, server.url)
        if waiting:
            producer.stock(jobs)
            before = Usage.read(client)
        (started,) = fleet.enter_context(stubs(server.url, workers, slots=slots, service_s=1.0))
        if not waiting:
            time.sleep(SETTLE_S)
            before = Usage.read(client)
            producer.stock(jobs)
        wait_until(lambda: not length(client, normal_queue(MODEL)), timeout_s=GIVE_UP_S)
        used = (Usage.read(client) - before) * (1 / jobs)
        producer.wait()
        times, counts = _claims(started.end())
    began_us = min((times if waiting else producer.sent_us).values())
    return (
        f"claimed in {(max(times.values()) - began_us) / 1e6:.3f} s; jobs a worker "
        f"{spread(counts)}; {used.commands:.1f} commands and {used.wakes:.2f} waits a job"
    )


def half_die(workers: int, jobs: int, slots: int) -> float:
    """Half of the workers are killed with all slots full; seconds until all jobs have ended."""
    with own_redis() as server, connect(server.url) as client:
        producer = Producer(client, server.url)
        sizes = (workers // 2, workers - workers // 2)
        with stubs(server.url, *sizes, slots=slots, service_s=0.5) as (dying, _):
            time.sleep(SETTLE_S)
            producer.stock(jobs)
            held = min(jobs, workers * slots) * 0.9
            wait_until(lambda: len(leases_in(client)) >= held)
            dying.kill()
            return producer.wait()
