"""What redis-py's client costs a command of a process whose caches a model has just emptied.

    python -m benches.redis_command [--rounds 200] [--evict-mb 128]

Starts a Redis. The same script call is sent by redis-py's own client and by ours, which keeps its
connections, by turns. Before each the process reads as many bytes as no cache holds, as a step of a
model does, and rests for a moment, as a worker does that waits. Then both without that: warm.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from statistics import median, quantiles

import redis
import torch

from llorch_worker.bench.jobs.rig import Rig
from llorch_worker.broker.connection import connect
from llorch_worker.broker.scripts import load, run_script

REST_S = 0.002
KEYS = [f"llorch:bench:{number}" for number in range(4)]
ARGUMENTS: list[str | int] = ["x" * 36, "y" * 1_500, "z" * 400, 0, 3600, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description="Cold and warm commands.")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--evict-mb", type=int, default=128)
    options = parser.parse_args()
    larger_than_caches = torch.ones(options.evict_mb * 10**6 // 4)
    with Rig() as rig:
        stock = redis.Redis.from_url(rig.redis_url, decode_responses=True, protocol=2)
        with stock, connect(rig.redis_url) as ours:
            # One of ours that looks at a key and changes nothing: nobody holds this claim.
            load(ours, "release")
            clients = {"redis-py": stock, "ours": ours}

            def took_us(client: redis.Redis) -> float:
                began_s = time.perf_counter()
                run_script(client, "release", KEYS[:2], ARGUMENTS)
                return (time.perf_counter() - began_s) * 1e6

            cold: dict[str, list[float]] = {name: [] for name in clients}
            warm: dict[str, list[float]] = {name: [] for name in clients}
            for times, evict in ((warm, False), (cold, True)):
                for _ in range(options.rounds):
                    for name, client in clients.items():
                        if evict:
                            larger_than_caches.sum()
                            time.sleep(REST_S)
                        times[name].append(took_us(client))
    print(f"command: {shlex.join(sys.orig_argv)}")
    print(f"redis-py {redis.__version__}, {options.rounds} rounds, us of a command and its answer")
    print("client    cold p25    p50   warm p50")
    for name in clients:
        print(
            f"{name:<9} {quantiles(cold[name])[0]:8.0f} {median(cold[name]):6.0f} "
            f"{median(warm[name]):10.0f}"
        )
    print(f"ours / redis-py, cold: {median(cold['ours']) / median(cold['redis-py']):.2f}")


if __name__ == "__main__":
    main()
