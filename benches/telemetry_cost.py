"""What telemetry costs a worker: traces to a local collector, a JSON log and, if asked, metrics.

    python -m benches.telemetry_cost [--model FILE] [--passes 12] [--jobs 64] [--tokens 64]
        [--metrics]

Two measurements, by default on the demo model, the smallest of all:

- Pairs. Three workers with the same model, two plain, one with telemetry, get the same jobs by
  turns. Shown are the tokens a second and the processor time a job of the worker's process. What
  the two plain processes differ by, pairs cannot resolve.
- Parts. What the code of traces and log adds to one job, run here in a loop: spans made, encoded
  and sent, and one JSON line written instead of Celery's two. It is free of the noise of a worker.

Bound: at most 1% of the throughput of a model that people use. The demo model is too small for it.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from celery import Celery
from celery.app.trace import LOG_RECEIVED, LOG_SUCCESS
from celery.utils.log import ColorFormatter
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from llorch_worker.broker.claims import Claim
from llorch_worker.broker.ended_jobs import EndedJobs
from llorch_worker.broker.held_claims import HELD_CLAIMS
from llorch_worker.broker.message import ENQUEUED_AT
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, Choice, GenerationResult, Timings, Usage
from llorch_worker.demo_model import STORY_MODEL
from tests.services import REAL_APP, WorkerProcess, own_redis, running_worker
from tests.telemetry.collector import running_collector

PROMPT = "Once upon a time"
RESULT_S = 120
JOBS_A_ROUND = 2_000
ROUNDS = 9


@dataclass(frozen=True)
class Pass:
    tokens_per_s: float
    cpu_ms: float
    """Processor time of the worker's process, a job."""


@contextmanager
def collector_process() -> Iterator[str]:
    """The URL of a collector in a process of its own."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_collect, args=(there,), daemon=True)
    process.start()
    try:
        yield here.recv()
    finally:
        here.send("end")
        process.join()


def _collect(told: Connection) -> None:
    with running_collector() as collector:
        told.send(collector.url)
        told.recv()


def run_pass(client: Client, worker: WorkerProcess, model: str, jobs: int, tokens: int) -> Pass:
    process = psutil.Process(worker.process.pid)
    before_s, began_s = _cpu_s(process), time.perf_counter()
    sent = [
        client.submit(model=model, prompt=PROMPT, max_tokens=tokens, temperature=0, ignore_eos=True)
        for _ in range(jobs)
    ]
    made = sum(job.result(RESULT_S).usage.completion for job in sent)
    wall_s = time.perf_counter() - began_s
    return Pass(made / wall_s, (_cpu_s(process) - before_s) / jobs * 1e3)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def pairs(
    model_file: Path, passes: int, jobs: int, tokens: int, telemetry: dict[str, object]
) -> float:
    """Prints what the pairs show; returns the plain worker's processor time a job, in ms."""
    with tempfile.TemporaryDirectory() as folder, own_redis() as server:
        options: dict[str, Any] = {"app": REAL_APP, "fresh": True, "model": model_file}
        workers: dict[str, dict[str, Any]] = {
            "plain": {},
            "plain again": {},
            "telemetry": telemetry,
        }
        with ExitStack() as running:
            client = running.enter_context(Client(server.url))
            ways: dict[str, Callable[[], Pass]] = {}
            for way, settings in workers.items():
                model = way.replace(" ", "-")
                worker = running.enter_context(
                    running_worker(
                        server.url,
                        Path(folder),
                        name=model,
                        model_name=model,
                        **options,
                        **settings,
                    )
                )
                ways[way] = partial(run_pass, client, worker, model, jobs, tokens)
            for run in ways.values():
                run()  # warms up
            ran: dict[str, list[Pass]] = {name: [] for name in ways}
            for turn in range(passes):
                for name in list(ways)[:: 1 if turn % 2 else -1]:
                    ran[name].append(ways[name]())
    print(f"{passes} pairs of {jobs} jobs, {tokens} tokens each, by turns\n")
    print(f"{'':12}{'tokens/s':>10}{'CPU a job':>12}")
    for name, found in ran.items():
        rate = statistics.median(each.tokens_per_s for each in found)
        cpu_ms = statistics.median(each.cpu_ms for each in found)
        print(f"{name:12}{rate:10.0f}{cpu_ms:9.2f} ms")
    for name in list(ways)[1:]:
        both = list(zip(ran["plain"], ran[name], strict=True))
        _print_ratio(
            f"{name}: tokens/s", [told.tokens_per_s / plain.tokens_per_s for plain, told in both]
        )
        _print_ratio(f"{name}: CPU a job", [told.cpu_ms / plain.cpu_ms for plain, told in both])
    return statistics.median(plain.cpu_ms for plain in ran["plain"])


def _print_ratio(name: str, ratios: Sequence[float]) -> None:
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{name}: median {middle - 1:+.2%}, quartiles {low - 1:+.2%} to {high - 1:+.2%}")


def parts(url: str, log: Path, tokens: int, job_ms: float) -> None:
    """The processor time that spans, their export and the log line take a job."""
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = url
    from llorch_worker.telemetry.traces.tracing import start_tracing

    tracing = start_tracing("bench", "here")
    from llorch_worker.telemetry.logs.job_line import log_job
    from llorch_worker.telemetry.logs.json_lines import JsonFormatter
    from llorch_worker.telemetry.logs.repeats import Repeats
    from llorch_worker.telemetry.traces.attempts import AttemptSpans

    handler = logging.FileHandler(log)
    handler.addFilter(Repeats())
    logging.getLogger().addHandler(handler)
    celery_logger = logging.getLogger("celery.app.trace")
    logging.getLogger().setLevel(logging.INFO)
    provider = trace.get_tracer_provider()
    spans, observed = AttemptSpans(), EndedJobs()
    observed.observe(log_job)
    unobserved = EndedJobs()
    now_s = time.time()
    timings = Timings(queue_ms=5, prefill_ms=5, first_token_ms=10, decode_ms=100)
    choice = Choice(index=0, text="", token_ids=tuple(range(tokens)), finish_reason="length")
    fields = {"prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

    def job(number: int, told: bool) -> None:
        job_id = f"6f9619ff-8b86-d011-b42d-{number:012x}"
        claim = Claim(
            job_id, b"", 1, number, "llorch.demo", False, int(now_s * 1e3), int(now_s * 1e3), True
        )
        properties = {"delivery_tag": claim.tag}
        headers = {ENQUEUED_AT: now_s, "traceparent": f"00-{number + 1:032x}-00f067aa0ba902b7-01"}
        request = _Request(properties=properties, task=TASK_NAME, **headers)
        task = SimpleNamespace(name=TASK_NAME, request=request)
        result = GenerationResult(
            id=job_id, model="demo", choices=(choice,), seed=1, timings=timings, worker="here",
            usage=Usage(prompt=5, completion=tokens),
        )  # fmt: skip
        HELD_CLAIMS.add(claim)
        if told:
            spans._begin(task)
        HELD_CLAIMS.note_end(claim)
        (observed if told else unobserved).note(claim, "here", result, "0" * 32 if told else None)
        if told:
            spans._end(task, "SUCCESS", result, fields)
        else:
            about = {"id": job_id, "name": TASK_NAME, "runtime": 0.1, "return_value": repr(result)}
            celery_logger.info(LOG_RECEIVED, about)
            celery_logger.info(LOG_SUCCESS, about)
        HELD_CLAIMS.discard(claim)

    text = ColorFormatter(Celery().conf.worker_log_format, use_color=False)
    as_json = JsonFormatter()

    def cpu_us(told: bool) -> float:
        handler.setFormatter(as_json if told else text)
        began_s = time.process_time()
        for number in range(JOBS_A_ROUND):
            job(number, told)
            if told and not number % 200:
                time.sleep(0.02)  # lets the exporter's thread send, as it does between jobs
        if isinstance(provider, TracerProvider):
            provider.force_flush()
        return (time.process_time() - began_s) / JOBS_A_ROUND * 1e6

    added_us = sorted(-cpu_us(False) + cpu_us(True) for _ in range(ROUNDS))
    tracing.close()
    middle_us = statistics.median(added_us)
    print("\nspans, their export and the log's line, processor time a job:")
    print(
        f"{middle_us:.0f} us, {added_us[0]:.0f} to {added_us[-1]:.0f} in {ROUNDS} rounds; "
        f"{middle_us / job_ms / 1e3:.2%} of the plain worker's"
    )


class _Request(SimpleNamespace):
    def get(self, name: str) -> object:
        return getattr(self, name, None)


def main() -> None:
    parser = argparse.ArgumentParser(description="What telemetry costs a worker.")
    parser.add_argument("--model", type=Path, default=STORY_MODEL)
    parser.add_argument("--passes", type=int, default=12)
    parser.add_argument("--jobs", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--metrics", action="store_true", help="serve metrics as well")
    given = parser.parse_args()
    with collector_process() as url, tempfile.TemporaryDirectory() as folder:
        telemetry: dict[str, object] = {"OTEL_EXPORTER_OTLP_ENDPOINT": url, "log_format": "json"}
        if given.metrics:
            telemetry["metrics_port"] = 19_100
        job_ms = pairs(given.model, given.passes, given.jobs, given.tokens, telemetry)
        parts(url, Path(folder) / "log", given.tokens, job_ms)


if __name__ == "__main__":
    main()
