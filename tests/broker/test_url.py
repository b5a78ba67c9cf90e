"""URLs of a Redis, alone or behind Sentinel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llorch_worker.broker.connection import connect, connect_async
from llorch_worker.broker.url import SentinelUrl, safe_url
from llorch_worker.client import Client
from llorch_worker.contract.errors import BrokerRefused, BrokerUnavailable
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
UNIX_OPTIONS = "its only option is db, a number"
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
        ("unix:///run/redis.sock?db=jobs", UNIX_OPTIONS),
        ("unix:///run/redis.sock?virtual_host=1", UNIX_OPTIONS),
        ("redis://h?db=jobs", "Invalid value for 'db' in connection URL"),
        ("redis://:sec/ret@h:1/0", UNREADABLE),
        ("redis://:12/secret@h:1/0", UNREADABLE),
        ("redis://:sec?ret@h:1/0", UNREADABLE),
        ("redis://:12#secret@h:1/0", UNREADABLE),
        ("redis://[::1/0", UNREADABLE),
        ("sentinel://a:1;sentinel://b:x/0", UNREADABLE),
        ("sentinel://a/jobs", "it must end with a database number"),
        ("sentinel://", "each part of a Sentinel URL must be sentinel://host:port"),
        ("sentinel://a;redis://b", "each part of a Sentinel URL must be sentinel://host:port"),
        ("sentinel://a?name=jobs", "unknown option name; allowed: master_name, sentinel_password"),
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
    assert sentence.endswith(f" is not a Redis URL: {reason}; set LLORCH_REDIS_URL")
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
    parsed = SentinelUrl.parse(WITH_SENTINEL)
    assert parsed.sentinels == (("a", 1), ("b", 26379))
    assert parsed.redis_options == {"db": 3, "username": "me", "password": "p@ss"}
    assert parsed.transport_options["master_name"] == "jobs"
    assert parsed.sentinel_options["password"] == "other"
    assert parsed.bare == "sentinel://me:p%40ss@a:1/3;sentinel://me:p%40ss@b/3"


def test_one_sentinel_and_no_options_are_enough() -> None:
    parsed = SentinelUrl.parse("sentinel://a")
    assert (parsed.sentinels, parsed.master_name, parsed.redis_options["db"]) == (
        (("a", 26379),),
        "mymaster",
        0,
    )


def test_no_password_of_any_part_is_shown() -> None:
    assert safe_url(WITH_SENTINEL) == "sentinel://me:***@a:1;sentinel://me:***@b/3"


def test_a_client_of_a_redis_in_cluster_mode_gets_a_remedy() -> None:
    with (
        own_redis(options=("--cluster-enabled", "yes"), port=free_node_port()) as server,
        Client(server.url, model="toy") as client,
        pytest.raises(
            BrokerRefused, match="in cluster mode; use a Redis with cluster mode disabled"
        ),
    ):
        client.submit(prompt="x", max_tokens=2)
