"""llama-server's tokens/s through the queue, beside what a client of its own gets.

    python -m benches.through_server --model FILE [--server "llama-server -t 2"] [--passes 5]

Both ask for the same jobs, all at once: the client keeps as many requests open as the server has
slots, the queue's jobs go through one worker. The passes alternate, so that a machine that slows
down slows both. The processor time of the worker tells more than the ratio where others compute.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

import aiohttp
import psutil
import typer

from benches.command import heading, main, row
from llorch_worker.bench.one_worker import READY_TIMEOUT_S, one_worker
from llorch_worker.client import Client
from llorch_worker.settings import Settings
from llorch_worker.stack.ports import LOCALHOST, any_free_port

MODEL = "measured"
PROMPT = "Once upon a time, in a village by the sea,"
CONTEXT = 1024


def through_server(
    model: Annotated[Path, typer.Option("--model", help="A .gguf file.")],
    server: Annotated[str, typer.Option("--server", help="A command line.")] = "llama-server",
    slots: Annotated[int, typer.Option("--slots", min=1)] = 4,
    jobs: Annotated[int, typer.Option("--jobs", min=1)] = 12,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=1)] = 48,
    passes: Annotated[int, typer.Option("--passes", min=1)] = 5,
) -> None:
    """Tokens/s of a server directly and through the queue, and the worker's processor time."""
    with _running(server, model, slots) as url:
        settings = Settings(engine_url=url, model=MODEL)
        with one_worker(settings, None) as stack:
            stack.start()
            stack.wait_ready(READY_TIMEOUT_S)
            worker = _worker()
            with Client(stack.redis_url, model=MODEL) as client:

                def queued() -> None:
                    fields: dict[str, Any] = {
                        "prompt": PROMPT,
                        "max_tokens": new_tokens,
                        "temperature": 0.8,
                        "ignore_eos": True,
                    }
                    sent = [client.submit(**fields) for _ in range(jobs)]
                    assert sum(job.result(600).usage.completion for job in sent) == tokens

                def direct() -> None:
                    assert asyncio.run(_ask(url, jobs, slots, new_tokens)) == jobs

                tokens = jobs * new_tokens
                rates: dict[Callable[[], None], list[float]] = {direct: [], queued: []}
                direct()
                queued()
                heading("pass", "direct tokens/s", "queued tokens/s", "worker us a token")
                for number in range(passes):
                    for ask in (direct, queued) if number % 2 else (queued, direct):
                        before_s = _spent_s(worker)
                        rates[ask].append(tokens / _timed(ask))
                        if ask is queued:
                            spent_us = 1e6 * (_spent_s(worker) - before_s) / tokens
                    last = (f"{found[-1]:.1f}" for found in rates.values())
                    row(number + 1, *last, f"{spent_us:.0f}")
    ratio = mean(rates[queued]) / mean(rates[direct])
    print(f"\nqueued / direct: {ratio:.3f}")


@contextmanager
def _running(server: str, model: Path, slots: int) -> Iterator[str]:
    port = any_free_port()
    command = [
        *shlex.split(server), "-m", str(model), "--alias", MODEL, "--host", LOCALHOST,
        "--port", str(port), "-np", str(slots), "-c", str(CONTEXT * slots),
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://{LOCALHOST}:{port}"
    finally:
        process.kill()
        process.wait()


async def _ask(url: str, jobs: int, slots: int, new_tokens: int) -> int:
    """How many answers have come."""
    body = {
        "prompt": PROMPT, "n_predict": new_tokens, "temperature": 0.8, "stream": True,
        "ignore_eos": True, "return_tokens": True,
    }  # fmt: skip
    ended, numbers = 0, iter(range(jobs))

    async def one(session: aiohttp.ClientSession) -> None:
        nonlocal ended
        for _ in numbers:
            async with session.post(f"{url}/completion", json=body) as response:
                async for line in response.content:
                    if line.startswith(b"data:"):
                        ended += json.loads(line[5:])["stop"]

    # The server closes connections that idle for a moment.
    connector = aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(connector=connector) as session:
        await asyncio.gather(*(one(session) for _ in range(slots)))
    return ended


def _timed(ask: Callable[[], None]) -> float:
    began_s = time.monotonic()
    ask()
    return time.monotonic() - began_s


def _worker() -> psutil.Process:
    below = psutil.Process(os.getpid()).children(recursive=True)
    return next(each for each in below if "llorch_worker" in " ".join(each.cmdline()))


def _spent_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    main(through_server, "through_server")
