"""Celery for producers, and the connection settings that workers share with them."""

from __future__ import annotations

from typing import Any

from celery import Celery

from llorch_worker.broker.connection import CONNECT_TIMEOUT_S
from llorch_worker.broker.url import SentinelUrl, is_sentinel, is_unix, url_errors

REPLY_TIMEOUT_S = 30.0


class OwnBroker(Celery):  # type: ignore[misc]
    """An app whose broker is that of its own settings. Celery's ``CELERY_BROKER_URL``, which comes
    first elsewhere, is often another app's of the same service."""

    def connection_for_read(self, url: str | None = None, **options: Any) -> Any:
        return super().connection_for_read(url or self.conf["broker_url"], **options)

    def connection_for_write(self, url: str | None = None, **options: Any) -> Any:
        return super().connection_for_write(url or self.conf["broker_url"], **options)

    def connection(self, hostname: str | None = None, **options: Any) -> Any:
        return super().connection(hostname or self.conf["broker_url"], **options)


def producer_app(redis_url: str) -> Celery:
    """An app that only enqueues. It has no result backend: reading results needs no Celery."""
    app = OwnBroker("llorch-client", set_as_current=False)
    app.conf.update(connection_config(redis_url), task_ignore_result=False)
    return app


def celery_url(redis_url: str) -> str:
    """The URL as Celery and kombu read it."""
    if is_sentinel(redis_url):
        return SentinelUrl.parse(redis_url).bare
    if is_unix(redis_url):
        where = redis_url.removeprefix("unix").replace("?db=", "?virtual_host=")
        return f"redis+socket{where}"
    if redis_url.startswith("rediss://") and "ssl_cert_reqs=" not in redis_url:
        # redis-py verifies certificates by default; Celery must be told to.
        return f"{redis_url}{'&' if '?' in redis_url else '?'}ssl_cert_reqs=required"
    return redis_url


def transport_options(redis_url: str) -> dict[str, Any]:
    """How to find the master behind Sentinel; empty for other URLs."""
    return SentinelUrl.parse(redis_url).transport_options if is_sentinel(redis_url) else {}


def connection_config(redis_url: str) -> dict[str, Any]:
    """Celery's settings for Redis, the same for producers and workers."""
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
        | transport_options(redis_url),
    }
