"""What ``llorch batch run`` takes for a long file, with a model that computes nothing.

``python -m benches.batch_run`` runs 100,000 lines, kills the command in the middle and starts it
again. It prints the memory of the command over time, the longest queue and the rate, and fails if a
line is lost or repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from llorch_worker.bench.jobs.sandbox import Sandbox
from llorch_worker.broker.connection import connect
from llorch_worker.broker.queues import shared_lists
from llorch_worker.broker.waiting import lengths
from llorch_worker.settings import Settings
from llorch_worker.stack.children import Program, python

MODEL = "no-op"
SAMPLE_S = 0.2


@dataclass
class Watched:
    """One run of the command, up to its end or its kill."""

    rss_bytes: list[int] = field(default_factory=list)
    longest_queue: int = 0
    lines: int = 0
    wall_s: float = 0.0

    def document(self) -> dict[str, float]:
        settled = self.rss_bytes[len(self.rss_bytes) // 10 :]
        mib = [round(each / 2**20, 1) for each in settled]
        return {
            "lines": self.lines,
            "lines_per_s": round(self.lines / self.wall_s, 1),
            "rss_start_mib": mib[0],
            "rss_middle_mib": mib[len(mib) // 2],
            "rss_end_mib": mib[-1],
            "rss_peak_mib": max(mib),
            "longest_queue": self.longest_queue,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lines", type=int, default=100_000)
    parser.add_argument("--window", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, _worker() as redis_url:
        path, output = Path(name) / "in.jsonl", Path(name) / "out.jsonl"
        with path.open("w") as file:
            for number in range(options.lines):
                file.write(f'{{"prompt_token_ids": [1], "max_tokens": 1, "seed": {number}}}\n')
        command = [
            *(sys.executable, "-m", "llorch_worker.cli", "batch", "run", str(path)),
            *("-o", str(output), "--window", str(options.window), "--redis", redis_url),
        ]
        killed = _watch(command, redis_url, output, until_lines=options.lines // 2)
        resumed = _watch(command, redis_url, output, until_lines=None)
        seeds = [json.loads(line)["result"]["seed"] for line in output.open()]
        assert seeds == list(range(options.lines)), "lines were lost, repeated or out of order"
    print(
        json.dumps(
            {
                "window": options.window,
                "until_the_kill": killed.document(),
                "after_it": resumed.document(),
            },
            indent=2,
        )
    )


@contextmanager
def _worker() -> Iterator[str]:
    """The URL of a Redis with a worker behind it."""
    with Sandbox() as sandbox:
        settings = Settings(redis_url=sandbox.redis_url, model_name=MODEL, max_sequences=64)
        program = Program(
            "the no-op worker",
            python("-m", "llorch_worker.bench.instruments.no_op_engine"),
            settings.environment,
        )
        sandbox.start_worker(program, lambda pid: f"{MODEL}-{pid}@{socket.gethostname()}")
        yield sandbox.redis_url


def _watch(command: list[str], redis_url: str, output: Path, *, until_lines: int | None) -> Watched:
    """Runs the command, and kills it once the output has so many lines."""
    watched = Watched()
    before = _count(output)
    began_s = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    usage = psutil.Process(process.pid)
    with connect(redis_url) as client:
        while process.poll() is None:
            try:
                watched.rss_bytes.append(usage.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            waiting = sum(lengths(client, shared_lists(MODEL)))
            watched.longest_queue = max(watched.longest_queue, waiting)
            if until_lines is not None and _count(output) >= until_lines:
                os.kill(process.pid, signal.SIGKILL)
                break
            time.sleep(SAMPLE_S)
    code = process.wait()
    assert code == (0 if until_lines is None else -signal.SIGKILL), code
    watched.wall_s = time.monotonic() - began_s
    watched.lines = _count(output) - before
    return watched


def _count(path: Path) -> int:
    """The whole lines of a file."""
    if not path.exists():
        return 0
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(2**20), b""))


if __name__ == "__main__":
    main()
