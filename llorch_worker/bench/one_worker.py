"""A private Redis and one worker, for the duration of a measurement."""

from __future__ import annotations

from llorch_worker.bench.plan import thread_environment
from llorch_worker.settings import Settings
from llorch_worker.stack.plan import Plan
from llorch_worker.stack.stack import Stack

READY_TIMEOUT_S = 600.0
"""A large model takes minutes to load from a slow disk."""


def one_worker(settings: Settings, threads: int | None) -> Stack:
    """A stack to enter, start and await for :data:`READY_TIMEOUT_S`. It prints nothing."""
    plan = Plan(
        settings=settings,
        workers=(("worker", settings.device),),
        worker_environment=thread_environment(threads),
        redis_url=None,
        flower_port=None,
    )
    return Stack(plan, lambda _name, _line: None)
