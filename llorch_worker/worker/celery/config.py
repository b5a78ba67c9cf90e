"""The worker's Celery configuration."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from kombu.entity import Exchange, Queue

from llorch_worker.broker.celery.producer import (
    celery_url,
    connection_config,
    transport_options,
)
from llorch_worker.broker.connections.url import is_sentinel
from llorch_worker.broker.queues import normal_queue, queues, route
from llorch_worker.contract import REQUESTS
from llorch_worker.devices import default_sequences
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.consumer import JobConsumer
from llorch_worker.worker.celery.pool import EnginePool


def worker_config(settings: Settings) -> dict[str, Any]:
    """The whole configuration of the app in :mod:`tasks`; producers may use it too."""
    model = settings.served_names[0]
    connection = connection_config(settings.redis_url)
    return connection | {
        "result_backend": _result_backend(settings.redis_url),
        "result_backend_transport_options": transport_options(settings.redis_url),
        "redis_backend_use_ssl": connection["broker_use_ssl"] or None,
        "result_expires": settings.result_ttl_s,
        "result_extended": False,  # otherwise the prompt is stored with the result
        "task_queues": task_queues(settings),
        # The default queue stays Celery's: a chain's next task, which names no queue, goes where
        # any other worker would send it.
        "task_routes": (partial(route_job, model),),
        "task_acks_late": True,
        "task_track_started": False,  # the claim stores STARTED: see lua/claim.lua
        "worker_pool": EnginePool,
        "worker_consumer": JobConsumer,
        "worker_concurrency": settings.max_sequences
        or default_sequences(settings.device if settings.computes_here else "server"),
        # Jobs that this worker cannot batch stay in Redis for other workers.
        "worker_prefetch_multiplier": 1,
        # Those that run through a new connection count without it.
        "worker_enable_prefetch_count_reduction": False,
        "worker_send_task_events": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_redirect_stdouts": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # wait for Redis as long as it takes
    }


def _result_backend(redis_url: str) -> str:
    kind = "Sentinel" if is_sentinel(redis_url) else ""
    # Celery reads one prefix, and a backend of a Unix socket none.
    url = celery_url(redis_url).removeprefix("redis+")
    return f"llorch_worker.broker.celery.backend:{kind}ResultBackend+{url}"


def route_job(
    default_model: str,
    name: str,
    _args: Any,
    fields: Mapping[str, Any] | None,
    options: Mapping[str, Any],
    **_: Any,
) -> dict[str, Any] | None:
    """Celery's router: the queue of a job's model and priority, unless the sender names one."""
    if name not in REQUESTS or any(map(options.get, ("queue", "exchange", "routing_key"))):
        return None
    # An invalid model or priority is sent anyway; the worker's error names it.
    model, priority = map((fields or {}).get, ("model", "priority"))
    to = route(
        model if isinstance(model, str) and model else default_model,
        priority if priority in ("high", "low") else "normal",
    )
    return {"queue": to.queue, "priority": to.priority}


def task_queues(settings: Settings) -> list[Any]:
    """The queues that a worker of these models consumes."""
    return [
        Queue(name, exchange, routing_key=name)
        for model in settings.served_names
        for exchange in [Exchange(normal_queue(model))]
        for name in queues(model)
    ]
