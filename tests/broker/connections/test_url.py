"""URLs of a Redis, alone or behind Sentinel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.broker.celery.producer import celery_url
from llorch_worker.broker.connections.connection import connect, connect_async
from llorch_worker.broker.connections.url import VARIABLE, RedisUrl, how_to_change, safe_url
from llorch_worker.client import Client
from llorch_worker.contract.errors import BrokerRefused, BrokerUnavailable
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.app import build_app
from tests.services import free_node_port, own_redis

WITH_SENTINEL = (
    "sentinel://me:p%40ss@a:1;sentinel://me:p%40ss@b/3?master_name=jobs&sentinel_password=other"
)
BEGINNING = "it must begin with redis://, rediss://, unix:// or sentinel://"
NO_CLUSTER = (
    "Redis Cluster is not supported; use a Redis with cluster mode disabled, at redis://, or "
    "several behind Sentinel, at sentinel://"
)
UNIX_PATH = "it must name a socket by its whole path, as in unix:///run/redis.sock"
COMMON = "client_name, db, health_check_interval, max_connections, password, protocol"
OF_REDIS = (
    f"{COMMON}, socket_connect_timeout, socket_keepalive, socket_timeout, username, virtual_host"
)
OF_UNIX = f"{COMMON}, socket_timeout, username, virtual_host"
OF_SENTINEL = (
    "client_name, db, health_check_interval, master_name, max_connections, password, protocol, "
    "sentinel_password, socket_connect_timeout, socket_keepalive, socket_timeout, username, "
    "virtual_host"
)
UNREADABLE = "cannot read host and port; percent-encode / ? # [ ] in a password"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://localhost:6379/0", "redis://localhost:6379/0"),
        ("redis://user:secret@h:1/2", "redis://user:***@h:1/2"),
        ("rediss://:secret@h/2?password=secret", "rediss://:***@h/2"),
        ("redis://[::1]:6379/0", "redis://[::1]:6379/0"),
        ("redis://h:notaport/0", "an unreadable URL"),
        ("redis://:/secret@h:1/0", "an unreadable URL"),
        ("redis://:12/secret@h:1/0", "an unreadable URL"),
        ("redis://:12#secret@h:1/0", "an unreadable URL"),
        ("localhost:6379", "localhost:6379"),
        ("user:secret@localhost:6379/0?password=secret", "localhost:6379/0"),
        ("nonsense", "nonsense"),
        ("unix:///run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert safe_url(url) == shown


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("", BEGINNING),
        ("localhost:6379", BEGINNING),
        ("http://h", BEGINNING),
        ("REDIS://h", BEGINNING),
        (" redis://h/0", "remove the surrounding whitespace"),
        ("redis://h/0 ", "remove the surrounding whitespace"),
        ("redis://h/jobs", "it must end with a database number"),
        ("rediss://h/jobs", "it must end with a database number"),
        ("redis://h/0/1", "it must end with a database number"),
        ("redis://h/²", "it must end with a database number"),
        ("unix://run/redis.sock", UNIX_PATH),
        ("unix:///", UNIX_PATH),
        ("unix:///run/redis.sock?db=jobs", "db must be a whole number"),
        (
            "unix:///run/redis.sock?socket_keepalive=1",
            f"unknown option socket_keepalive; allowed: {OF_UNIX}",
        ),
        ("redis://h?db=jobs", "db must be a whole number"),
        ("redis://h/1?db=2", "it gives more than one database"),
        ("redis://h?db=1&virtual_host=2", "it gives more than one database"),
        ("redis://:sec@h?password=ret", "it gives more than one password"),
        ("redis://h?db=1&db=1", "option db is given twice"),
        ("redis://h?retry_on_timeout=1", f"unknown option retry_on_timeout; allowed: {OF_REDIS}"),
        ("redis://h?ssl_ca_certs=/c", f"unknown option ssl_ca_certs; allowed: {OF_REDIS}"),
        ("redis://h?socket_timeout=soon", "socket_timeout must be seconds, a number above 0"),
        ("redis://h?socket_timeout=1", "socket_timeout must be at least 2 s, which readers wait"),
        ("redis://h?socket_keepalive=maybe", "socket_keepalive must be true or false"),
        ("redis://h?max_connections=0", "max_connections must be at least 1"),
        ("redis://h?protocol=3", "protocol must be 2"),
        ("rediss://h?ssl_cert_reqs=never", "ssl_cert_reqs must be required, optional or none"),
        ("redis://:sec/ret@h:1/0", UNREADABLE),
        ("redis://:12/secret@h:1/0", UNREADABLE),
        ("redis://:sec?ret@h:1/0", UNREADABLE),
        ("redis://:12#secret@h:1/0", UNREADABLE),
        ("redis://[::1/0", UNREADABLE),
        ("sentinel://a:1;sentinel://b:x/0", UNREADABLE),
        ("sentinel://a/jobs", "it must end with a database number"),
        ("sentinel://", "each part of a Sentinel URL must be sentinel://host:port"),
        ("sentinel://a;redis://b", "each part of a Sentinel URL must be sentinel://host:port"),
        ("sentinel://a?name=jobs", f"unknown option name; allowed: {OF_SENTINEL}"),
        ("redis+cluster://a:1;redis+cluster://:sec@b", NO_CLUSTER),
        ("rediss+cluster://a", NO_CLUSTER),
        ("redis-cluster://a", NO_CLUSTER),
        ("sentinel://a?master_name=&sentinel_password=x", "option master_name has no value"),
        ("sentinel://a,b?master_name=c", "hosts are separated by ';', each with its scheme"),
        ("sentinel://a:1,b:2", UNREADABLE),
        (
            "sentinel://me:sec@a;sentinel://you:sec@b",
            "all parts must have the same user and password, or none",
        ),
    ],
)
@pytest.mark.parametrize("connect_to", [connect, connect_async])
def test_an_invalid_url_is_refused_with_the_reason(
    connect_to: Callable[[str], object], url: str, reason: str
) -> None:
    with pytest.raises(BrokerUnavailable) as caught:
        connect_to(url)
    sentence = str(caught.value)
    remedy = "correct the URL that the call or --redis gives"
    assert sentence.endswith(f" is not a Redis URL: {reason}; {remedy}")
    if "@" in url:
        assert "sec" not in sentence
        assert "ret" not in sentence


@pytest.mark.parametrize(
    "url",
    [
        "redis://h",
        "redis://h/",
        "redis://[::1]:6379/0?password=p@ss",
        "rediss://u:p%2F@h:1/15",
        "unix:///run/redis@1.sock?db=1",
        "sentinel://:p%2F@a:1;sentinel://b/0?sentinel_password=a;b",
    ],
)
def test_a_valid_url_is_accepted(url: str) -> None:
    connect(url).close()


def test_a_url_names_sentinels_master_database_and_passwords() -> None:
    parsed = RedisUrl.parse(WITH_SENTINEL)
    assert parsed.servers == (("a", 1), ("b", 26379))
    assert (parsed.db, parsed.username, parsed.password) == (3, "me", "p@ss")
    assert (parsed.master_name, parsed.sentinel_password) == ("jobs", "other")
    assert celery_url(WITH_SENTINEL) == "sentinel://me:p%40ss@a:1/3;sentinel://me:p%40ss@b:26379/3"


def test_one_sentinel_and_no_options_are_enough() -> None:
    parsed = RedisUrl.parse("sentinel://a")
    assert (parsed.servers, parsed.master_name, parsed.db) == ((("a", 26379),), "mymaster", 0)


def test_no_password_of_any_part_is_shown() -> None:
    assert safe_url(WITH_SENTINEL) == "sentinel://me:***@a:1;sentinel://me:***@b/3"


TLS_SPELLINGS = ["CERT_NONE", "none", "cert_optional", "optional", "CERT_REQUIRED", "required"]


@pytest.mark.parametrize("spelling", TLS_SPELLINGS)
def test_each_reader_checks_certificates_as_the_url_says(spelling: str) -> None:
    url = f"rediss://h/1?ssl_cert_reqs={spelling}&ssl_ca_certs=/c.pem&ssl_check_hostname=false"
    meant = {
        "ssl_cert_reqs": spelling.lower().removeprefix("cert_"),
        "ssl_ca_certs": "/c.pem",
        "ssl_check_hostname": False,
    }
    for reader in readers(url):
        assert reader.items() >= (meant | {"db": 1}).items()


def test_a_url_without_options_trusts_no_unknown_certificate() -> None:
    for reader in readers("rediss://h"):
        assert reader.get("ssl_cert_reqs", "required") == "required"


@pytest.mark.parametrize("scheme", ["redis", "rediss", "sentinel"])
def test_each_reader_gets_what_the_url_says(scheme: str) -> None:
    meant: dict[str, object] = {
        "socket_timeout": 4.5,
        "socket_connect_timeout": 1.5,
        "socket_keepalive": False,
        "health_check_interval": 7,
        "max_connections": 33,
        "client_name": "jobs",
    }
    options = "&".join(f"{name}={value}" for name, value in meant.items())
    for reader in readers(f"{scheme}://h?{options}&virtual_host=4&protocol=2"):
        assert reader.items() >= (meant | {"db": 4}).items()


def readers(url: str) -> list[dict[str, object]]:
    """What redis-py gets from clients, threaded and not, from Celery's backend and from kombu."""
    app = build_app(Settings(redis_url=url, model=Path("toy.gguf")))
    clients = connect(url), connect_async(url), app.backend.client
    pools: list[Any] = [client.connection_pool for client in clients]
    limited = [pool.connection_kwargs | {"max_connections": pool.max_connections} for pool in pools]
    return [*limited, kombu_options(app)]


def kombu_options(app: Celery) -> dict[str, object]:
    """What kombu would connect with; a channel connects when it is made."""
    connection = app.connection_for_write()
    transport = connection.transport
    channel = object.__new__(transport.Channel)
    channel.connection = transport
    for name in channel.from_transport_options:
        if name in connection.transport_options:
            setattr(channel, name, connection.transport_options[name])
    options: dict[str, object] = channel._connparams()
    return options


def test_a_client_of_a_redis_in_cluster_mode_gets_a_remedy() -> None:
    with (
        own_redis(options=("--cluster-enabled", "yes"), port=free_node_port()) as server,
        Client(server.url, model="toy") as client,
        pytest.raises(
            BrokerRefused, match="in cluster mode; use a Redis with cluster mode disabled"
        ),
    ):
        client.submit(prompt="x", max_tokens=2)


def test_a_wrong_url_is_corrected_where_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert how_to_change(Settings().redis_url) == f"set {VARIABLE}"
    assert VARIABLE not in how_to_change("redis://elsewhere")
    for name in (VARIABLE, VARIABLE.lower()):  # settings are read in either case
        with monkeypatch.context() as given:
            given.setenv(name, "redis://elsewhere")
            assert Settings().redis_url == "redis://elsewhere"
            assert how_to_change("redis://elsewhere") == f"correct {VARIABLE}"
