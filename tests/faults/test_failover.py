"""Sentinel promotes a replica; clients and workers follow by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from llorch_worker.broker.connections.connection import connect, connect_async
from llorch_worker.broker.scripts import run_script, run_script_async
from llorch_worker.client import Client
from tests.faults.sentinel import PASSWORD, sentinel
from tests.latch import Latch
from tests.services import (
    LOCALHOST,
    begun,
    own_redis,
    running_worker,
    token_ids,
    wait_until,
)

GET_S = 60


@dataclass
class Pair:
    """A master, its replica, and the Sentinel that watches both."""

    url: str
    master: redis.Redis
    replica: redis.Redis
    sentinel: redis.Redis

    def knows_replica(self) -> bool:
        (known,) = self.sentinel.sentinel_slaves("jobs") or [{"master-link-status": "none"}]
        return str(known["master-link-status"]) == "ok"

    def fail_over(self, *, kill: bool = True) -> None:
        """Returns once master and replica have changed roles. With ``kill`` all connections to the
        old master are closed, as by Sentinel."""
        new_address = LOCALHOST, port_of(self.replica)
        self.sentinel.execute_command("SENTINEL", "FAILOVER", "jobs")
        wait_until(
            lambda: self.sentinel.sentinel_get_master_addr_by_name("jobs") == new_address,
            timeout_s=GET_S,
        )
        # Sentinel sends the old master these commands too, but only after ten seconds.
        self.master.replicaof(*new_address)
        for kind in ("normal", "pubsub") if kill else ():
            self.master.client_kill_filter(_type=kind, skipme=True)
        wait_until(lambda: follows(self.master), timeout_s=GET_S)


def port_of(server: redis.Redis) -> int:
    return int(server.get_connection_kwargs()["port"])


def follows(replica: redis.Redis) -> bool:
    return str(replica.info("replication").get("master_link_status")) == "up"


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    secret = ("--requirepass", PASSWORD, "--masterauth", PASSWORD)
    with own_redis(options=secret) as first:
        copies = ("--replicaof", LOCALHOST, str(first.port), "--repl-diskless-sync-delay", "0")
        with (
            own_redis(options=(*secret, *copies)) as second,
            redis.Redis(LOCALHOST, first.port, password=PASSWORD) as master,
            redis.Redis(LOCALHOST, second.port, password=PASSWORD) as replica,
        ):
            wait_until(lambda: follows(replica), timeout_s=GET_S, what="the replica to follow")
            with (
                sentinel(tmp_path, first) as port,
                redis.Redis(LOCALHOST, port, decode_responses=True) as watcher,
            ):
                url = f"sentinel://:{PASSWORD}@{LOCALHOST}:{port}?master_name=jobs"
                pair = Pair(url, master, replica, watcher)
                wait_until(pair.knows_replica, timeout_s=GET_S, what="Sentinel's replica")
                yield pair


def test_clients_follow_the_master_busy_or_idle(pair: Pair) -> None:
    with connect(pair.url) as busy, connect(pair.url) as idle:
        busy.set("written", "before")
        idle.get("written")
        pair.fail_over()
        busy.set("written", "busy")
        assert pair.replica.get("written") == b"busy"
        assert busy.info("replication")["role"] == "master"
        idle.set("written", "idle")
        assert pair.replica.get("written") == b"idle"


def test_what_meets_the_demoted_master_goes_on_at_the_new_one(pair: Pair) -> None:
    async def acquire_again() -> object:
        return await run_script_async(asynchronous, "acquire", [60_000], ["asynchronous"])

    with (
        connect(pair.url) as client,
        connect(pair.url) as reader,
        asyncio.Runner() as runner,
        ThreadPoolExecutor() as threads,
    ):
        asynchronous = connect_async(pair.url)
        runner.run(asynchronous.ping())
        assert run_script(client, "acquire", [60_000], ["before"])
        waiting = threads.submit(reader.blpop, ["list"], GET_S)
        wait_until(lambda: "blpop" in {each["cmd"] for each in pair.master.client_list()})
        pair.fail_over(kill=False)
        assert run_script(client, "acquire", [60_000], ["after"])
        assert runner.run(acquire_again())
        runner.run(asynchronous.aclose())
        pair.replica.rpush("list", "at the new one")
        assert waiting.result(GET_S) == ("list", "at the new one")
    assert pair.replica.exists("before", "after", "asynchronous") == 3


def test_a_worker_goes_on_at_the_new_master(pair: Pair, tmp_path: Path, latch: Latch) -> None:
    with (
        running_worker(pair.url, tmp_path, model_name="toy", TOY_STEP_MS=2),
        Client(pair.url, model="toy") as client,
    ):
        assert client.submit(prompt="x", max_tokens=5).result(GET_S).attempts == 1
        running = begun(client.submit(prompt=latch.prompt(after=500), max_tokens=1_000))
        pair.fail_over()
        latch.open()
        # Tokens that the old master did not replicate are written again.
        ids = running.result(GET_S).choices[0].token_ids
        assert len(ids) == 1_000
        entries = list(running.stream(timeout=GET_S))
        assert tuple(token_ids(entries)) == ids
        assert entries[-1].event.type == "finished"
        assert client.submit(prompt="x", max_tokens=5).result(GET_S).attempts == 1
