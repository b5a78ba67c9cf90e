"""How much of an encoder's speed a list of texts keeps through the queue.

    python -m benches.texts --model FOLDER [--texts 4000] [--passes 3] [--list 500] [--threads 1]

The same random texts of 32 to 256 tokens go to the engine in one call, from Python, and as jobs of
lists through a Redis and a worker that are started here, by turns. Each list is a job, eight at a
time. "kept" is the second rate through the first: of a quiet machine alone. The processor's time of
a text, of the worker with its engine and intake, says how much more work the queue is on a busy
one, too.
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Annotated

import psutil
import typer

from benches.command import heading, main, row
from llorch_worker.client import AsyncClient
from llorch_worker.engine.embedding_engine import EmbeddingEngine
from tests.services import REAL_APP, own_redis, running_worker

AT_ONCE = 8


def some_texts(count: int, engine: EmbeddingEngine) -> list[str]:
    """Random texts of 32 to 256 tokens, or as many as the model takes."""
    generator = random.Random(7)
    most = min(256, engine.facts.max_context)
    low, high = 1_000, engine.facts.vocab_size
    ids = [
        [generator.randrange(low, high) for _ in range(generator.randint(32, most) // 2)]
        for _ in range(count)
    ]
    return [engine.tokenizer.decode(each) for each in ids]


def texts(
    model: Annotated[Path, typer.Option(help="An encoder's folder or GGUF file.")],
    count: Annotated[int, typer.Option("--texts")] = 4_000,
    length: Annotated[int, typer.Option("--list", help="Texts of a job.")] = 500,
    passes: int = 3,
    threads: Annotated[int, typer.Option(help="Of the engine.")] = 1,
) -> None:
    """Measure texts a second, directly and through the queue."""
    with EmbeddingEngine.load(model, num_threads=threads) as engine, own_redis() as server:
        given = some_texts(count, engine)
        lists = [given[at : at + length] for at in range(0, count, length)]
        engine.embed(given[:50], truncate=True)
        with (
            tempfile.TemporaryDirectory() as folder,
            running_worker(
                server.url,
                Path(folder),
                app=REAL_APP,
                fresh=True,
                model=model,
                model_name="texts",
                OMP_NUM_THREADS=threads,
            ) as worker,
        ):
            heading(
                *("pass", "engine, texts/s", "queue, texts/s", "kept", "engine, cpu ms a text"),
                *("queue, cpu ms a text", "worker and engine, MiB"),
            )
            kept = []
            held = psutil.Process(worker.process.pid)
            for number in range(passes):
                began_s, began_cpu_s = time.monotonic(), time.process_time()
                for each in lists:
                    engine.embed(each, truncate=True)
                direct = count / (time.monotonic() - began_s)
                direct_cpu_s, before_s = time.process_time() - began_cpu_s, _cpu_s(held)
                queued = count / asyncio.run(_through(server.url, lists))
                queued_cpu_s = _cpu_s(held) - before_s
                kept.append(queued / direct)
                memory = sum(each.memory_info().rss for each in _all(held))
                row(
                    str(number + 1),
                    f"{direct:.1f}",
                    f"{queued:.1f}",
                    f"{kept[-1]:.3f}",
                    f"{1e3 * direct_cpu_s / count:.2f}",
                    f"{1e3 * queued_cpu_s / count:.2f}",
                    f"{memory / 2**20:.0f}",
                )
            print(f"median kept: {median(kept):.3f}", flush=True)


def _all(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    """What a process and all that it has started have computed; the forks that ended included."""
    times = [each.cpu_times() for each in _all(process)]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


async def _through(url: str, lists: list[list[str]]) -> float:
    """The seconds that the lists take as jobs."""
    async with AsyncClient(url) as client:
        await client.embed("warm")
        places = asyncio.Semaphore(AT_ONCE)

        async def embed(some: list[str]) -> None:
            async with places:
                await client.embed(some, truncate=True)

        began_s = time.monotonic()
        await asyncio.gather(*map(embed, lists))
        return time.monotonic() - began_s


if __name__ == "__main__":
    main(texts, "texts")
