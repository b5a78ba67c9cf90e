"""Sentinel makes a replica the master: clients and workers follow, without being told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.exceptions import RedisError

from llorch_worker.broker.connection import connect
from llorch_worker.client import Client
from tests.faults.sentinel import PASSWORD, sentinel
from tests.services import (
    LOCALHOST,
    RedisServer,
    held_ids,
    own_redis,
    redis_binaries,
    running_worker,
    wait_until,
)

GET_S = 60


@dataclass
class Pair:
    """A master, its replica, and the sentinel that watches both."""

    url: str
    master: RedisServer
    replica: RedisServer
    sentinel: redis.Redis

    def fail_over(self) -> None:
        """Returns once the replica is the master, and the old one its replica."""
        with suppress(redis.ResponseError):
            # Under way already, or the replica is not known yet: asked again below.
            self.sentinel.execute_command("SENTINEL", "FAILOVER", "jobs")
        wait_until(lambda: _replication(self.replica)["role"] == "master", timeout_s=GET_S)
        wait_until(lambda: _replication(self.master)["role"] == "slave", timeout_s=GET_S)

    def knows_replica(self) -> bool:
        (known,) = self.sentinel.sentinel_slaves("jobs") or [{"master-link-status": "none"}]
        return str(known["master-link-status"]) == "ok"


@contextmanager
def watched(folder: Path) -> Iterator[Pair]:
    secret = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
    with own_redis(options=secret) as master:
        follows = ("--replicaof", LOCALHOST, str(master.port), "--repl-diskless-sync-delay", "0")
        with own_redis(options=(*secret, *follows)) as replica:
            wait_until(lambda: _follows(replica), timeout_s=GET_S, what="the replica to follow")
            with (
                sentinel(folder, master) as port,
                redis.Redis(LOCALHOST, port, decode_responses=True) as watcher,
            ):
                url = f"sentinel://:{PASSWORD}@{LOCALHOST}:{port}?master_name=jobs"
                pair = Pair(url, master, replica, watcher)
                wait_until(pair.knows_replica, timeout_s=GET_S, what="the sentinel's replica")
                yield pair


def _follows(replica: RedisServer) -> bool:
    return str(_replication(replica)["master_link_status"]) == "up"


def _replication(server: RedisServer) -> dict[str, Any]:
    with redis.Redis(LOCALHOST, server.port, password=PASSWORD) as client:
        return dict(client.info("replication"))


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    if not redis_binaries():
        pytest.skip("needs a redis-server")
    with watched(tmp_path) as pair:
        yield pair


def test_clients_follow_the_master_busy_or_idle(pair: Pair) -> None:
    with (
        connect(pair.url) as busy,
        connect(pair.url) as idle,
        redis.Redis(LOCALHOST, pair.replica.port, password=PASSWORD) as new_master,
    ):

        def written() -> bool:
            # Without a pause: a failed try may not keep the next at the old master.
            try:
                busy.set("written", "busy")
            except RedisError:
                return False
            return new_master.get("written") == b"busy"

        busy.set("written", "before")
        idle.get("written")
        pair.fail_over()
        wait_until(written, what="a write that arrives at the new master")
        assert busy.info("replication")["role"] == "master"
        idle.set("written", "idle")
        assert new_master.get("written") == b"idle"


def test_a_worker_goes_on_at_the_new_master(pair: Pair, tmp_path: Path) -> None:
    with (
        running_worker(pair.url, tmp_path, model_name="toy", TOY_STEP_MS=2),
        Client(pair.url, model="toy") as client,
    ):
        assert client.submit(prompt="x", max_tokens=5).result(GET_S).attempts == 1
        running = client.submit(prompt="x", max_tokens=3_000)
        wait_until(lambda: held_ids(client.redis) == {running.id})
        pair.fail_over()
        # What the old master took and did not pass on is gone from the stream; not from the result.
        result = running.result(GET_S)
        assert len(result.choices[0].token_ids) == 3_000
        assert result.attempts == 1
        assert [entry.event.type for entry in running.stream(timeout=GET_S)][-1] == "finished"
        assert client.submit(prompt="x", max_tokens=5).result(GET_S).attempts == 1
