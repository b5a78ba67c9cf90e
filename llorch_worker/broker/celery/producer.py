"""Celery for producers, and the connection settings that workers share with them."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from celery import Celery
from celery.app.amqp import AMQP
from kombu.connection import Connection
from kombu.messaging import Consumer

from llorch_worker.broker.connections.connection import sentinel_options
from llorch_worker.broker.connections.time_limits import CONNECT_TIMEOUT_S, REPLY_TIMEOUT_S
from llorch_worker.broker.connections.url import (
    SENTINEL,
    SEPARATOR,
    TLS,
    UNIX,
    RedisUrl,
    in_brackets,
)


class OwnConnection(Connection):
    """kombu's, which shows a password's mask also where there is none."""

    def as_uri(self, include_password: Any = False, mask: Any = "**", *fields: Any) -> str:
        uri = super().as_uri(include_password, mask, *fields)
        return uri if self.password else uri.replace(f":{mask}@", "@" if self.userid else "")


class OwnConsumer(Consumer):
    """kombu's, whose cancel a signal may interrupt with another: a second Ctrl-C cancels too."""

    channel: Any

    def cancel(self) -> None:
        tags, self._active_tags = [*self._active_tags.values()], {}
        self._active_queue_no_ack.clear()
        for tag in tags:
            self.channel.basic_cancel(tag)

    close = cancel


class OwnAMQP(AMQP):  # type: ignore[misc]
    Connection = OwnConnection
    Consumer = OwnConsumer


class OwnBroker(Celery):  # type: ignore[misc]
    """An app whose broker is that of its own settings. Celery's ``CELERY_BROKER_URL``, which comes
    first elsewhere, is often another app's of the same service."""

    amqp_cls = f"{__name__}:{OwnAMQP.__name__}"

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
    """The URL without its options, as Celery and kombu read it."""
    url = RedisUrl.parse(redis_url)
    if url.scheme == UNIX:
        return f"redis+socket://{url.login}{quote(url.path)}?virtual_host={url.db}"
    hosts = (f"{in_brackets(host)}:{port}" for host, port in url.servers)
    return SEPARATOR.join(f"{url.scheme}://{url.login}{host}/{url.db}" for host in hosts)


def transport_options(redis_url: str) -> dict[str, Any]:
    """How to find the master behind Sentinel; empty for other URLs."""
    url = RedisUrl.parse(redis_url)
    if url.scheme != SENTINEL:
        return {}
    return {"master_name": url.master_name, "sentinel_kwargs": sentinel_options(url)}


def connection_config(redis_url: str) -> dict[str, Any]:
    """Celery's settings for Redis, the same for producers and workers."""
    url = RedisUrl.parse(redis_url)
    tls = {"ssl_cert_reqs": "required"} | {
        name: value for name, value in url.options.items() if name.startswith("ssl_")
    }
    others = {name: url.options[name] for name in url.options.keys() - tls.keys() - {"protocol"}}
    return {
        "broker_url": celery_url(redis_url),
        "broker_use_ssl": tls if url.scheme == TLS else False,
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "event_serializer": "json",
        "broker_transport_options": {
            "socket_timeout": REPLY_TIMEOUT_S,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_keepalive": True,
        }
        | others
        | transport_options(redis_url),
    }
