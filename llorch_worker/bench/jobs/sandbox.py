"""A private Redis with workers, for the duration of a measurement."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Self

from llorch_worker.bench.plan import thread_environment
from llorch_worker.broker.fleet_client import FleetClient
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.settings import Settings
from llorch_worker.stack import programs
from llorch_worker.stack.children import Child, Program, describe_exit
from llorch_worker.stack.stack import Plan, Stack

READY_TIMEOUT_S = 600.0
"""A large model takes minutes to load from a slow disk."""
STOP_S = 20.0


class Sandbox:
    """Starts a Redis on entry; leaving the block ends it and every worker."""

    def __init__(self) -> None:
        plan = Plan(settings=Settings(), workers=(), redis_url=None, flower_port=None)
        self._stack = Stack(plan, lambda _name, _line: None)
        self._workers: list[Child] = []

    def __enter__(self) -> Self:
        self._stack.__enter__()
        try:
            self._stack.start()
        except BaseException:
            self._stack.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            if not worker.wait(STOP_S):
                worker.kill()
                worker.wait(None)
        self._stack.__exit__(kind, error, trace)

    @property
    def redis_url(self) -> str:
        """The URL of the Redis, which is empty at first."""
        return self._stack.redis_url

    def start_worker(self, program: Program, hostname: Callable[[int], str]) -> Child:
        """Start a Celery worker and wait until it takes jobs. ``hostname`` maps its process id to
        its node name.

        Raises:
            CommandError: the worker ended early; the message has its last words.
        """
        worker = Child(program, lambda _name, _line: None, lambda _child: None)
        self._workers.append(worker)
        name = hostname(worker.pid)
        give_up_s = time.monotonic() + READY_TIMEOUT_S
        with FleetClient(self.redis_url) as client:
            while name not in client.answering({name}):
                if worker.exit_code is not None or time.monotonic() > give_up_s:
                    worker.kill()
                    worker.wait(None)
                    words = worker.last_words() or describe_exit(worker.exit_code)
                    raise CommandError("DID_NOT_START", f"{program.name} could not start: {words}")
        return worker

    def worker_of(self, settings: Settings, threads: int | None) -> Program:
        """``llorch worker`` of ``settings`` on this Redis."""
        mine = settings.model_copy(update={"redis_url": self.redis_url})
        program = programs.worker("worker", mine, own_redis=True)
        environment = {**program.environment, **thread_environment(threads)}
        return replace(program, environment=environment)
