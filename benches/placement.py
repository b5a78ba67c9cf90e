"""Placement by prefix: what is found in caches, and the time to the first token, with and without.

    python -m benches.placement MODEL [--jobs 1000] [--rate 20] [--hot 0.5]

MODEL is a .gguf file. Four workers, each with room for a part of the system prompts in its KV
cache, get jobs at random times: a system prompt of 512 random tokens, as popular as Zipf's law
says, and a question of its own. ``--hot`` gives one system prompt this share of the jobs. Rounds
with and without ``LLORCH_PLACEMENT`` take turns, each with a new Redis and new workers. The first
token counts from the enqueueing.
"""

from __future__ import annotations

import os
import platform
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import gguf
import typer

from llorch_worker.broker import keys
from llorch_worker.broker.queues import normal_queue
from llorch_worker.cache import BLOCK_SIZE_TOKENS
from llorch_worker.client import Client
from llorch_worker.contract import GenerationRequest, GenerationResult
from llorch_worker.engine.memory.load_plan import plan_load
from llorch_worker.settings import Settings
from tests.services import REAL_APP, own_redis, running_worker, wait_until

MODEL = "placed"
CONTEXT_TOKENS = 1024
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 512, 16, 8
START_S = 60.0
GET_S = 120.0


@dataclass(frozen=True)
class Load:
    """Jobs and when they come: the same for every round."""

    requests: list[GenerationRequest]
    at_s: list[float]

    @classmethod
    def draw(cls, jobs: int, prompts: int, rate: float, hot: float, vocabulary: int) -> Load:
        chance = random.Random(0)

        def ids(count: int) -> list[int]:
            return [chance.randrange(3, vocabulary) for _ in range(count)]

        systems = [ids(SYSTEM_TOKENS) for _ in range(prompts)]
        popularity = [1 / (rank + 1) for rank in range(prompts)]
        if hot:
            popularity[0] = hot / (1 - hot) * sum(popularity[1:])
        requests = [
            GenerationRequest(
                prompt_token_ids=system + ids(QUESTION_TOKENS),
                max_tokens=ANSWER_TOKENS,
                ignore_eos=True,
            )
            for system in chance.choices(systems, popularity, k=jobs)
        ]
        at_s, now_s = [], 0.0
        for _ in requests:
            now_s += chance.expovariate(rate)
            at_s.append(now_s)
        return cls(requests, at_s)


@dataclass(frozen=True)
class Fleet:
    model: Path
    workers: int
    kv_cache_bytes: int


def long_model(model: Path, folder: Path) -> tuple[Path, int]:
    """A copy of the model that allows a context of :data:`CONTEXT_TOKENS`, and its vocabulary."""
    copy = folder / f"{MODEL}.gguf"
    shutil.copy(model, copy)
    fields = gguf.GGUFReader(copy, "r+").fields
    context = fields["llama.context_length"]
    context.parts[context.data[0]][0] = CONTEXT_TOKENS
    return copy, len(fields["tokenizer.ggml.tokens"].data)


def measure(fleet: Fleet, load: Load, folder: Path, *, placement: bool) -> list[GenerationResult]:
    with own_redis() as server, ExitStack() as running:
        settings = Settings(redis_url=server.url, placement=placement)
        for number in range(fleet.workers):
            running.enter_context(
                running_worker(
                    server.url, folder, app=REAL_APP, name=f"w{number}", model=fleet.model,
                    kv_cache_bytes=fleet.kv_cache_bytes, max_context=CONTEXT_TOKENS,
                    placement=placement, fresh=True,
                )
            )  # fmt: skip
        client = running.enter_context(Client(settings, model=MODEL))
        store = client.redis
        # Both start when all workers know of each other.
        wait_until(lambda: store.get(keys.watch(MODEL)) == str(fleet.workers), timeout_s=START_S)
        if placement:
            tell = keys.load(normal_queue(MODEL))
            wait_until(lambda: store.zcard(tell) == fleet.workers, timeout_s=START_S)
        began_s, jobs = time.monotonic(), []
        for request, at_s in zip(load.requests, load.at_s, strict=True):
            time.sleep(max(0.0, began_s + at_s - time.monotonic()))
            jobs.append(client.submit(request))
        return [job.result(GET_S) for job in jobs]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * len(ordered)))]


def show(name: str, results: list[GenerationResult]) -> None:
    prompt = sum(result.usage.prompt for result in results)
    cached = sum(result.usage.cached for result in results)
    first = [result.timings.first_token_ms for result in results]
    queued = [result.timings.queue_ms for result in results]
    ran = Counter(result.worker for result in results).values()
    print(
        f"{name:>10} {cached / prompt:12.1%} {percentile(first, 0.5):16.1f}"
        f" {percentile(first, 0.95):8.1f} {percentile(queued, 0.5):13.1f}"
        f" {percentile(queued, 0.95):8.1f}  {min(ran)} / {statistics.median(ran):.0f} / {max(ran)}",
        flush=True,
    )


def main(
    model: Path,
    jobs: Annotated[int, typer.Option(help="Jobs of a round.")] = 1000,
    rate: Annotated[float, typer.Option(help="Jobs a second, on average.")] = 20.0,
    prompts: Annotated[int, typer.Option(help="System prompts.")] = 64,
    hot: Annotated[float, typer.Option(help="Share of jobs that have one and the same.")] = 0.0,
    workers: Annotated[int, typer.Option(help="Workers.")] = 4,
    cached: Annotated[int, typer.Option(help="System prompts that fit into one cache.")] = 24,
    rounds: Annotated[int, typer.Option(help="Rounds of each kind.")] = 2,
) -> None:
    """Measure what placement by prefix is worth."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, vocabulary = long_model(model, folder)
        plan = plan_load(path, max_sequences=1, max_context=CONTEXT_TOKENS)
        blocks = cached * SYSTEM_TOKENS // BLOCK_SIZE_TOKENS
        fleet = Fleet(path, workers, blocks * plan.block_bytes)
        load = Load.draw(jobs, prompts, rate, hot, vocabulary)
        print(f"command: {shlex.join(sys.orig_argv)}")
        print(f"{os.cpu_count()} cores, {platform.processor() or platform.machine()}, Python "
              f"{platform.python_version()}")  # fmt: skip
        print(
            f"{'placement':>10} {'found':>12} {'first token p50':>16} {'p95 ms':>8}"
            f" {'queued p50':>13} {'p95 ms':>8}  jobs a worker"
        )
        found: dict[bool, list[GenerationResult]] = {False: [], True: []}
        for _ in range(rounds):
            for placement, results in found.items():
                results += (new := measure(fleet, load, folder, placement=placement))
                show("on" if placement else "off", new)
        for placement, results in found.items():
            show(f"all {'on' if placement else 'off'}", results)


if __name__ == "__main__":
    typer.run(main)
