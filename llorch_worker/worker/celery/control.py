"""Remote control commands that this worker answers differently from Celery's.

Celery replies ``ok`` to most commands before it obeys. These say beforehand what cannot be done.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from celery.app.utils import filter_hidden_settings
from celery.utils.log import get_logger
from celery.utils.time import rate
from celery.worker import control
from kombu.utils.functional import maybe_list
from kombu.utils.url import maybe_sanitize_url
from redis.exceptions import RedisError

from llorch_worker.broker.figures.fleet_client import LOAD_COMMAND, RELOAD_COMMAND, UNLOAD_COMMAND
from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.worker.celery.refusals import (
    FIXED_SIZE,
    NO_CHILDREN,
    NO_TIME_LIMITS,
    foreign_queue,
)
from llorch_worker.worker.residency import Residency

logger = get_logger(__name__)

Reply = dict[str, Any]


def install() -> None:
    """Replaces the commands in this process; only for workers."""
    control.Panel.data |= {
        "add_consumer": _of_own_queue(control.add_consumer),
        "cancel_consumer": _of_own_queue(control.cancel_consumer),
        "rate_limit": _rate_limit,
        "revoke": _of_what_waits_too(control.revoke),
        "terminate": _of_what_waits_too(control.terminate),
        "stats": _stats,
        "time_limit": _refusal(NO_TIME_LIMITS),
        "autoscale": _refusal(FIXED_SIZE),
        "pool_grow": _refusal(FIXED_SIZE),
        "pool_shrink": _refusal(FIXED_SIZE),
        "pool_restart": _refusal(NO_CHILDREN),
        LOAD_COMMAND: _of_residency(partial(Residency.ask_for, loads=True)),
        UNLOAD_COMMAND: _of_residency(partial(Residency.ask_for, loads=False)),
        RELOAD_COMMAND: _of_residency(Residency.reload),
    }


def _of_own_queue(command: Callable[..., Reply]) -> Callable[..., Reply]:
    """``command`` for the worker's own queues only."""

    def run(state: Any, queue: object, **options: Any) -> Reply:
        reason = foreign_queue(state.app, [queue])
        return command(state, queue, **options) if reason is None else _refused(reason)

    return run


def _of_what_waits_too(command: Callable[..., Reply]) -> Callable[..., Reply]:
    """``command``, which also ends a job that was handed back. Its state is STARTED, which Celery
    leaves to the worker that has it, and none has. Workers that start later would not hear of it.
    """

    def run(state: Any, *, task_id: Any, **options: Any) -> Reply:
        reply = command(state, task_id=task_id, **options)
        app = state.app
        try:
            for job_id in map(str, maybe_list(task_id) or ()):
                cancel(app.backend.client, job_id, app.settings, only_waiting=True)
        except RedisError as error:
            logger.warning("a revoked job that waits may run: %s", type(error).__name__)
        return reply

    return run


def _of_residency(ask: Callable[[Residency, object], str | None]) -> Callable[..., Reply]:
    """``ask`` of the residency, which gets a model and gives the reason why that cannot be."""

    def run(state: Any, model: object = None, **_: Any) -> Reply:
        reason = ask(state.app.residency, model)
        return {"ok": "soon"} if reason is None else _refused(reason)

    return run


def _rate_limit(state: Any, task_name: object, rate_limit: Any, **options: Any) -> Reply:
    try:
        valid = 0 <= rate(rate_limit) < math.inf
    except (KeyError, TypeError, ValueError):
        valid = False
    if not valid:
        # Celery accepts some of these, and then starts no job until the limit is lifted.
        return _refused("a rate limit is a number of jobs, as in 5/s, 5/m or 5/h; 0 lifts it")
    reply: Reply = control.rate_limit(state, task_name, rate_limit, **options)
    return reply


def _stats(state: Any, **options: Any) -> Reply:
    """Celery's, without passwords, and without options that JSON cannot hold."""
    stats: Reply = control.stats(state, **options)
    broker = filter_hidden_settings(stats["broker"])
    # How those who name the master are asked: it has a password and a policy of retries.
    broker["transport_options"].pop("sentinel_kwargs", None)
    broker["alternates"] = [maybe_sanitize_url(url) for url in broker["alternates"]]
    return stats | {"broker": broker}


def _refusal(reason: str) -> Callable[..., Reply]:
    return lambda _state, **_: _refused(reason)


def _refused(reason: str) -> Reply:
    return {"error": reason}
