"""``llorch bench queue``: one load straight through the engine and through Redis.

A single job may take 5 ms more than the engine's time at p50. At least 97% of the engine's tokens
must arrive through Redis.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count
from statistics import median
from typing import Protocol

from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.bench.instruments.client_load import Throughput, engine_s, run_queued
from llorch_worker.bench.instruments.loaded_engine import own_context
from llorch_worker.bench.instruments.percentiles import percentiles_ms
from llorch_worker.bench.instruments.provenance import provenance
from llorch_worker.bench.load import Load
from llorch_worker.bench.one_worker import READY_TIMEOUT_S
from llorch_worker.bench.plan import Plan
from llorch_worker.bench.queue_figures import LoadRow, QueueFigures, SingleJobs, Way
from llorch_worker.client import Client
from llorch_worker.contract import GenerationRequest, GenerationResult
from llorch_worker.contract.command_errors import CommandError, usage_error
from llorch_worker.contract.quantities import counted, human_bytes
from llorch_worker.engine import Engine
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.settings import Settings
from llorch_worker.stack.stack import Stack

SINGLE_PROMPT_TOKENS = 16
SINGLE_NEW_TOKENS = 8
"""Tokens of the jobs that are timed one at a time."""


def measure_queue(
    plan: Plan, load: Load, jobs: Sequence[int], single_jobs: int, stack: Stack
) -> QueueFigures:
    """Load the model here and in ``stack``'s worker, and run ``load`` once for each number of
    ``jobs``; the two ways alternate.

    Raises:
        CommandError: the worker does not start.
    """
    settings = plan.settings
    plan.now("the worker's load")
    stack.start()
    stack.wait_ready(READY_TIMEOUT_S)
    with (
        Engine.load(
            settings.model,
            settings.engine_options,
            model_name=settings.served_name,
            num_threads=plan.threads,
            progress=plan.progress,
        ) as engine,
        Client(stack.redis_url, model=settings.served_name) as client,
    ):
        origin = provenance(device=engine.stats().device, seed=load.seed)
        passes = _Passes(engine, client, load.seed)
        plan.now("the warm-up")
        passes.both_ways(replace(load, jobs=engine.facts.max_sequences, new_tokens=(2, 2)), 1)
        plan.now(f"{single_jobs} jobs, one at a time")
        single = passes.single_jobs(single_jobs)
        rows = []
        for number in jobs:
            plan.now(counted(number, "job"))
            pairs = passes.both_ways(replace(load, jobs=number), plan.passes)
            rows.append(_row(number, pairs))
        return QueueFigures(
            provenance=origin,
            model=settings.model,
            dtype=engine.stats().dtype,
            concurrency=engine.facts.max_sequences,
            prompt_tokens=load.prompt_tokens,
            new_tokens=load.new_tokens,
            passes=plan.passes,
            rows=tuple(rows),
            single=single,
        )


def checked_settings(settings: Settings, load: Load) -> Settings:
    """The settings for ``load``; raises if the model or memory does not allow it."""
    longest, own = load.longest_tokens, own_context(settings)
    if longest > own:
        raise usage_error(
            f"jobs of up to {longest} tokens exceed the model's context of {own} tokens; lower "
            "--prompt-tokens or --new-tokens"
        )
    context = max(longest, SINGLE_PROMPT_TOKENS + SINGLE_NEW_TOKENS)
    settings = settings.model_copy(update={"max_context": min(own, context)})
    memory = plan_load(settings.model, settings.engine_options)
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
        # Each pass has its own prompts, because both engines cache prefixes.
        self._seeds = count(seed)

    def both_ways(self, load: Load, passes: int) -> list[tuple[Throughput, Throughput]]:
        """Passes straight and through the queue, alternately."""
        works = (self._requests(load) for _ in range(passes))
        return list(alternate(self._straight, self._queued, works))

    def single_jobs(self, jobs: int) -> SingleJobs:
        """``jobs`` short jobs each way, one at a time."""
        load = Load.alike(jobs + 1, SINGLE_PROMPT_TOKENS, SINGLE_NEW_TOKENS, seed=0)
        pairs = list(
            alternate(
                lambda request: _outside_s(self._engine.submit, request),
                lambda request: _outside_s(self._client.submit, request),
                self._requests(load),
            )
        )[1:]  # the first pair warms up
        straight = percentiles_ms([each for each, _ in pairs])
        queued = percentiles_ms([each for _, each in pairs])
        return SingleJobs(
            straight_ms=straight,
            queued_ms=queued,
            added_p50_ms=queued.p50 - straight.p50,
            added_p95_ms=queued.p95 - straight.p95,
        )

    def _requests(self, load: Load) -> list[GenerationRequest]:
        return replace(load, seed=next(self._seeds)).requests(self._engine.config.vocab_size)

    def _straight(self, requests: list[GenerationRequest]) -> Throughput:
        # A thread per job, as in the worker's pool, where jobs wait for room in the engine.
        with ThreadPoolExecutor(len(requests)) as threads:
            began_s = time.perf_counter()
            results = list(threads.map(lambda each: self._engine.submit(each).result(), requests))
            wall_s = time.perf_counter() - began_s
        return Throughput(len(results), sum(each.usage.completion for each in results), wall_s)

    def _queued(self, requests: list[GenerationRequest]) -> Throughput:
        url = self._client.settings.redis_url
        return asyncio.run(run_queued(url, self._engine.model_name, requests))


class _Submitted(Protocol):
    def result(self) -> GenerationResult: ...


def _outside_s(
    submit: Callable[[GenerationRequest], _Submitted], request: GenerationRequest
) -> float:
    began_s = time.perf_counter()
    result = submit(request).result()
    return time.perf_counter() - began_s - engine_s(result)


def _row(jobs: int, pairs: list[tuple[Throughput, Throughput]]) -> LoadRow:
    return LoadRow(
        jobs=jobs,
        straight=Way.of([straight for straight, _ in pairs]),
        queued=Way.of([queued for _, queued in pairs]),
        # Per pair, because its two passes have the same jobs.
        share=median(queued.tokens_per_s / straight.tokens_per_s for straight, queued in pairs),
    )
