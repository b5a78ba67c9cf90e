"""Services that run jobs: ours through Redis, stock Celery with transformers, and llama-server."""

from __future__ import annotations

import asyncio
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from benches.peers.contestants.contestant import CannotRun, Terms
from benches.peers.stock_generate import GENERATE_TASK, TERMS_VARIABLE, stock_app
from llorch_worker.bench.jobs.client_load import Throughput, run_queued
from llorch_worker.bench.jobs.sandbox import Sandbox, thread_environment
from llorch_worker.contract import GenerationRequest, LlorchError
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings
from llorch_worker.stack import ports
from llorch_worker.stack.children import Child, Program, describe_exit, python
from llorch_worker.worker.main import worker_hostname

START_TIMEOUT_S = 600.0
JOB_TIMEOUT_S = 3600.0
POLL_S = 0.1
STOP_S = 20.0
SLOT_MULTIPLE = 256
"""llama.cpp pads the context of a slot to a multiple of this."""


class JobService(Protocol):
    """A service that runs from entry to exit; both may raise :class:`CannotRun`."""

    note: str

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def run(self, jobs: Sequence[GenerationRequest]) -> Throughput:
        """Runs all ``jobs``, submitted at once."""


class _WorkerOnRedis(ABC):
    """A Redis with one Celery worker."""

    note: str

    def __init__(self) -> None:
        self._sandbox = Sandbox()

    def __enter__(self) -> Self:
        self._sandbox.__enter__()
        program, hostname = self._worker()
        try:
            self._sandbox.start_worker(program, hostname)
        except CommandError as error:
            self._sandbox.__exit__(None, None, None)
            raise CannotRun(error.message) from None
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._sandbox.__exit__(kind, error, trace)

    @abstractmethod
    def _worker(self) -> tuple[Program, Callable[[int], str]]:
        """The worker's program, and its node name as a function of the process id."""

    @abstractmethod
    def run(self, jobs: Sequence[GenerationRequest]) -> Throughput:
        """See :class:`JobService`."""


class OurQueue(_WorkerOnRedis):
    """Our worker and the real client."""

    def __init__(self, terms: Terms, slots: int) -> None:
        super().__init__()
        self._threads = terms.threads
        self._settings = Settings(
            model=terms.model,
            device="cpu",
            dtype=terms.dtype,
            kv_dtype=terms.kv_dtype,
            max_sequences=slots,
            max_context=terms.context_tokens,
        )
        kv = "" if terms.kv_dtype == "auto" else f", KV in {terms.kv_dtype}"
        self.note = f"one worker, {counted(slots, 'sequence')}, {terms.dtype}{kv}"

    def _worker(self) -> tuple[Program, Callable[[int], str]]:
        program = self._sandbox.worker_of(self._settings, self._threads)
        return program, lambda pid: worker_hostname(self._settings, pid)

    def run(self, jobs: Sequence[GenerationRequest]) -> Throughput:
        url, model = self._sandbox.redis_url, self._settings.served_name
        try:
            return asyncio.run(run_queued(url, model, list(jobs)))
        except LlorchError as error:
            raise CannotRun(f"a job of ours failed: {error.message}") from None


class StockCelery(_WorkerOnRedis):
    """Stock Celery's solo pool with transformers' ``generate``: one job at a time."""

    def __init__(self, terms: Terms) -> None:
        super().__init__()
        self._terms = terms
        self.note = f"solo pool, transformers generate, {terms.dtype}, one job at a time"

    def _worker(self) -> tuple[Program, Callable[[int], str]]:
        application = "benches.peers.stock_generate"
        arguments = ("-A", application, "worker", "-P", "solo", "-n", "stock@bench")
        environment = {
            "LLORCH_REDIS_URL": self._sandbox.redis_url,
            TERMS_VARIABLE: json.dumps([str(self._terms.model), self._terms.dtype]),
            **thread_environment(self._terms.threads),
        }
        program = Program("stock Celery", python("-m", "celery", *arguments), environment)
        return program, lambda _pid: "stock@bench"

    def run(self, jobs: Sequence[GenerationRequest]) -> Throughput:
        with stock_app(self._sandbox.redis_url) as app:
            began_s = time.perf_counter()
            sent = [
                app.send_task(GENERATE_TASK, args=(job.prompt_token_ids, job.max_tokens))
                for job in jobs
            ]
            counts = [each.get(timeout=JOB_TIMEOUT_S, propagate=False) for each in sent]
            failed = [each for each in counts if isinstance(each, Exception)]
            if failed:
                raise CannotRun(f"a job failed: {type(failed[0]).__name__}")
            return Throughput(len(jobs), sum(counts), time.perf_counter() - began_s)


class LlamaServer:
    """llama.cpp's own server, with as many slots as our worker has sequences."""

    def __init__(self, binary: Path, terms: Terms, slots: int) -> None:
        self._binary = binary
        self._slots = slots
        self._terms = terms
        self._port = ports.any_free_port()
        kv = "" if terms.kv_dtype == "auto" else ", KV in q8_0, flash attention"
        self.note = f"{slots} slots, the file's own block types{kv}"
        self._server: Child | None = None

    def __enter__(self) -> Self:
        context = -(-self._terms.context_tokens // SLOT_MULTIPLE) * SLOT_MULTIPLE
        options = {
            "--model": self._terms.model,
            "--host": ports.LOCALHOST,
            "--port": self._port,
            "--threads": self._terms.threads,
            "--threads-batch": self._terms.threads,
            "--parallel": self._slots,
            "--ctx-size": self._slots * context,
            # All prompts differ, so caching them would only cost time.
            "--cache-ram": 0,
        }
        if self._terms.kv_dtype == "int8":
            options |= {"--cache-type-k": "q8_0", "--cache-type-v": "q8_0", "--flash-attn": "on"}
        arguments = [str(part) for pair in options.items() for part in pair]
        program = Program("llama-server", (str(self._binary), *arguments))
        try:
            self._server = Child(program, lambda _name, _line: None, lambda _child: None)
        except OSError as error:
            raise CannotRun(f"{self._binary} cannot be started: {error}") from None
        give_up_s = time.monotonic() + START_TIMEOUT_S
        while not self._healthy():
            if self._server.exit_code is not None or time.monotonic() > give_up_s:
                words = self._server.last_words() or describe_exit(self._server.exit_code)
                self.__exit__(None, None, None)
                raise CannotRun(f"could not start: {words}")
            time.sleep(POLL_S)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._server is not None:
            self._server.terminate()
            if not self._server.wait(STOP_S):
                self._server.kill()
                self._server.wait(None)

    def run(self, jobs: Sequence[GenerationRequest]) -> Throughput:
        # All at once: jobs without a slot wait in the server, like ours in Redis.
        with ThreadPoolExecutor(len(jobs)) as threads:
            began_s = time.perf_counter()
            try:
                counts = list(threads.map(self._complete, jobs))
            except (HTTPException, OSError, ValueError, KeyError) as error:
                raise CannotRun(f"a job failed: {type(error).__name__}: {error}") from None
            return Throughput(len(jobs), sum(counts), time.perf_counter() - began_s)

    def _complete(self, job: GenerationRequest) -> int:
        """Runs ``job``; returns the number of generated tokens."""
        answer = self._request(
            "POST",
            "/completion",
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

    def _healthy(self) -> bool:
        try:
            self._request("GET", "/health", None)
        except (HTTPException, OSError, ValueError):
            return False
        return True

    def _request(self, method: str, path: str, body: Any) -> Any:
        connection = HTTPConnection(ports.LOCALHOST, self._port, timeout=JOB_TIMEOUT_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise ValueError(f"HTTP {answer.status}")
            return json.loads(text)
        finally:
            connection.close()
