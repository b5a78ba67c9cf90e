"""The first token of a short chat through the queue, one job at a time, beside another tree.

    python -m benches.first_token --model FILE [--beside TREE] [--jobs 60] [--threads 2]

Each tree has a Redis, a worker and a client of its own, in processes that run its code; jobs take
turns, and each has another question. The time is the client's, from the submission to the event
with the first token. ``waited`` and ``prefill`` are parts of it, as the job's result tells them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from benches.command import heading, main, row
from llorch_worker.bench.instruments.alternating import alternate
from llorch_worker.bench.one_worker import READY_TIMEOUT_S, one_worker
from llorch_worker.client import Client
from llorch_worker.settings import Settings

HERE = Path(__file__).resolve()
WARM_JOBS = 5
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Job:
    """Milliseconds of one job."""

    first_token_ms: float
    waited_ms: float
    """From the queue to its first step."""
    prefill_ms: float
    """From there to its first token."""


def first_token(
    model: Annotated[Path, typer.Option("--model", help="A .gguf file or a folder.")],
    beside: Annotated[Path | None, typer.Option("--beside", help="Another tree.")] = None,
    jobs: Annotated[int, typer.Option("--jobs", min=2)] = 60,
    threads: Annotated[int | None, typer.Option("--threads")] = None,
) -> None:
    """Medians of ``jobs`` jobs, and of the pairs' ratios."""
    trees = [HERE.parent.parent, *([] if beside is None else [beside.resolve()])]
    with ExitStack() as stack:
        ask = [stack.enter_context(_serving(tree, model, threads)) for tree in trees]
        # Without another tree each job is its own pair.
        pairs = list(alternate(ask[0], ask[-1], range(WARM_JOBS + jobs)))[WARM_JOBS:]
    heading("tree", "first token, ms", "waited", "prefill")
    for side, tree in enumerate(trees):
        its = [pair[side] for pair in pairs]
        columns = [(j.first_token_ms, j.waited_ms, j.prefill_ms) for j in its]
        row(tree.name, *(f"{median(column):.1f}" for column in zip(*columns, strict=True)))
    if beside is not None:
        print(f"ratio {median(a.first_token_ms / b.first_token_ms for a, b in pairs):.3f}")


@contextmanager
def _serving(tree: Path, model: Path, threads: int | None) -> Iterator[partial[Job]]:
    """What runs a job by its number in the code of ``tree``."""
    command = [sys.executable, str(HERE), str(model.resolve()), str(threads or "")]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=tree, env=environment, stdin=pipe, stdout=pipe, text=True
    ) as process:
        try:
            yield partial(_ask, process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(TIMEOUT_S)


def _ask(process: subprocess.Popen[str], number: int) -> Job:
    assert process.stdin is not None
    assert process.stdout is not None
    print(number, file=process.stdin, flush=True)
    return Job(**json.loads(process.stdout.readline()))


def _serve(model: str, threads: str) -> None:
    """Runs a job for each number of the input, and prints what it took."""
    settings = Settings(model=model, device="cpu", max_context=512)
    with one_worker(settings, int(threads) if threads else None) as stack:
        stack.start()
        stack.wait_ready(READY_TIMEOUT_S)
        with Client(stack.redis_url, model=settings.served_name) as client:
            for line in sys.stdin:
                print(json.dumps(_run(client, int(line))), flush=True)


def _run(client: Client, number: int) -> dict[str, float]:
    question = {"role": "user", "content": f"What is {number} and a lighthouse?"}
    begun_s = time.perf_counter()
    job = client.submit(messages=[question], max_tokens=4, temperature=0)
    first_s = next(
        time.perf_counter()
        for entry in job.stream(timeout=TIMEOUT_S)
        if entry.event.type == "tokens"
    )
    timings = job.result(TIMEOUT_S).timings
    return {
        "first_token_ms": 1e3 * (first_s - begun_s),
        "waited_ms": timings.queue_ms,
        "prefill_ms": timings.prefill_ms,
    }


if __name__ == "__main__":
    if len(sys.argv) == 3 and not sys.argv[1].startswith("-"):
        _serve(*sys.argv[1:])
    else:
        main(first_token, "first_token")
