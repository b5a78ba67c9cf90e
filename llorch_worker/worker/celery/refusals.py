"""What this worker refuses of Celery's worker options and control commands, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llorch_worker.broker.queues import queues
from llorch_worker.contract import shown
from llorch_worker.worker.celery.pool import EnginePool

FIXED_SIZE = (
    "the number of jobs at once is fixed when the cache is allocated; restart the worker with "
    "another LLORCH_MAX_SEQUENCES, or start more workers"
)
NO_CHILDREN = "a worker is one process without children; restart the worker itself"
NO_TIME_LIMITS = "tasks have no time limits here; give jobs a deadline_s"


def refused_option(worker: Any, options: Mapping[str, Any]) -> str | None:
    """The reason why ``worker`` must not start with these options of Celery's; None if it may."""
    if not issubclass(worker.pool_cls, EnginePool):
        return "the worker needs its own pool; start it without -P/--pool"
    refused = {
        "--autoscale": (options.get("autoscale"), FIXED_SIZE),
        "--time-limit": (worker.time_limit, NO_TIME_LIMITS),
        "--soft-time-limit": (worker.soft_time_limit, NO_TIME_LIMITS),
        "--max-tasks-per-child": (worker.max_tasks_per_child, NO_CHILDREN),
        "--max-memory-per-child": (worker.max_memory_per_child, NO_CHILDREN),
        "--pool-start-method": (options.get("pool_start_method"), NO_CHILDREN),
        "--prefetch-multiplier": (
            worker.prefetch_multiplier != 1,
            "a worker claims only jobs that it can start, and leaves the others to other workers",
        ),
        "--beat": (options.get("beat"), "run celery beat as a process of its own"),
        "--purge": (
            options.get("purge"),
            "it would drop jobs without ending them; end them with llorch cancel",
        ),
    }
    for option, (given, reason) in refused.items():
        if given:
            return f"{option} is refused: {reason}"
    return None


def foreign_queue(app: Any, worker: str, named: Iterable[object]) -> str | None:
    """The reason why ``worker`` cannot take jobs from the queues ``named``; None if it can."""
    own = queues(app.settings.served_name, worker)
    for name in named:
        if name not in own:
            return f"this worker does not serve the queue {shown(name)}; it serves {', '.join(own)}"
    return None
