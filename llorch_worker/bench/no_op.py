"""The queue alone: our worker around a model that computes nothing, beside stock Celery."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from statistics import median

import redis
from celery.exceptions import TimeoutError as CeleryTimeoutError
from celery.utils import uuid
from pydantic import BaseModel, ConfigDict

from llorch_worker.bench.instruments.percentiles import Percentiles, percentiles_ms, spread_of
from llorch_worker.bench.jobs.rig import Rig, frozen, with_environment
from llorch_worker.bench.jobs.stock_no_op import NO_OP_TASK, stock_app
from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect
from llorch_worker.client import Client
from llorch_worker.contract import GenerationRequest
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings
from llorch_worker.stack.children import Child, Program, python

MODEL = "no-op"
PROMPT_TOKENS = 8
POLL_S = 0.01
LOOKED_AT = 64
"""Results that are asked for at a time while the last ones are not there."""
TIMEOUT_S = 600.0
ALONE_TIMEOUT_S = 60.0
_DONE = '"SUCCESS"'


class Rates(BaseModel):
    """Jobs a second, medians over the passes."""

    model_config = ConfigDict(frozen=True)

    sent_per_s: float
    """By one producer."""
    run_per_s: float
    """By one worker, from a full queue to the last stored result."""
    spread: float | None
    """Largest less smallest ``run_per_s`` of the passes, as a share of the median; None for one."""


class NoOpFigures(BaseModel):
    """One worker each on the same Redis, with as many threads, by turns."""

    model_config = ConfigDict(frozen=True)

    jobs: int
    concurrency: int
    ours: Rates
    stock: Rates
    ratio: float
    """Our jobs a second against stock Celery's."""
    ours_alone_ms: Percentiles
    stock_alone_ms: Percentiles
    """From the submission of a job to its result in the producer's hands, one job at a time."""


def measure_no_op(
    rig: Rig,
    *,
    jobs: int,
    single_jobs: int,
    concurrency: int,
    passes: int,
    now: Callable[[str], None],
) -> NoOpFigures:
    """Fill the queue while the worker stands still, let it run, and wait for the last result; then
    ``single_jobs`` to each, of which one is under way at a time.

    Ours does all that it does for a job of one token: claim, lease, journal, result. Stock Celery's
    task does nothing, with ``-P threads`` and its own settings. Both log at INFO.
    """
    now("the workers' start")
    host = socket.gethostname()
    ours = rig.start_worker(_our_program(rig, concurrency), lambda pid: f"{MODEL}-{pid}@{host}")
    stock = rig.start_worker(_stock_program(rig, concurrency), lambda _pid: f"stock@{host}")
    request = GenerationRequest(
        prompt_token_ids=list(range(1, PROMPT_TOKENS + 1)), max_tokens=1, temperature=0, seed=0
    )
    app = stock_app(rig.redis_url)
    fields = request.wire()
    with Client(rig.redis_url, model=MODEL) as client, connect(rig.redis_url) as reader, app:

        def send_stock() -> str:
            job_id: str = uuid()
            app.send_task(NO_OP_TASK, kwargs=fields, task_id=job_id)
            return job_id

        def send_ours() -> str:
            return client.submit(request).id

        def one_pass(count: int) -> tuple[tuple[float, float], tuple[float, float]]:
            return (
                _rates(reader, ours, send_ours, count),
                _rates(reader, stock, send_stock, count),
            )

        one_pass(concurrency)
        pairs = []
        for number in range(passes):
            now(f"{counted(jobs, 'job')} doing nothing, pass {number + 1} of {passes}")
            pairs.append(one_pass(jobs))
        now(f"{counted(single_jobs, 'job')} doing nothing, one at a time")

        def one_alone() -> tuple[float, float]:
            return (
                _taken_s(ours, lambda: client.submit(request).result(ALONE_TIMEOUT_S)),
                _taken_s(
                    stock,
                    lambda: app.send_task(NO_OP_TASK, kwargs=fields).get(timeout=ALONE_TIMEOUT_S),
                ),
            )

        one_alone()
        alone = [one_alone() for _ in range(single_jobs)]
    return NoOpFigures(
        jobs=jobs,
        concurrency=concurrency,
        ours=_median([mine for mine, _ in pairs]),
        stock=_median([theirs for _, theirs in pairs]),
        ratio=median(mine[1] / theirs[1] for mine, theirs in pairs),
        ours_alone_ms=percentiles_ms([mine for mine, _ in alone]),
        stock_alone_ms=percentiles_ms([theirs for _, theirs in alone]),
    )


def _our_program(rig: Rig, concurrency: int) -> Program:
    settings = Settings(
        redis_url=rig.redis_url, model_name=MODEL, max_sequences=concurrency, queue_limit=0
    )
    return Program(
        "the no-op worker",
        python("-m", "llorch_worker.bench.jobs.no_op_worker"),
        settings.environment,
    )


def _stock_program(rig: Rig, concurrency: int) -> Program:
    application = "llorch_worker.bench.jobs.stock_no_op"
    program = Program(
        "stock Celery",
        python(
            *("-m", "celery", "-A", application, "worker", "-n", "stock@%h", "-l", "INFO"),
            *("-P", "threads", "-c", str(concurrency)),
        ),
    )
    return with_environment(program, {"LLORCH_REDIS_URL": rig.redis_url})


def _rates(
    reader: redis.Redis, worker: Child, send: Callable[[], str], jobs: int
) -> tuple[float, float]:
    """Jobs a second sent, and run."""
    with frozen(worker):
        began_s = time.perf_counter()
        ids = [send() for _ in range(jobs)]
        sent_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    _wait_for(reader, worker, ids)
    return jobs / sent_s, jobs / (time.perf_counter() - began_s)


def _taken_s(worker: Child, run: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    try:
        run()
    except (TimeoutError, CeleryTimeoutError):
        raise _did_not_end(worker) from None
    return time.perf_counter() - began_s


def _wait_for(reader: redis.Redis, worker: Child, ids: list[str]) -> None:
    """Until every job has its result; asks for few at a time, so as to cost Redis nothing."""
    left = [keys.result(job_id) for job_id in ids]
    give_up_s = time.monotonic() + TIMEOUT_S
    while left:
        if not _missing(reader, left[-LOOKED_AT:]):
            left = _missing(reader, left)
            continue
        if worker.exit_code is not None or time.monotonic() > give_up_s:
            raise _did_not_end(worker)
        time.sleep(POLL_S)


def _did_not_end(worker: Child) -> CommandError:
    return CommandError(
        "NOT_MEASURED", f"{worker.name} did not end its jobs: {worker.last_words()}"
    )


def _missing(reader: redis.Redis, results: list[str]) -> list[str]:
    stored = reader.mget(results)
    return [
        key
        for key, document in zip(results, stored, strict=True)
        if document is None or _DONE not in document
    ]


def _median(passes: list[tuple[float, float]]) -> Rates:
    run = [each for _, each in passes]
    return Rates(
        sent_per_s=median(each for each, _ in passes),
        run_per_s=median(run),
        spread=spread_of(run),
    )
