"""Celery for producers, and the connection settings that workers share with them."""

from __future__ import annotations

from typing import Any

from celery import Celery

from llorch_worker.broker.connection import CONNECT_TIMEOUT_S, url_errors
from llorch_worker.broker.sentinel import SentinelUrl, is_sentinel

REPLY_TIMEOUT_S = 30.0


def producer_app(redis_url: str) -> Celery:
    """An app that only enqueues: no result backend, because reading results needs no Celery."""
    app = Celery("llorch-client", set_as_current=False)
    app.conf.update(connection_config(redis_url), task_ignore_result=False)
    return app


def celery_url(redis_url: str) -> str:
    """As Celery and kombu want it."""
    if is_sentinel(redis_url):
        return SentinelUrl.parse(redis_url).bare
    if redis_url.startswith("rediss://") and "ssl_cert_reqs=" not in redis_url:
        # What redis-py does by default Celery wants to be told.
        return f"{redis_url}{'&' if '?' in redis_url else '?'}ssl_cert_reqs=required"
    return redis_url


def sentinel_options(redis_url: str) -> dict[str, Any]:
    """Transport options for a Redis behind Sentinel; empty for any other."""
    return SentinelUrl.parse(redis_url).transport_options if is_sentinel(redis_url) else {}


def connection_config(redis_url: str) -> dict[str, Any]:
    """The settings of Celery that reach Redis, alike for producers and workers."""
    with url_errors(redis_url):
        broker_url = celery_url(redis_url)
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
        | sentinel_options(redis_url),
    }
