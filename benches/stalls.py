"""How long one job's request may hold up another's tokens: the longest gap under each bomb.

    python -m benches.stalls [--model FILE] [--only "NAME;..."]

Starts a redis-server and a worker. A job runs, and another process notes when its tokens arrive.
Meanwhile another job comes, whose request is as costly as the contract allows.
Bound: no gap over 200 ms.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer

from benches.command import main
from llorch_worker.client import Client
from llorch_worker.contract import Cancelled, LlorchError, Tokens
from llorch_worker.demo_model import demo_model
from tests.services import REAL_APP, own_redis, running_worker

MODEL = "stalls"
MIB = 1_000_000
QUIET_S = 2.0
ANSWER_S = 120.0
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def chat(text: str, turns: int = 7) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i in range(turns)]}


def calls(arguments: str, count: int) -> dict[str, Any]:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call] * count}
    return {"messages": [{"role": "user", "content": "x"}, turn, {"role": "user", "content": "y"}]}


def tool(schema: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return {"type": "function", "function": {"name": f"f{number}", "parameters": schema}}


def schema(**fields: Any) -> dict[str, Any]:
    return {"prompt": "x", "structured_outputs": fields}


def tools(count: int) -> list[dict[str, Any]]:
    return [tool(wide(7_000), number) for number in range(count)]


def wide(properties: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"p{i}": {"type": "string"} for i in range(properties)},
    }


BOMBS: dict[str, Callable[[], dict[str, Any]]] = {
    "none": lambda: {"prompt": "x"},
    "7 MB of <|": lambda: chat("<|" * (MIB // 2)),
    "7 MB of words": lambda: chat("word " * (MIB // 5)),
    "1 MB of words": lambda: {"prompt": "word " * (MIB // 5)},
    "1 MB of spaces": lambda: {"prompt": " " * MIB},
    "4 MB of emoji": lambda: {"prompt": "\U0001f600" * MIB},
    "7 MB of control tokens": lambda: chat("<|im_start|>" * (MIB // 12)),
    "7 MB of noncharacters": lambda: chat("\ufdd0" * (MIB // 3)),
    "1,000 turns": lambda: chat("<|im_start|>" * 500, 999),
    "1,000,000 token ids": lambda: {"prompt_token_ids": [1] * MIB},
    "50 calls of 100 kB": lambda: calls(json.dumps({"k": ["v"] * 16_000}), 50),
    "calls nested 60 deep": lambda: calls('{"a":' * 60 + "{}" + "}" * 60, 128),
    "1 MB of digits in a call": lambda: calls('{"a": ' + "1" * (MIB - 10) + "}", 1),
    "4 tools of 250 kB": lambda: chat("x", 1) | {"tools": tools(4)},
    "a forced call of them": lambda: chat("x", 1) | {"tools": tools(4), "tool_choice": "required"},
    "schema, 8,000 properties": lambda: schema(json=wide(8_000)),
    "schema, an enum of 250 kB": lambda: schema(json={"enum": [f"v{i}" for i in range(25_000)]}),
    "schema, strings in strings": lambda: schema(
        json={"type": "array", "items": {"type": "string", "pattern": "(a|b){1,500}c{2,900}"}}
    ),
    "schema, 60 levels": lambda: schema(json=json.loads('{"not":' * 60 + "{}" + "}" * 60)),
    "schema, many anyOf": lambda: schema(
        json={"anyOf": [{**wide(20), "required": [f"p{i % 20}"]} for i in range(300)]}
    ),
    "regex, 60 kB": lambda: schema(regex="(" + "|".join(f"w{i}x*" for i in range(7_000)) + ")+"),
    "regex, counted": lambda: schema(regex="((a{1,300}b{1,300}){1,300}c){1,300}"),
    "choice, 4 MB": lambda: schema(choice=[f"{i:04}" + "ab c" * 1_000 for i in range(1_024)]),
    "lark, ambiguous": lambda: schema(grammar='start: e\ne: e e | "a" | e e e'),
    "lark, 60 kB": lambda: schema(
        grammar="start: r0\n" + "\n".join(f'r{i}: "a" r{i + 1} | r{i + 1}' for i in range(2_500))
        + '\nr2500: "z"'
    ),
}  # fmt: skip


def arrivals(url: str, job_id: str) -> list[float]:
    """When each event with tokens arrives, until the job ends; in a process of its own."""
    found = []
    with Client(url) as client:
        try:
            for entry in client.job(job_id).stream():
                if isinstance(entry.event, Tokens):
                    found.append(time.time())
        except Cancelled:
            pass
    return found


def measure(name: str, url: str, readers: ProcessPoolExecutor, worker: psutil.Process) -> float:
    """Prints one line, and returns the longest gap in s."""
    fields = BOMBS[name]() | {"max_tokens": 16}
    with Client(url) as client:
        neighbour = client.submit(prompt="Once", max_tokens=1_900, temperature=0, ignore_eos=True)
        times = readers.submit(arrivals, url, neighbour.id)
        next(iter(neighbour.stream()))
        time.sleep(QUIET_S)
        before = worker.memory_info().rss
        began_s = time.time()
        try:
            end = str(client.submit(**fields).result(ANSWER_S).choices[0].finish_reason)
        except LlorchError as error:
            end = str(error)
        took_s = time.time() - began_s
        time.sleep(QUIET_S if name == "none" else QUIET_S / 4)
        neighbour.cancel()
        seen = [at for at in times.result() if at >= began_s - QUIET_S / 8]
        grown = (worker.memory_info().rss - before) / 2**20
    gap = max((b - a for a, b in pairwise(seen)), default=float("inf"))
    print(
        f"{name:28} {gap * 1e3:6.0f} ms {took_s:6.1f} s {grown:+6.0f} MiB  {end[:90]}", flush=True
    )
    return gap


def stalls(
    model: Annotated[Path | None, typer.Option(exists=True, help="By default, the demo's.")] = None,
    only: Annotated[str, typer.Option(help="Names of bombs.")] = ";".join(BOMBS),
) -> None:
    """Measure the longest gap between a job's tokens under each bomb."""
    with tempfile.TemporaryDirectory() as name, own_redis() as server:
        templated = Path(name) / "stalls.gguf"
        command = ("-m", "gguf.scripts.gguf_new_metadata", "--chat-template", TEMPLATE)
        subprocess.run(
            [sys.executable, *command, str(model or demo_model()), str(templated)],
            check=True,
            capture_output=True,
        )
        started = partial(running_worker, server.url, Path(name), app=REAL_APP, fresh=True)
        with (
            started(model=templated, model_name=MODEL) as worker,
            ProcessPoolExecutor(1, get_context("spawn")) as readers,
        ):
            celery = psutil.Process(worker.process.pid)
            process = next(iter(celery.children()), celery)
            print(f"{'bomb':28} {'gap':>9} {'answered':>8} {'memory':>10}")
            gaps = [measure(each, server.url, readers, process) for each in only.split(";")]
            print(f"longest gap: {max(gaps) * 1e3:.0f} ms; bound 200 ms")


if __name__ == "__main__":
    main(stalls, "stalls")
