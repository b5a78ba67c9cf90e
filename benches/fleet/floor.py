"""What the packets of a job cost a Redis that sleeps between them, whatever they ask for.

    python -m benches.fleet.floor [--rate 500] [--jobs 3000] [--connections 100]

``PING``: one packet from one of the connections and its reply. "A job's packets": those that idle
workers and our client exchange with Redis, but with scripts that do next to nothing: one enqueues
(it only rings), one claims, before the next ``BLPOP`` of the same connection, and one finishes.
Each over TCP and over a Unix socket, in us of CPU time of Redis.
"""

from __future__ import annotations

import multiprocessing
import selectors
import tempfile
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
import typer

from benches.fleet import measures
from llorch_worker.broker.connection import MAX_CONNECTIONS
from tests.services import own_redis

RING = "return redis.call('LPUSH', KEYS[1], 1)"
NOTHING = "return 1"
READY_S = 60


def work(url: str, connections: int, ready: Any) -> None:
    """Workers that answer each ring with the packets of a job that is claimed and ends at once."""
    client = redis.Redis.from_url(url, max_connections=MAX_CONNECTIONS)
    nothing = client.script_load(NOTHING)
    selector = selectors.DefaultSelector()
    for _ in range(connections):
        waiting: Any = client.connection_pool.get_connection()
        waiting.send_command("BLPOP", "bell", 0)
        selector.register(waiting._sock, selectors.EVENT_READ, waiting)
    ready.set()
    while True:
        for key, _ in selector.select():
            key.data.read_response()
            claim = [("EVALSHA", nothing, 0), ("BLPOP", "bell", 0)]
            key.data.send_packed_command(key.data.pack_commands(claim))
            key.data.read_response()
            client.evalsha(nothing, 0)


def cost_us(client: redis.Redis, push: Callable[[int], Any], rate: float, jobs: int) -> float:
    """CPU time of Redis for each call of ``push``, without that of an idle server."""
    return measures.measure(client, push, rate, jobs)[1].cpu_us


def measure(url: str, rate: float, jobs: int, connections: int) -> tuple[float, float]:
    """What a PING and a job's packets cost, in us."""
    with redis.Redis.from_url(url, max_connections=MAX_CONNECTIONS) as client:
        ring = client.script_load(RING)
        pool = deque(client.client() for _ in range(connections))

        def ping(_: int) -> None:
            pool.rotate()
            pool[0].ping()

        ping_us = cost_us(client, ping, rate, jobs)
        ready = multiprocessing.Event()
        workers = multiprocessing.Process(target=work, args=(url, connections, ready))
        workers.start()
        try:
            if not ready.wait(READY_S):
                raise TimeoutError("the process of the workers did not begin to wait")
            job_us = cost_us(client, lambda _: client.evalsha(ring, 1, "bell"), rate, jobs)
        finally:
            workers.kill()
            workers.join()
        return ping_us, job_us


def main(rate: float = 500, jobs: int = 3000, connections: int = 100) -> None:
    """Measure a PING and a job's packets."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "redis.sock"
        with own_redis(options=("--unixsocket", str(path))) as server:
            for kind, url in (("TCP", server.url), ("Unix socket", f"unix://{path}")):
                ping_us, job_us = measure(url, rate, jobs, connections)
                print(f"{kind}: PING {ping_us:.0f} us, a job's packets {job_us:.0f} us", flush=True)


if __name__ == "__main__":
    typer.run(main)
