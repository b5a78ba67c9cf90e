"""How much of an encoder's speed lists of texts keep through the queue, and what others do.

    python -m benches.texts --model FILE [--texts 4000] [--passes 3] [--list 500] [--threads 1]
        [--server llama-server] [--folder FOLDER] [--peer-texts 1000] [--dtype auto]

The same random texts of 32 to 256 tokens go to the engine in one call, from Python, and as jobs of
lists through a Redis and a worker that are started here, by turns. Each list is a job, eight at a
time. "kept" is the second rate through the first: of a quiet machine alone. The processor's time of
a text, of the worker with its engine and intake, says how much more work the queue is on a busy
one, too. Its memory is that after a tenth, half and all of the texts.

``--server`` is llama.cpp's, which gets the same lists of the same GGUF file by HTTP. ``--folder``,
the same model as sentence-transformers has it, goes into a stock Celery worker around
transformers. Both get the first ``--peer-texts``, which our queue then gets once more; the ratios
are ours through theirs, by the clock and by the processor's time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import psutil
import typer
from celery import Celery

from benches.command import heading, main, row
from llorch_worker.client import AsyncClient
from llorch_worker.engine.embedding_engine import EmbeddingEngine
from llorch_worker.stack import ports
from tests.services import REAL_APP, RedisServer, own_redis, running_worker, tethered
from tests.waiting import wait_until

AT_ONCE = 8
SHARES = (0.1, 0.5, 1.0)
"""Of the texts, after which memory is looked at."""
SERVER_TOKENS = 8192
"""What llama-server computes at once: as many as it may of a list."""
TIMEOUT_S = 3600
Lists = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Peer:
    """Another service that embeds."""

    process: psutil.Process
    run: Callable[[Lists], None]


def some_texts(count: int, engine: EmbeddingEngine) -> list[str]:
    """Random texts of 32 to 256 tokens, or as many as the model takes."""
    generator = random.Random(7)
    most = min(256, engine.facts.max_context)
    low, high = 1_000, engine.facts.vocab_size
    ids = [
        [generator.randrange(low, high) for _ in range(generator.randint(32, most) - 2)]
        for _ in range(count)
    ]
    return [engine.tokenizer.decode(each) for each in ids]


def texts(
    model: Annotated[Path, typer.Option(help="An encoder's folder or GGUF file.")],
    count: Annotated[int, typer.Option("--texts")] = 4_000,
    length: Annotated[int, typer.Option("--list", help="Texts of a job.")] = 500,
    passes: int = 3,
    threads: Annotated[int, typer.Option(help="Of the engine.")] = 1,
    dtype: Annotated[str, typer.Option(help="LLORCH_DTYPE, of ours alone.")] = "auto",
    server: Annotated[str | None, typer.Option(help="llama.cpp's, with its options.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The model for transformers.")] = None,
    peer_texts: Annotated[int, typer.Option(help="Of the first texts.")] = 1_000,
) -> None:
    """Measure texts a second, directly, through the queue, and of others."""
    with (
        EmbeddingEngine.load(model, num_threads=threads, dtype=dtype) as engine,
        own_redis() as redis,
        tempfile.TemporaryDirectory() as logs,
        ExitStack() as stack,
    ):
        given = some_texts(count, engine)
        lists = _lists_of(given, length)
        few = _lists_of(given[:peer_texts], length)
        engine.embed(given[:50], truncate=True)
        worker = stack.enter_context(
            running_worker(
                redis.url,
                Path(logs),
                app=REAL_APP,
                fresh=True,
                model=model,
                model_name="texts",
                dtype=dtype,
                OMP_NUM_THREADS=threads,
            )
        )
        peers: dict[str, Peer] = {}
        if server is not None:
            peers["llama-server"] = stack.enter_context(_llama_server(server, model, threads))
        if folder is not None:
            started = _celery(redis, folder, threads, Path(logs))
            peers["Celery and transformers"] = stack.enter_context(started)
        held = psutil.Process(worker.process.pid)
        heading(
            *("pass", "engine, texts/s", "queue, texts/s", "kept", "engine, cpu ms a text"),
            *("queue, cpu ms a text", "worker and engine, MiB"),
            *(f"{name}, texts/s (ratio, by cpu)" for name in peers),
        )
        kept = []
        for number in range(passes):
            began_s, began_cpu_s = time.monotonic(), time.process_time()
            for each in lists:
                engine.embed(each, truncate=True)
            direct = count / (time.monotonic() - began_s)
            direct_cpu_s, before_s = time.process_time() - began_cpu_s, _cpu_s(held)
            memory: list[int] = []
            queued = count / asyncio.run(_through(redis.url, lists, partial(_note, held, memory)))
            queued_cpu_s = _cpu_s(held) - before_s
            kept.append(queued / direct)
            row(
                number + 1,
                f"{direct:.1f}",
                f"{queued:.1f}",
                f"{kept[-1]:.3f}",
                f"{1e3 * direct_cpu_s / count:.2f}",
                f"{1e3 * queued_cpu_s / count:.2f}",
                ", ".join(str(size // 2**20) for size in memory),
                *(_beside(peer, few, redis.url, held) for peer in peers.values()),
            )
        print(f"median kept: {median(kept):.3f}", flush=True)


def _lists_of(given: Sequence[str], length: int) -> list[Sequence[str]]:
    return [given[at : at + length] for at in range(0, len(given), length)]


def _beside(peer: Peer, lists: Lists, url: str, ours: psutil.Process) -> str:
    """A peer's rate, and how many times as fast our queue is."""
    began_s, began_cpu_s = time.monotonic(), _cpu_s(peer.process)
    peer.run(lists)
    took_s, used_s = time.monotonic() - began_s, _cpu_s(peer.process) - began_cpu_s
    before_s = _cpu_s(ours)
    ours_s = asyncio.run(_through(url, lists, lambda: None))
    by_cpu = used_s / (_cpu_s(ours) - before_s)
    return f"{sum(map(len, lists)) / took_s:.1f} ({took_s / ours_s:.2f}, {by_cpu:.2f})"


def _all(process: psutil.Process) -> list[psutil.Process]:
    return [process, *process.children(recursive=True)]


def _note(process: psutil.Process, sizes: list[int]) -> None:
    sizes.append(sum(each.memory_info().rss for each in _all(process)))


def _cpu_s(process: psutil.Process) -> float:
    """What a process and all that it has started have computed; the forks that ended included."""
    times = [each.cpu_times() for each in _all(process)]
    return float(sum(t.user + t.system + t.children_user + t.children_system for t in times))


async def _through(url: str, lists: Lists, note: Callable[[], None]) -> float:
    """The seconds that the lists take as jobs. ``note`` is called after each of :data:`SHARES`."""
    async with AsyncClient(url) as client:
        await client.embed("warm")
        places = asyncio.Semaphore(AT_ONCE)
        ended = 0
        due = [max(1, round(share * len(lists))) for share in SHARES]

        async def embed(some: Sequence[str]) -> None:
            nonlocal ended
            async with places:
                await client.embed(some, truncate=True)
            ended += 1
            if ended in due:
                note()

        began_s = time.monotonic()
        await asyncio.gather(*map(embed, lists))
        return time.monotonic() - began_s


@contextmanager
def _llama_server(command: str, model: Path, threads: int) -> Iterator[Peer]:
    port = ports.any_free_port()
    url = f"http://{ports.LOCALHOST}:{port}"
    options = {
        "--model": model,
        "--port": port,
        "--threads": threads,
        "--threads-batch": threads,
        "--ctx-size": SERVER_TOKENS,
        "--batch-size": SERVER_TOKENS,
        "--ubatch-size": SERVER_TOKENS,
    }
    arguments = [str(part) for pair in options.items() for part in pair]

    def embed(some: Sequence[str]) -> None:
        answer = _ask(f"{url}/v1/embeddings", {"input": some})
        assert len(answer["data"]) == len(some)

    def run(lists: Lists) -> None:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(embed, lists))

    started = [*shlex.split(command), "--embedding", *arguments]
    with _process(started, {}, subprocess.DEVNULL) as process:
        wait_until(lambda: _answers(f"{url}/health"), timeout_s=120)
        run([["warm"]])
        yield Peer(process, run)


def _ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(
        Request(url, data, {"Content-Type": "application/json"}), timeout=TIMEOUT_S
    ) as answer:
        return json.load(answer)


def _answers(url: str) -> bool:
    try:
        return bool(_ask(url))
    except (URLError, OSError):
        return False


@contextmanager
def _celery(redis: RedisServer, folder: Path, threads: int, logs: Path) -> Iterator[Peer]:
    # Another database than our worker's.
    url = f"{redis.url.rpartition('/')[0]}/1"
    variables = {"BROKER": url, "MODEL": str(folder), "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "celery", "-A", "benches.texts_in_celery", "worker"]
    with (
        Celery("texts", broker=url, backend=url, set_as_current=False) as app,
        (logs / "celery.log").open("wb") as log,
        _process([*command, "--pool", "solo"], variables, log) as process,
    ):

        def run(lists: Lists) -> None:
            sent = [app.send_task("embed", args=[some]) for some in lists]
            for result in sent:
                result.get(TIMEOUT_S)

        run([["warm"]])
        yield Peer(process, run)


@contextmanager
def _process(command: list[str], variables: dict[str, str], log: Any) -> Iterator[psutil.Process]:
    """One that ends with this."""
    started = subprocess.Popen(
        tethered(*command), env=os.environ | variables, stdout=log, stderr=log
    )
    try:
        yield psutil.Process(started.pid)
    finally:
        started.terminate()
        started.wait()


if __name__ == "__main__":
    main(texts, "texts")
