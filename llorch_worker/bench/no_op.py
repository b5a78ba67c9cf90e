"""``llorch bench queue --no-op``: our worker with a no-op model, and stock Celery."""

from __future__ import annotations

import gc
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import redis
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.utils import uuid

from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.bench.instruments.percentiles import percentiles_ms, spread_of
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.bench.jobs.sandbox import Sandbox, suspended
from llorch_worker.bench.jobs.stock_no_op import NO_OP_TASK, REDIS_VARIABLE, stock_app
from llorch_worker.bench.queue import Plan
from llorch_worker.bench.queue_figures import NoOpFigures, QueueFigures, Rates
from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect
from llorch_worker.client import Client
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings
from llorch_worker.stack.children import Child, Program, python

MODEL = "no-op"
REQUEST = GenerationRequest(prompt_token_ids=list(range(1, 9)), max_tokens=1, temperature=0, seed=0)
POLL_S = 0.01
LOOKED_AT = 64
"""The number of results to ask for at a time while the last ones are missing."""
TIMEOUT_S = 600.0
ALONE_TIMEOUT_S = 60.0
_DONE = '"SUCCESS"'


def measure_no_op(
    plan: Plan, sandbox: Sandbox, jobs: int, now: Callable[[str], None]
) -> QueueFigures:
    """Suspend the worker while the queue fills, let it run, and wait for the last of ``jobs``
    results; then run single jobs one at a time.

    Our worker does everything that a job of one token needs: claim, lease, journal, result. Stock
    Celery's task does nothing, with ``-P threads`` and default settings. Both log at INFO.
    """
    now("the workers' start")
    host = socket.gethostname()
    concurrency = plan.settings.max_sequences
    our_worker = sandbox.start_worker(
        _our_program(sandbox, concurrency), lambda pid: f"{MODEL}-{pid}@{host}"
    )
    stock_worker = sandbox.start_worker(
        _stock_program(sandbox, concurrency), lambda _pid: f"stock@{host}"
    )
    fields = REQUEST.wire()
    url = sandbox.redis_url
    with Client(url, model=MODEL) as client, connect(url) as reader, stock_app(url) as app:

        def send_stock() -> str:
            job_id: str = uuid()
            app.send_task(NO_OP_TASK, kwargs=fields, task_id=job_id)
            return job_id

        def run_stock() -> object:
            return app.send_task(NO_OP_TASK, kwargs=fields).get(timeout=ALONE_TIMEOUT_S)

        ours = _Side(our_worker, reader, lambda: client.submit(REQUEST).id)
        stock = _Side(stock_worker, reader, send_stock)

        def passes() -> Iterator[int]:
            yield concurrency  # warms up
            for number in range(plan.passes):
                now(f"{counted(jobs, 'job')} doing nothing, pass {number + 1} of {plan.passes}")
                yield jobs

        pairs = list(alternate(ours.rates, stock.rates, passes()))[1:]
        now(f"{counted(plan.single_jobs, 'job')} doing nothing, one at a time")
        alone = list(
            alternate(
                lambda _: ours.taken_s(lambda: client.submit(REQUEST).result(ALONE_TIMEOUT_S)),
                lambda _: stock.taken_s(run_stock),
                range(plan.single_jobs + 1),
            )
        )[1:]
        # A result unsubscribes when it is collected. Without this Redis it would retry for 20 s.
        gc.collect()
    figures = NoOpFigures(
        jobs=jobs,
        concurrency=concurrency,
        ours=_median([mine for mine, _ in pairs]),
        stock=_median([theirs for _, theirs in pairs]),
        ratio=median(mine[1] / theirs[1] for mine, theirs in pairs),
        ours_alone_ms=percentiles_ms([mine for mine, _ in alone]),
        stock_alone_ms=percentiles_ms([theirs for _, theirs in alone]),
    )
    return QueueFigures(
        provenance=provenance(device="cpu", seed=plan.load.seed),
        concurrency=concurrency,
        prompt_tokens=plan.load.prompt_tokens,
        new_tokens=plan.load.new_tokens,
        passes=plan.passes,
        no_op=figures,
    )


def _our_program(sandbox: Sandbox, concurrency: int) -> Program:
    settings = Settings(
        redis_url=sandbox.redis_url, model_name=MODEL, max_sequences=concurrency, queue_limit=0
    )
    command = python("-m", "llorch_worker.bench.instruments.no_op_engine")
    return Program("the no-op worker", command, settings.environment)


def _stock_program(sandbox: Sandbox, concurrency: int) -> Program:
    command = python(
        *("-m", "celery", "-A", "llorch_worker.bench.jobs.stock_no_op", "worker"),
        *("-n", "stock@%h", "-l", "INFO", "-P", "threads", "-c", str(concurrency)),
    )
    return Program("stock Celery", command, {REDIS_VARIABLE: sandbox.redis_url})


@dataclass(frozen=True)
class _Side:
    """A worker, a Redis client that polls its results, and a function that sends one job."""

    worker: Child
    reader: redis.Redis
    send: Callable[[], str]

    def rates(self, jobs: int) -> tuple[float, float]:
        """Jobs per second sent, and run."""
        with suspended(self.worker):
            began_s = time.perf_counter()
            ids = [self.send() for _ in range(jobs)]
            sent_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        self._wait_for(ids)
        return jobs / sent_s, jobs / (time.perf_counter() - began_s)

    def taken_s(self, run: Callable[[], object]) -> float:
        """Seconds that ``run`` takes for one job."""
        began_s = time.perf_counter()
        try:
            run()
        except (TimeoutError, CeleryTimeoutError):
            raise self._stuck() from None
        return time.perf_counter() - began_s

    def _wait_for(self, ids: list[str]) -> None:
        """Waits until every job has its result; asks for a few at a time, to spare Redis."""
        left = [keys.result(job_id) for job_id in ids]
        give_up_s = time.monotonic() + TIMEOUT_S
        while left:
            if not self._missing(left[-LOOKED_AT:]):
                left = self._missing(left)
                continue
            if self.worker.exit_code is not None or time.monotonic() > give_up_s:
                raise self._stuck()
            time.sleep(POLL_S)

    def _missing(self, results: list[str]) -> list[str]:
        stored = self.reader.mget(results)
        return [
            key
            for key, document in zip(results, stored, strict=True)
            if document is None or _DONE not in document
        ]

    def _stuck(self) -> CommandError:
        words = self.worker.last_words()
        return CommandError("NOT_MEASURED", f"{self.worker.name} did not end its jobs: {words}")


def _median(passes: list[tuple[float, float]]) -> Rates:
    run = [each for _, each in passes]
    return Rates(
        sent_per_s=median(each for each, _ in passes),
        run_per_s=median(run),
        spread=spread_of(run),
    )
