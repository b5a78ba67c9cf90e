"""``llorch bench queue``'s measuring: one load straight through the engine and through Redis."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from statistics import median

import psutil
import torch
from pydantic import BaseModel, ConfigDict

from llorch_worker.bench.instruments.percentiles import Percentiles, percentiles_ms, spread_of
from llorch_worker.bench.instruments.processor_time import ProcessorTime
from llorch_worker.bench.instruments.provenance import Provenance, provenance
from llorch_worker.bench.instruments.turns import by_turns
from llorch_worker.bench.jobs.mixed_load import JobLoad
from llorch_worker.bench.jobs.queued import QueuedPass, own_ms, run_queued
from llorch_worker.bench.jobs.rig import Rig
from llorch_worker.bench.no_op import NoOpFigures
from llorch_worker.bench.throughput import Throughput
from llorch_worker.client import Client
from llorch_worker.contract import GenerationRequest, GenerationResult
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.model import resolve_config
from llorch_worker.settings import Settings
from llorch_worker.weights import open_checkpoint
from llorch_worker.worker.main import worker_hostname

SINGLE_PROMPT_TOKENS = 16
SINGLE_NEW_TOKENS = 8
"""Of the jobs that are timed one at a time."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True)


class Way(_Frozen):
    """One way of running a load; medians over the passes."""

    jobs_per_s: float
    tokens_per_s: float
    """Generated ones."""
    spread: float | None
    """Largest less smallest ``tokens_per_s`` of the passes, as a share of the median; None for
    one."""


class LoadRow(_Frozen):
    """So many jobs, all submitted at once."""

    jobs: int
    straight: Way
    queued: Way
    share: float
    """Of the engine's tokens a second, those that arrive through Redis."""
    beside_model: float
    """Of all processors' time while jobs go through Redis, what client, Redis and the worker's
    threads beside those of its model take; median over the passes."""
    delivery_ms: Percentiles
    """Of a job through Redis, all that is neither waiting nor computing: from the call of
    ``submit`` to the enqueueing, and from the last token to the result in the client's hands."""


class SingleJobs(_Frozen):
    """Jobs one at a time: from submit to result, less the engine's own time on the job."""

    straight_ms: Percentiles
    queued_ms: Percentiles
    added_p50_ms: float
    added_p95_ms: float


class QueueFigures(_Frozen):
    """The document of ``llorch bench queue --json``."""

    provenance: Provenance
    model: Path | None
    """None where only the queue itself was measured."""
    dtype: str | None
    concurrency: int
    prompt_tokens: tuple[int, int]
    new_tokens: tuple[int, int]
    passes: int
    rows: tuple[LoadRow, ...]
    single: SingleJobs | None
    no_op: NoOpFigures | None


@dataclass(frozen=True)
class Plan:
    """What is to be measured through a model."""

    settings: Settings
    load: JobLoad
    """Its jobs are each of ``jobs`` in turn."""
    jobs: tuple[int, ...]
    single_jobs: int
    passes: int
    threads: int | None


@dataclass(frozen=True)
class _ThroughRedis:
    ran: QueuedPass
    beside_model: float
    """As :attr:`LoadRow.beside_model`."""


@dataclass(frozen=True)
class Measured:
    """What :func:`measure_queue` found."""

    rows: tuple[LoadRow, ...]
    single: SingleJobs
    dtype: str
    provenance: Provenance


def measure_queue(
    plan: Plan, rig: Rig, progress: Callable[[int, int], None], now: Callable[[str], None]
) -> Measured:
    """Load the model here and in a worker, and run all passes, the two ways by turns.

    ``progress`` is of the load here, in bytes; ``now`` is told what begins.

    Raises:
        CommandError: the load is longer than the model's context, memory does not hold the model
            twice, or the worker does not start.
    """
    settings = checked_settings(plan)
    now("the worker's load")
    worker = rig.worker_of(settings, plan.threads)
    rig.start_worker(worker, lambda pid: worker_hostname(settings, pid))
    with (
        Engine.load(
            settings.model,
            model_name=settings.served_name,
            num_threads=plan.threads,
            progress=progress,
            **settings.engine_options,
        ) as engine,
        Client(rig.redis_url, model=settings.served_name) as client,
    ):
        origin = provenance(device=engine.stats().device, seed=plan.load.seed)
        passes = _Passes(engine, client, plan.load.seed)
        now("the warm-up")
        passes.both_ways(replace(plan.load, jobs=settings.max_sequences, new_tokens=(2, 2)), 1)
        now(f"{plan.single_jobs} jobs, one at a time")
        single = passes.single_jobs(plan.single_jobs)
        rows = []
        for jobs in plan.jobs:
            now(counted(jobs, "job"))
            load = replace(plan.load, jobs=jobs)
            rows.append(_row(jobs, passes.both_ways(load, plan.passes)))
        return Measured(tuple(rows), single, engine.stats().dtype, origin)


def checked_settings(plan: Plan) -> Settings:
    """The settings for the load, where model and memory allow it."""
    longest = plan.load.longest_tokens
    own = resolve_config(open_checkpoint(plan.settings.model)).max_context
    if longest > own:
        raise usage_error(
            f"jobs of up to {longest} tokens exceed the model's context of {own} tokens; lower "
            "--prompt-tokens or --new-tokens"
        )
    context = max(longest, SINGLE_PROMPT_TOKENS + SINGLE_NEW_TOKENS)
    settings = plan.settings.model_copy(update={"max_context": min(own, context)})
    memory = plan_load(settings.model, **settings.engine_options)
    if memory.misfit or 2 * memory.total_bytes > memory.free_bytes:
        raise CommandError(
            "OUT_OF_MEMORY",
            f"{settings.model} is loaded twice, here and in the worker, which needs "
            f"{human_bytes(2 * memory.total_bytes)} as {memory.kept_as}, and "
            f"{human_bytes(memory.free_bytes)} are free on {memory.device}; take a smaller dtype "
            "or model, or a lower --concurrency",
        )
    return settings


class _Passes:
    """A loaded engine and a worker with the same model, and loads for both."""

    def __init__(self, engine: Engine, client: Client, seed: int) -> None:
        self._engine = engine
        self._client = client
        # The worker's as this process', by the same settings: its busiest ones.
        on_cpu = engine.stats().device == "cpu"
        self._computing_threads = torch.get_num_threads() if on_cpu else 1
        # Other prompts in each pass: both engines keep what they computed for the next that begins
        # the same.
        self._seeds = count(seed)

    def both_ways(self, load: JobLoad, passes: int) -> list[tuple[Throughput, _ThroughRedis]]:
        """Straight and queued, by turns."""
        return by_turns(self._straight, self._queued, (self._requests(load) for _ in range(passes)))

    def single_jobs(self, jobs: int) -> SingleJobs:
        """``jobs`` short jobs each way, by turns."""
        lengths = (SINGLE_PROMPT_TOKENS,) * 2, (SINGLE_NEW_TOKENS,) * 2
        straight_s, queued_s = [], []
        for request in self._requests(JobLoad(jobs + 1, *lengths, seed=0)):
            straight_s.append(_outside_s(lambda r: self._engine.submit(r).result(), request))
            queued_s.append(_outside_s(lambda r: self._client.submit(r).result(), request))
        # The first pair warms up.
        straight, queued = percentiles_ms(straight_s[1:]), percentiles_ms(queued_s[1:])
        return SingleJobs(
            straight_ms=straight,
            queued_ms=queued,
            added_p50_ms=queued.p50 - straight.p50,
            added_p95_ms=queued.p95 - straight.p95,
        )

    def _requests(self, load: JobLoad) -> list[GenerationRequest]:
        load = replace(load, seed=next(self._seeds))
        return [job.request() for job in load.draw(self._engine.config.vocab_size)]

    def _straight(self, requests: list[GenerationRequest]) -> Throughput:
        # A thread a job, as in the worker's pool, where those wait that the engine has no room for.
        with ThreadPoolExecutor(len(requests)) as threads:
            began_s = time.perf_counter()
            results = list(threads.map(lambda each: self._engine.submit(each).result(), requests))
            wall_s = time.perf_counter() - began_s
        tokens = sum(result.usage.completion for result in results)
        return Throughput(len(results), tokens, wall_s)

    def _queued(self, requests: list[GenerationRequest]) -> _ThroughRedis:
        url = self._client.settings.redis_url
        began = ProcessorTime.now()
        ran = asyncio.run(run_queued(url, self._engine.model_name, requests))
        beside_s = ProcessorTime.now().without_busiest_s(began, self._computing_threads)
        return _ThroughRedis(ran, beside_s / ran.wall_s / psutil.cpu_count())


def _outside_s(
    run: Callable[[GenerationRequest], GenerationResult], request: GenerationRequest
) -> float:
    began_s = time.perf_counter()
    result = run(request)
    return time.perf_counter() - began_s - own_ms(result) / 1e3


def _row(jobs: int, pairs: list[tuple[Throughput, _ThroughRedis]]) -> LoadRow:
    return LoadRow(
        jobs=jobs,
        straight=_way([straight for straight, _ in pairs]),
        queued=_way([queued.ran for _, queued in pairs]),
        # Of each pair, because its two passes had the same jobs.
        share=median(queued.ran.tokens_per_s / straight.tokens_per_s for straight, queued in pairs),
        beside_model=median(queued.beside_model for _, queued in pairs),
        delivery_ms=percentiles_ms([s for _, queued in pairs for s in queued.ran.delivery_s]),
    )


def _way(passes: Sequence[Throughput]) -> Way:
    rates = [each.tokens_per_s for each in passes]
    return Way(
        jobs_per_s=median(each.jobs_per_s for each in passes),
        tokens_per_s=median(rates),
        spread=spread_of(rates),
    )
