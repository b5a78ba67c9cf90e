"""Names of keys and channels on connections to a real Redis Cluster."""

from __future__ import annotations

import asyncio
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connection import (
    connect,
    connect_async,
    own_connection,
    subscribe,
)
from llorch_worker.broker.producer import producer_app
from llorch_worker.broker.queue_news import QueueNews
from llorch_worker.client import Client
from llorch_worker.contract import Cancelled
from tests.gateways import running_gateway
from tests.redis_cluster import one_node
from tests.services import (
    LOCALHOST,
    REPOSITORY,
    RedisServer,
    begun,
    free_node_port,
    running_worker,
    wait_until,
)

GET_S = 60
PREFIX = "{llorch}:"


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with one_node(port=free_node_port()) as found:
        yield found


@pytest.fixture(scope="module")
def url(server: RedisServer) -> str:
    return f"redis+cluster://{LOCALHOST}:{server.port}"


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with connect(url) as found:
        yield found


@pytest.fixture
def raw(server: RedisServer) -> Iterator[redis.Redis]:
    with redis.Redis(LOCALHOST, server.port, decode_responses=True) as found:
        yield found
        found.flushall()


def test_names_have_the_tag_in_redis_and_nowhere_else(
    client: redis.Redis, raw: redis.Redis
) -> None:
    client.set("a", "{llorch}:value")
    assert raw.get(f"{PREFIX}a") == client.get("a") == "{llorch}:value"
    with client.pipeline() as pipe:
        assert pipe.rpush("b", "1", "2").mget("a", "none").execute() == [
            2,
            ["{llorch}:value", None],
        ]
    assert client.blpop(["none", "b"], 1) == ("b", "1")
    client.xadd("c", {"event": "first"})
    assert client.xread({"c": "0", "none": "0"})[0][0] == "c"
    raw.set("another", 1)
    assert sorted(client.scan_iter("*")) == ["a", "b", "c"]
    assert client.exists("a", "b", "c", "another") == 3
    assert client.delete("a", "b", "c") == 3


def test_channels_have_the_tag_in_redis_and_nowhere_else(
    client: redis.Redis, raw: redis.Redis
) -> None:
    with subscribe(client, "a") as pubsub:
        assert pubsub.get_message(timeout=GET_S)["channel"] == "a"
        assert raw.publish("a", "not this") == 0
        assert raw.publish(f"{PREFIX}a", "{llorch}:this") == 1
        message = pubsub.get_message(timeout=GET_S)
        assert (message["channel"], message["data"]) == ("a", "{llorch}:this")
        pubsub.unsubscribe("a")
        assert pubsub.get_message(timeout=GET_S)["type"] == "unsubscribe"
        assert not pubsub.channels


def test_asynchronous_clients_name_the_same(url: str, raw: redis.Redis) -> None:
    async def use() -> None:
        async with connect_async(url) as client:
            async with client.pipeline() as pipe:
                await pipe.rpush("b", "1").exists("b").execute()
            assert raw.exists(f"{PREFIX}b")
            assert await client.blpop(["none", "b"], 1) == ("b", "1")
            async with client.pubsub() as pubsub:
                await pubsub.subscribe("a")
                await pubsub.get_message(timeout=GET_S)
                await client.publish("a", "this")
                message = await pubsub.get_message(timeout=GET_S)
                assert (message["channel"], message["data"]) == ("a", "this")

    asyncio.run(use())


def test_news_of_queues_name_them_without_the_tag(client: redis.Redis, raw: redis.Redis) -> None:
    with own_connection(client) as asking, own_connection(client) as hearing:
        news = QueueNews(asking, hearing, "toy")
        client.set(keys.watch("toy"), 1)
        news.note_renewal()
        assert news.read(GET_S) == set()
        assert news.renewals == 0
        for name in ("llorch.toy", "llorch.toy@gpu0.host"):
            raw.lpush(f"{PREFIX}{name}", "a job")
            raw.lpush(name, "of somebody else")
            assert news.read(GET_S) == {name}
        assert news.any_exist(["llorch.toy"])
        raw.delete(f"{PREFIX}llorch.toy")
        assert news.read(GET_S) == {"llorch.toy"}


def test_a_command_whose_keys_are_unknown_is_refused(client: redis.Redis) -> None:
    with pytest.raises(NotImplementedError, match="which arguments of SORT"):
        client.sort("a")
    with pytest.raises(NotImplementedError, match="SCAN without MATCH"):
        client.scan()


@pytest.mark.parametrize("transaction", [True, False])
def test_a_command_whose_reply_holds_names_is_refused_in_a_pipeline(
    client: redis.Redis, raw: redis.Redis, transaction: bool
) -> None:
    """Its reply would have the tag."""
    client.rpush("a", "1")
    client.xadd("b", {"event": "first"})
    with client.pipeline(transaction=transaction) as pipe:
        for refused in (
            lambda: pipe.brpop(["a"], 1),
            lambda: pipe.xread({"b": "0"}),
            lambda: pipe.scan(match="*"),
        ):
            pipe.set("written", "1")
            refused()
            with pytest.raises(NotImplementedError, match="in a pipeline: send it alone"):
                pipe.execute()
        # Nothing was sent, and the connection still serves.
        assert not raw.exists(f"{PREFIX}written")
        assert pipe.llen("a").execute() == [1]


def test_a_channel_of_kombus_sweeps_the_bindings_of_its_fleet_only(
    url: str, raw: redis.Redis
) -> None:
    """Bindings of queues that expire, such as those for replies of workers."""
    names = [f"{begin}_kombu.binding.gone" for begin in ("", PREFIX)]
    for name in names:
        raw.sadd(name, "a queue")
    raw.zadd(f"{PREFIX}_kombu.binding_deadlines", {"gone": 1})
    with producer_app(url) as app, app.connection_for_write() as connection:
        assert connection.default_channel.sweep_bindings() == 1
    assert [raw.exists(name) for name in names] == [1, 0]


# Rights -------------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[RedisServer]:
    """A server with the users that docs/OPERATING.md tells how to make."""
    text = (REPOSITORY / "docs" / "OPERATING.md").read_text()
    command = text[text.index("    sed -e") :].partition("\n\n")[0].replace("\\\n", " ")
    users = tmp_path / "users.conf"
    made = subprocess.run(shlex.split(command), cwd=REPOSITORY, capture_output=True, check=True)
    users.write_bytes(made.stdout)
    with one_node(port=free_node_port(), options=("--include", str(users))) as server:
        yield server


def test_the_rights_that_the_docs_tell_how_to_make_are_enough(
    guarded: RedisServer, tmp_path: Path
) -> None:
    def url_of(user: str) -> str:
        return f"redis+cluster://{user}:change-me@{LOCALHOST}:{guarded.port}"

    admin = f"redis+cluster://{LOCALHOST}:{guarded.port}"
    options = {"watched_at": admin, "model_name": "toy", "TOY_STEP_MS": 2}
    with (
        redis.Redis(LOCALHOST, guarded.port, decode_responses=True) as raw,
        running_worker(url_of("llorch-worker"), tmp_path, **options),
        running_gateway(url_of("llorch-gateway"), tmp_path) as gateway,
        Client(url_of("llorch-producer"), model="toy") as producer,
    ):
        assert gateway.url
        assert producer.submit(prompt="x", max_tokens=2, idempotency_key="a").result(GET_S).text
        endless = begun(producer.submit(prompt="x", max_tokens=4000))
        endless.cancel()
        with pytest.raises(Cancelled):
            endless.result(GET_S)
        wait_until(lambda: not raw.zcard(f"{PREFIX}{keys.LEASES}"))
        refused = {entry["object"] for entry in raw.acl_log()}
        # Redis 6 has no CLIENT SETINFO, with which redis-py tells its version.
        assert refused <= {"client"}
