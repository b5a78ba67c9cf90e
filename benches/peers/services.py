"""Services that run jobs: ours through Redis, and llama-server."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from benches.peers.contestants.contestant import CannotRun, Terms
from llorch_worker.bench.instruments.client_load import Throughput, run_queued
from llorch_worker.bench.one_worker import READY_TIMEOUT_S, one_worker
from llorch_worker.contract import GenerationRequest, LlorchError
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings
from llorch_worker.stack import ports
from llorch_worker.stack.children import Child, Program, describe_exit

JOB_TIMEOUT_S = 3600.0
POLL_S = 0.1
STOP_S = 20.0
SLOT_MULTIPLE = 256
"""llama.cpp pads the context of a slot to a multiple of this."""
Jobs = Sequence[GenerationRequest]


@dataclass(frozen=True)
class Service:
    """A running service, and its settings."""

    note: str
    run: Callable[[Jobs], Throughput]
    """Runs all jobs, submitted at once; raises :class:`CannotRun`."""


@contextmanager
def our_queue(terms: Terms, slots: int) -> Iterator[Service]:
    """Our worker and the real client."""
    settings = Settings(
        model=terms.model,
        device="cpu",
        dtype=terms.dtype,
        kv_dtype=terms.kv_dtype,
        max_sequences=slots,
        max_context=terms.context_tokens,
        drafter="off",
    )
    kv = "" if terms.kv_dtype == "auto" else f", KV in {terms.kv_dtype}"
    with one_worker(settings, terms.threads) as stack:
        try:
            stack.start()
            stack.wait_ready(READY_TIMEOUT_S)
        except CommandError as error:
            raise CannotRun(error.message) from None

        def run(jobs: Jobs) -> Throughput:
            try:
                return asyncio.run(run_queued(stack.redis_url, settings.served_name, list(jobs)))
            except LlorchError as error:
                raise CannotRun(f"a job of ours failed: {error.message}") from None

        yield Service(f"one worker, {counted(slots, 'sequence')}, {terms.dtype}{kv}", run)


@contextmanager
def _running(program: Program, ready: Callable[[], bool]) -> Iterator[None]:
    """Starts ``program`` and waits until it is ``ready``; leaving ends it."""
    try:
        child = Child(program, lambda _name, _line: None, lambda _child: None)
    except OSError as error:
        raise CannotRun(f"{program.command[0]} cannot be started: {error}") from None
    try:
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        while not ready():
            if child.exit_code is not None or time.monotonic() > give_up_s:
                words = child.last_words() or describe_exit(child.exit_code)
                raise CannotRun(f"could not start: {words}")
            time.sleep(POLL_S)
        yield
    finally:
        child.terminate()
        if not child.wait(STOP_S):
            child.kill()
            child.wait(None)


@contextmanager
def llama_server(binary: Path, terms: Terms, slots: int) -> Iterator[Service]:
    """llama.cpp's own server, with as many slots as our worker has sequences."""
    port = ports.any_free_port()
    url = f"http://{ports.LOCALHOST}:{port}"
    context = -(-terms.context_tokens // SLOT_MULTIPLE) * SLOT_MULTIPLE
    options = {
        "--model": terms.model,
        "--host": ports.LOCALHOST,
        "--port": port,
        "--threads": terms.threads,
        "--threads-batch": terms.threads,
        "--parallel": slots,
        "--ctx-size": slots * context,
        # All prompts differ, so caching them would only cost time.
        "--cache-ram": 0,
    }
    kv = ""
    if terms.kv_dtype == "int8":
        options |= {"--cache-type-k": "q8_0", "--cache-type-v": "q8_0", "--flash-attn": "on"}
        kv = ", KV in q8_0, flash attention"
    arguments = [str(part) for pair in options.items() for part in pair]
    program = Program("llama-server", (str(binary), *arguments))

    def run(jobs: Jobs) -> Throughput:
        # All at once: jobs without a slot wait in the server, like ours in Redis.
        with ThreadPoolExecutor(len(jobs)) as threads:
            began_s = time.perf_counter()
            try:
                counts = list(threads.map(lambda job: _complete(url, job), jobs))
            except (HTTPException, OSError, ValueError, KeyError) as error:
                raise CannotRun(f"a job failed: {type(error).__name__}: {error}") from None
            return Throughput(len(jobs), sum(counts), time.perf_counter() - began_s)

    with _running(program, lambda: _healthy(url)):
        yield Service(f"{slots} slots, the file's own block types{kv}", run)


def _complete(url: str, job: GenerationRequest) -> int:
    """Runs ``job``; returns the number of generated tokens."""
    answer = _ask(
        f"{url}/completion",
        {
            "prompt": job.prompt_token_ids,
            "n_predict": job.max_tokens,
            "ignore_eos": True,
            "cache_prompt": False,
            # The fastest way to sample greedily.
            "samplers": ["top_k"],
            "top_k": 1,
        },
    )
    count: int = answer["tokens_predicted"]
    if count != job.max_tokens:
        raise ValueError(f"got {count} tokens instead of {job.max_tokens}")
    return count


def _healthy(url: str) -> bool:
    try:
        _ask(f"{url}/health")
    except (HTTPException, OSError, ValueError):
        return False
    return True


def _ask(url: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = Request(url, data, {"Content-Type": "application/json"})
    with urlopen(request, timeout=JOB_TIMEOUT_S) as answer:
        return json.load(answer)
