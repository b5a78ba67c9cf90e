"""Celery configured for us: what producers and workers share, and what only workers need."""

from __future__ import annotations

from typing import Any

from celery import Celery
from kombu.entity import Queue

from llorch_worker.broker.connection import CONNECT_TIMEOUT_S, url_errors
from llorch_worker.broker.queues import OWN_MARK, normal_queue, queues
from llorch_worker.broker.sentinel import SentinelUrl, is_sentinel
from llorch_worker.settings import Settings

REPLY_TIMEOUT_S = 30.0
RESULT_RETRIES = 200
RESULT_RETRY_MAX_SLEEP_MS = 2_000
"""Storing a result is tried for some six minutes; then the job goes back to its queue."""


class LlorchApp(Celery):  # type: ignore[misc]
    """A Celery app that knows its settings and, in a worker, the resident model.

    ``engine_class`` names what is loaded; ``residency`` is set by the worker's
    bootstep and stays ``None`` elsewhere; so is ``place``, the device that is this process' own,
    unless the process took it before.
    """

    settings: Settings
    residency: Any = None
    place: Any = None
    engine_class: str | Any = "llorch_worker.engine:Engine"
    on_load_progress: Any = None


def producer_app(redis_url: str) -> Celery:
    """An app that only enqueues: no result backend, because reading results needs no Celery."""
    app = Celery("llorch-client", set_as_current=False)
    app.conf.update(_shared(redis_url), task_ignore_result=False)
    return app


def worker_config(settings: Settings) -> dict[str, Any]:
    """The whole configuration of the app in :mod:`tasks`; producers may use it too."""
    model = settings.served_name
    return _shared(settings.redis_url) | {
        "result_backend": _result_backend(settings.redis_url),
        "result_backend_transport_options": _sentinel_options(settings.redis_url),
        "result_expires": settings.result_ttl_s,
        "result_extended": False,  # it would store the prompt beside the result
        "result_backend_always_retry": True,
        "result_backend_max_retries": RESULT_RETRIES,
        "result_backend_max_sleep_between_retries_ms": RESULT_RETRY_MAX_SLEEP_MS,
        "redis_socket_timeout": REPLY_TIMEOUT_S,
        "redis_socket_connect_timeout": CONNECT_TIMEOUT_S,
        "redis_retry_on_timeout": True,
        "task_queues": task_queues(model),
        "task_default_queue": normal_queue(model),
        "task_acks_late": True,
        "task_track_started": False,  # the claim does it: see lua/claim.lua
        "worker_pool": "llorch_worker.worker.pool:EnginePool",
        "worker_consumer": "llorch_worker.worker.consumer:JobConsumer",
        "worker_concurrency": settings.max_sequences,
        # What this worker cannot batch stays in Redis for another.
        "worker_prefetch_multiplier": 1,
        "worker_send_task_events": True,
        "worker_cancel_long_running_tasks_on_connection_loss": False,
        "worker_redirect_stdouts": False,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # wait for Redis as long as it takes
    }


def _result_backend(redis_url: str) -> str:
    kind = "SentinelResultBackend" if is_sentinel(redis_url) else "ResultBackend"
    return f"llorch_worker.broker.backend:{kind}+{_celery_url(redis_url)}"


def _celery_url(redis_url: str) -> str:
    """As Celery and kombu want it."""
    if is_sentinel(redis_url):
        return SentinelUrl.parse(redis_url).bare
    if redis_url.startswith("rediss://") and "ssl_cert_reqs=" not in redis_url:
        # What redis-py does by default Celery wants to be told.
        return f"{redis_url}{'&' if '?' in redis_url else '?'}ssl_cert_reqs=required"
    return redis_url


def _sentinel_options(redis_url: str) -> dict[str, Any]:
    return SentinelUrl.parse(redis_url).transport_options if is_sentinel(redis_url) else {}


def task_queues(model: str, worker: str | None = None) -> list[Any]:
    """What a worker of ``model`` consumes; with its node name, its own queues too."""
    return [
        # An own queue is not declared: each would stay in the exchange's table, which every stock
        # producer reads, after its worker is gone.
        Queue(name, routing_key=name, no_declare=OWN_MARK in name)
        for name in queues(model, worker)
    ]


def _shared(redis_url: str) -> dict[str, Any]:
    with url_errors(redis_url):
        broker_url = _celery_url(redis_url)
    return {
        "broker_url": broker_url,
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "broker_transport_options": {
            "socket_timeout": REPLY_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_keepalive": True,
        }
        | _sentinel_options(redis_url),
    }
