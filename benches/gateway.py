"""What the gateway costs beside the Python client: first tokens, throughput, and many streams.

    python -m benches.gateway [--pairs 100] [--jobs 256] [--streams 500] [--rounds 3]

Starts a redis-server, a worker with the demo model and a gateway. Both sides take turns in one run.
Bounds: the gateway adds at most 10 ms (p50) to the first token, and reaches at least 90% of the
client's throughput; no stream is dropped, and its memory does not grow from round to round.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import psutil

from benches.command import main
from llorch_worker.bench.instruments.percentiles import percentiles_ms
from llorch_worker.client import AsyncClient
from llorch_worker.contract import Tokens
from llorch_worker.demo_model import STORY_MODEL
from tests.gateways import GatewayProcess, running_gateway
from tests.services import REAL_APP, own_redis, running_worker

MODEL = "demo"
PROMPT = "Once upon a time"
PASSES = 3
LATENCY_TOKENS, JOB_TOKENS, STREAM_TOKENS = 4, 32, 64
RSS_EVERY_S = 0.2
DONE = "[DONE]"


class Http:
    """Just enough HTTP for a load, with one connection a request; it costs the bench little."""

    def __init__(self, url: str) -> None:
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port

    async def post(self, path: str, document: dict[str, Any]) -> AsyncIterator[bytes]:
        """The lines of the answer's body."""
        reader, writer = await asyncio.open_connection(self._host, self._port)
        try:
            body = json.dumps(document).encode()
            head = (
                f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode() + body)
            status = (await reader.readline()).split()[1]
            while await reader.readline() != b"\r\n":
                pass
            if status != b"200":
                raise RuntimeError(f"{path} answered {status.decode()}")
            # The sizes of chunks and the blank lines between events are lines too.
            while line := await reader.readline():
                yield line
        finally:
            writer.close()

    async def events(self, path: str, document: dict[str, Any]) -> AsyncIterator[str]:
        """The data of the server-sent events, up to [DONE]."""
        async for line in self.post(path, {**document, "stream": True}):
            if line.startswith(b"data: "):
                data = line[6:].decode().strip()
                yield data
                if data == DONE:
                    return


def completion(number: int, max_tokens: int) -> dict[str, Any]:
    return {
        "model": MODEL, "prompt": PROMPT, "max_tokens": max_tokens, "seed": number,
        "ignore_eos": True,
    }  # fmt: skip


async def first_token_s(http: Http, number: int) -> float:
    began_s = time.perf_counter()
    found = None
    async for data in http.events("/v1/completions", completion(number, LATENCY_TOKENS)):
        if found is None and data != DONE and json.loads(data)["choices"][0]["text"]:
            found = time.perf_counter() - began_s
    assert found is not None
    return found


async def client_first_token_s(client: AsyncClient, number: int) -> float:
    began_s = time.perf_counter()
    found = None
    job = await client.submit(**completion(number, LATENCY_TOKENS))
    async for entry in job.stream():
        if found is None and isinstance(entry.event, Tokens) and entry.event.text:
            found = time.perf_counter() - began_s
    assert found is not None
    return found


async def measure_latency(http: Http, client: AsyncClient, pairs: int) -> None:
    theirs, ours = [], []
    for number in range(-3, pairs):
        pair = (
            await client_first_token_s(client, abs(number)),
            await first_token_s(http, abs(number)),
        )
        if number >= 0:
            theirs.append(pair[0])
            ours.append(pair[1])
    added = median(ours) - median(theirs)
    for name, found in (("Python client", theirs), ("gateway", ours)):
        p = percentiles_ms(found)
        print(f"first token, {name:14} p50 {p.p50:6.1f}  p95 {p.p95:6.1f} ms  ({p.samples} jobs)")
    print(f"the gateway adds {added * 1e3:.1f} ms (p50); bound 10 ms")


async def measure_throughput(http: Http, client: AsyncClient, jobs: int) -> None:
    async def by_client(number: int) -> int:
        job = await client.submit(**completion(number, JOB_TOKENS))
        return (await job.result()).usage.completion

    async def by_gateway(number: int) -> int:
        lines = [
            line async for line in http.post("/v1/completions", completion(number, JOB_TOKENS))
        ]
        return int(json.loads(max(lines, key=len))["usage"]["completion_tokens"])

    rates: dict[str, list[float]] = {"Python client": [], "gateway": []}
    for each in range(PASSES + 1):
        for name, one in (("Python client", by_client), ("gateway", by_gateway)):
            began_s = time.perf_counter()
            tokens = await asyncio.gather(*(one(number) for number in range(jobs)))
            if each:  # The first pass warms up.
                rates[name].append(sum(tokens) / (time.perf_counter() - began_s))
    for name, found in rates.items():
        shown = ", ".join(f"{rate:.0f}" for rate in found)
        print(f"{jobs} jobs, {name:14} tokens/s: {shown}")
    share = median(rates["gateway"]) / median(rates["Python client"])
    print(f"the gateway reaches {share:.1%} of the client's throughput; bound 90%")


async def measure_streams(http: Http, gateway: GatewayProcess, streams: int, rounds: int) -> None:
    process = psutil.Process(gateway.process.pid)
    peak = 0

    async def watch() -> None:
        nonlocal peak
        while True:
            peak = max(peak, process.memory_info().rss)
            await asyncio.sleep(RSS_EVERY_S)

    async def read(number: int) -> bool:
        last = ""
        try:
            async for data in http.events("/v1/completions", completion(number, STREAM_TOKENS)):
                last = data
        except (OSError, RuntimeError):
            return False
        return last == DONE

    print(f"{streams} streams at once; the gateway's memory before: {_mib(process)} MiB")
    for each in range(rounds):
        peak, began_s = 0, time.perf_counter()
        watcher = asyncio.create_task(watch())
        whole = await asyncio.gather(*(read(number) for number in range(streams)))
        watcher.cancel()
        took_s = time.perf_counter() - began_s
        print(
            f"round {each + 1}: {sum(whole)} of {streams} whole in {took_s:.1f} s, "
            f"memory peak {peak / 2**20:.0f} MiB, after {_mib(process)} MiB"
        )


def _mib(process: psutil.Process) -> str:
    return f"{process.memory_info().rss / 2**20:.0f}"


async def measure(pairs: int, jobs: int, streams: int, rounds: int) -> None:
    settings = {"model": STORY_MODEL, "model_name": MODEL}
    with (
        tempfile.TemporaryDirectory() as folder,
        own_redis() as server,
        running_worker(server.url, Path(folder), app=REAL_APP, name=MODEL, fresh=True, **settings),
        running_gateway(server.url, Path(folder), fresh=True) as gateway,
    ):
        http = Http(gateway.url)
        async with AsyncClient(server.url) as client:
            await measure_latency(http, client, pairs)
            await measure_throughput(http, client, jobs)
        await measure_streams(http, gateway, streams, rounds)


def gateway(pairs: int = 100, jobs: int = 256, streams: int = 500, rounds: int = 3) -> None:
    """Compare the gateway with the Python client, and open many streams."""
    asyncio.run(measure(pairs, jobs, streams, rounds))


if __name__ == "__main__":
    main(gateway, "gateway")
