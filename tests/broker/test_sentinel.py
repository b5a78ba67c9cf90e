"""URLs of a Redis behind Sentinel."""

from __future__ import annotations

from llorch_worker.broker.connection import safe_url
from llorch_worker.broker.sentinel import SentinelUrl

URL = "sentinel://me:p%40ss@a:1;sentinel://me:p%40ss@b/3?master_name=jobs&sentinel_password=other"


def test_a_url_names_sentinels_master_database_and_passwords() -> None:
    parsed = SentinelUrl.parse(URL)
    assert parsed.sentinels == (("a", 1), ("b", 26379))
    assert parsed.redis_options == {"db": 3, "username": "me", "password": "p@ss"}
    assert parsed.transport_options["master_name"] == "jobs"
    assert parsed.sentinel_options["password"] == "other"
    assert parsed.bare == "sentinel://me:p%40ss@a:1/3;sentinel://me:p%40ss@b/3"


def test_one_sentinel_and_no_options_are_enough() -> None:
    parsed = SentinelUrl.parse("sentinel://a")
    assert (parsed.sentinels, parsed.master_name, parsed.db) == ((("a", 26379),), "mymaster", 0)


def test_no_password_of_any_part_is_shown() -> None:
    assert safe_url(URL) == "sentinel://me:***@a:1;sentinel://me:***@b/3"
