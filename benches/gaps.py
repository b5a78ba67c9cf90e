"""How long the tokens of one job stay away while others send what is hard to take in.

    python -m benches.gaps --model FILE [--seconds 10] [--threads 1] [--kinds "long chat"]

A client follows a job of one worker while a process of its own sends jobs of one kind, one at a
time. These hardly compute: they are refused, or end with their first token. The gaps are those
between two events at the client, which a worker writes every ``LLORCH_FLUSH_INTERVAL_MS``. The last
columns say for how much of the time a thread of the engine and of the keeper wanted a processor and
had none: what is long without it waits for a lock.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any

import psutil
import typer

from benches.command import heading, main, row
from llorch_worker.bench.one_worker import READY_TIMEOUT_S, one_worker
from llorch_worker.client import Client
from llorch_worker.contract import LlorchError, Tokens
from llorch_worker.settings import Settings

CONTEXT = 2048
_WORDS = "word and another word, "


def _chat(characters: int, pieces: int = 1) -> dict[str, Any]:
    content = (_WORDS * (characters // pieces // len(_WORDS) + 1))[: characters // pieces]
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i in range(pieces)]}


def _schema(fields: int) -> dict[str, Any]:
    words = {
        f"field {i}": {"type": "string", "pattern": f"^[a-z{i}]{{1,20}}$"} for i in range(fields)
    }
    return {"type": "object", "properties": words, "required": [*words]}


def _tool(number: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"tool_{number}", "parameters": _schema(20)}}


KINDS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": dict,
    "chat of 30 kB": lambda: _chat(30_000),
    "chat of 8 MB": lambda: _chat(8_000_000, pieces=999),
    "schema": lambda: {"prompt": "x", "structured_outputs": {"json": _schema(200)}},
    "calls": lambda: {
        **_chat(10),
        "tools": [_tool(number) for number in range(60)],
        "tool_choice": "required",
    },
}


def gaps(
    model: Annotated[Path, typer.Option("--model", help="A .gguf file with a chat template.")],
    seconds: Annotated[float, typer.Option("--seconds", min=1)] = 10.0,
    threads: Annotated[int | None, typer.Option("--threads")] = None,
    kinds: Annotated[str, typer.Option("--kinds", help="Some of them.")] = ",".join(KINDS),
) -> None:
    """Gaps between a job's events, in ms, beside other jobs of each kind."""
    settings = Settings(model=str(model), max_context=CONTEXT, max_sequences=4)
    heading("beside", "sent", "p50", "p99", "longest", "engine waits", "keeper waits")
    with one_worker(settings, threads) as stack:
        stack.start()
        stack.wait_ready(READY_TIMEOUT_S)
        engine, keeper = _processes()
        for kind in kinds.split(","):
            with Client(stack.redis_url, model=settings.served_name) as client:
                context = multiprocessing.get_context("spawn")
                sent = context.Value("i", 0)
                address = (stack.redis_url, settings.served_name, kind, sent)
                sending = context.Process(target=_send, args=address, daemon=True)
                if kind != "none":
                    sending.start()
                    while not sent.value:
                        time.sleep(0.05)
                before, begun_s = [_waited_s(each) for each in (engine, keeper)], time.monotonic()
                found = _follow(client, seconds)
                took_s = time.monotonic() - begun_s
                waited = [_waited_s(each) for each in (engine, keeper)]
                if kind != "none":
                    sending.kill()
                    sending.join()
            row(
                kind,
                sent.value,
                f"{median(found):.0f}",
                f"{quantiles(found, n=100, method='inclusive')[-1]:.0f}",
                f"{max(found):.0f}",
                *(f"{(b - a) / took_s:.0%}" for a, b in zip(before, waited, strict=True)),
            )


def _follow(client: Client, seconds: float) -> list[float]:
    """The gaps between the events of jobs that follow each other for so long, in ms."""
    found: list[float] = []
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        job = client.submit(prompt="Once upon a time", max_tokens=CONTEXT // 2, ignore_eos=True)
        last_s = None
        for entry in job.stream():
            now_s = time.monotonic()
            if isinstance(entry.event, Tokens):
                if last_s is not None:
                    found.append((now_s - last_s) * 1e3)
                last_s = now_s
            if now_s >= end_s:
                job.cancel()
                break
    return found


def _send(redis_url: str, model: str, kind: str, sent: Any) -> None:
    """Sends jobs of this kind until it is killed, each when the one before has ended. It gives way:
    who sends has other processors than the worker."""
    os.nice(19)
    fields = json.loads(json.dumps(KINDS[kind]()))
    with Client(redis_url, model=model) as client:
        while True:
            sent.value += 1
            with suppress(LlorchError):
                client.submit(**fields, max_tokens=1).result(600)


def _processes() -> tuple[psutil.Process, psutil.Process]:
    """The engine's process and its keeper's."""
    below = psutil.Process().children(recursive=True)
    engine = next(each for each in below if "llorch_worker.engine.process.server" in each.cmdline())
    keeper = engine.parent()
    assert keeper is not None
    return engine, keeper


def _waited_s(process: psutil.Process) -> float:
    """For how long its threads have waited for a processor, all together."""
    lines = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
    return sum(_second(line.read_text().split()) for line in lines) / 1e9


def _second(numbers: Iterable[str]) -> int:
    return int([*numbers][1])


if __name__ == "__main__":
    main(gaps, "gaps")
