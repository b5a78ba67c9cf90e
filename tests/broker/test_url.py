"""URLs of a Redis, alone or behind Sentinel."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from llorch_worker.broker.connection import connect, connect_async
from llorch_worker.broker.url import FollowedUrl, safe_url
from llorch_worker.contract.errors import BrokerUnavailable

WITH_SENTINEL = (
    "sentinel://me:p%40ss@a:1;sentinel://me:p%40ss@b/3?master_name=jobs&sentinel_password=other"
)
WITH_CLUSTER = "redis+cluster://me:p%40ss@a;redis+cluster://b:1?tag=jobs"
BEGINNING = (
    "it must begin with redis://, rediss://, unix://, sentinel://, redis+cluster:// or "
    "rediss+cluster://"
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
        ("redis+cluster://", "each part of a Cluster's URL must be redis+cluster://host:port"),
        (
            "rediss+cluster://a;redis+cluster://b",
            "each part of a Cluster's URL must be rediss+cluster://host:port",
        ),
        ("redis+cluster://a;redis+cluster://b:x", UNREADABLE),
        ("redis+cluster://a/1", "a Cluster has database 0 only"),
        ("redis+cluster://a?tag=a%20b", "tag must consist of letters, digits, '.', '_' and '-'"),
        ("redis+cluster://a?tag={b}", "tag must consist of letters, digits, '.', '_' and '-'"),
        ("redis+cluster://a?tag=", "option tag has no value"),
        ("redis+cluster://a?nonsense=", "unknown option nonsense; allowed: tag"),
        ("sentinel://a?master_name=&sentinel_password=x", "option master_name has no value"),
        ("redis+cluster://a,b?tag=c", "hosts are separated by ';', each with its scheme"),
        ("sentinel://a:1,b:2", UNREADABLE),
        (
            "redis+cluster://:sec@a;redis+cluster://:ret@b",
            "all parts must have the same user and password, or none",
        ),
        (
            "sentinel://me:sec@a;sentinel://you:sec@b",
            "all parts must have the same user and password, or none",
        ),
        (
            "rediss+cluster://a?ssl_cert_reqs=never",
            "ssl_cert_reqs must be one of required, optional, none",
        ),
        ("rediss+cluster://a?ssl_check_hostname=0", "ssl_check_hostname must be true or false"),
        ("redis+cluster://a?ssl_certfile=b", "unknown option ssl_certfile; allowed: tag"),
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
        "redis+cluster://a",
        "rediss+cluster://u:p%2F@a:1/;rediss+cluster://b/0?tag=b&ssl_ca_certs=/c.pem",
    ],
)
def test_a_valid_url_is_accepted(url: str) -> None:
    connect(url).close()


def test_a_url_names_sentinels_master_database_and_passwords() -> None:
    parsed = FollowedUrl.parse(WITH_SENTINEL)
    assert parsed.servers == (("a", 1), ("b", 26379))
    assert parsed.redis_options == {"db": 3, "username": "me", "password": "p@ss"}
    assert parsed.transport_options["master_name"] == "jobs"
    assert parsed.server_options["password"] == "other"
    assert parsed.bare == "sentinel://me:p%40ss@a:1/3;sentinel://me:p%40ss@b/3"


def test_one_sentinel_and_no_options_are_enough() -> None:
    parsed = FollowedUrl.parse("sentinel://a")
    assert (parsed.servers, parsed.name, parsed.redis_options["db"]) == (
        (("a", 26379),),
        "mymaster",
        0,
    )


def test_a_url_names_nodes_tag_and_password_of_a_cluster() -> None:
    parsed = FollowedUrl.parse(WITH_CLUSTER)
    assert parsed.servers == (("a", 6379), ("b", 1))
    assert (parsed.name, parsed.transport_options["master_name"]) == ("jobs", "jobs")
    assert parsed.redis_options == {"username": "me", "password": "p@ss"}
    assert parsed.server_options.items() >= parsed.redis_options.items()
    assert parsed.bare == "redis-cluster://me:p%40ss@a:6379/0;redis-cluster://me:p%40ss@b:1/0"
    assert not parsed.tls_options


def test_a_cluster_with_tls_trusts_no_unknown_certificate() -> None:
    parsed = FollowedUrl.parse("rediss+cluster://a?ssl_ca_certs=/c.pem")
    assert parsed.tls_options == {
        "ssl_cert_reqs": "required",
        "ssl_ca_certs": "/c.pem",
        "ssl_check_hostname": True,
    }
    assert parsed.redis_options.items() >= parsed.tls_options.items()
    assert parsed.redis_options["ssl"] is True
    assert parsed.name == "llorch"


def test_a_cluster_with_tls_may_announce_addresses_that_no_certificate_names() -> None:
    parsed = FollowedUrl.parse("rediss+cluster://a?ssl_check_hostname=false")
    assert parsed.redis_options["ssl_check_hostname"] is False
    assert parsed.server_options["ssl_check_hostname"] is False
    assert parsed.tls_options["ssl_check_hostname"] is False


def test_no_password_of_any_part_is_shown() -> None:
    assert safe_url(WITH_SENTINEL) == "sentinel://me:***@a:1;sentinel://me:***@b/3"
    assert safe_url(WITH_CLUSTER) == "redis+cluster://me:***@a;redis+cluster://b:1"
