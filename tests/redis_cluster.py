"""A real Redis Cluster on this machine: three masters, and a replica of the first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import redis

from llorch_worker.broker.tagged_names import key_prefix, slot_of
from tests.services import LOCALHOST, RedisServer, free_node_port, own_redis, wait_until

SLOTS = 16_384
MASTERS = 3
START_S = 60


@dataclass
class Node:
    """One server of a Cluster."""

    server: RedisServer
    client: redis.Redis
    id: str

    def ask(self, *command: object) -> object:
        return self.client.execute_command("CLUSTER", *command)

    def names(self) -> set[str]:
        """The names of all its keys."""
        return {name.decode() for name in self.client.scan_iter("*")}


@dataclass
class RedisCluster:
    """Three masters with a third of the slots each, and a replica of the first."""

    nodes: list[Node]

    @property
    def masters(self) -> list[Node]:
        return self.nodes[:MASTERS]

    @property
    def replica(self) -> Node:
        return self.nodes[MASTERS]

    def url(self, tag: str, scheme: str = "redis+cluster", options: str = "") -> str:
        """Names the masters. Nothing listens at the first address."""
        ports = [1, *(master.server.port for master in self.masters)]
        return ";".join(f"{scheme}://{LOCALHOST}:{port}" for port in ports) + f"?tag={tag}{options}"

    def tag_at(self, place: int, name: str) -> str:
        """A tag that begins with ``name``, whose slot lies at that master."""
        return next(
            tag
            for tag in (f"{name}{number}" for number in count())
            if slot_of(tag) in slots_of(place)
        )

    def names_of(self, tag: str, place: int) -> set[str]:
        """The names of all the fleet's keys, all of which must lie at that master, untagged."""
        prefix = key_prefix(tag)
        for other, master in enumerate(self.masters):
            if other != place:
                assert not {name for name in master.names() if name.startswith(prefix)}
        names = self.masters[place].names()
        return {name.removeprefix(prefix) for name in names if name.startswith(prefix)}

    def fail_over(self) -> None:
        """The replica and its master change roles; neither dies."""
        master, replica = self.nodes[0], self.replica
        replica.ask("FAILOVER")
        wait_until(lambda: is_master(replica), timeout_s=START_S, what="the new master")
        self.nodes[0], self.nodes[MASTERS] = replica, master
        wait_until(lambda: is_whole(self), timeout_s=START_S, what="the new replica")

    @contextmanager
    def moving(self, slot: int, source: Node, target: Node) -> Iterator[None]:
        """Moves a slot as ``redis-cli --cluster reshard`` does; its keys move at the end."""
        target.ask("SETSLOT", slot, "IMPORTING", source.id)
        source.ask("SETSLOT", slot, "MIGRATING", target.id)
        yield
        while names := source.ask("GETKEYSINSLOT", slot, 100):
            assert isinstance(names, list)
            source.client.migrate(LOCALHOST, target.server.port, names, 0, 5_000)
        for node in (target, source, *self.masters):
            node.ask("SETSLOT", slot, "NODE", target.id)


def slots_of(place: int) -> range:
    return range(place * SLOTS // MASTERS, (place + 1) * SLOTS // MASTERS)


@contextmanager
def redis_cluster(
    *, binary: Path | None = None, options: Sequence[str] = ()
) -> Iterator[RedisCluster]:
    """Starts one; each node gets the ``options``."""
    settings = (
        "--cluster-enabled", "yes", "--cluster-node-timeout", "1000",
        "--repl-diskless-sync-delay", "0", *options,
    )  # fmt: skip
    with ExitStack() as stack:
        nodes = []
        for _ in range(MASTERS + 1):
            server = stack.enter_context(
                own_redis(binary=binary, port=free_node_port(), options=settings)
            )
            client = stack.enter_context(redis.Redis(LOCALHOST, server.port, protocol=2))
            node_id = client.execute_command("CLUSTER", "MYID").decode()
            nodes.append(Node(server, client, node_id))
        found = RedisCluster(nodes)
        for place, master in enumerate(found.masters):
            master.ask("ADDSLOTS", *slots_of(place))
            master.ask("SET-CONFIG-EPOCH", place + 1)
        for node in nodes[1:]:
            node.ask("MEET", LOCALHOST, nodes[0].server.port)
        wait_until(
            lambda: all(knows(node, len(nodes)) for node in nodes),
            timeout_s=START_S,
            what="the nodes to know each other",
        )
        found.replica.ask("REPLICATE", nodes[0].id)
        wait_until(lambda: is_whole(found), timeout_s=START_S, what="the Cluster")
        yield found


@contextmanager
def one_node(password: str | None = None, **options: Any) -> Iterator[RedisServer]:
    """A Cluster of one node, which has all slots; ``options`` are :class:`RedisServer`'s."""
    more = ("--requirepass", password) if password else ()
    options["options"] = ("--cluster-enabled", "yes", *more, *options.get("options", ()))
    with (
        own_redis(**options) as server,
        redis.Redis(LOCALHOST, server.port, password=password, protocol=2) as client,
    ):
        node = Node(server, client, "")
        node.ask("ADDSLOTS", *range(SLOTS))
        wait_until(lambda: b"cluster_state:ok" in information(node), timeout_s=START_S)
        yield server


def knows(node: Node, nodes: int) -> bool:
    return f"cluster_known_nodes:{nodes}".encode() in information(node)


def information(node: Node) -> bytes:
    answer = node.ask("INFO")
    assert isinstance(answer, bytes)
    return answer


def is_master(node: Node) -> bool:
    return str(node.client.info("replication")["role"]) == "master"


def is_whole(found: RedisCluster) -> bool:
    """Whether all slots have masters, and the replica follows its own."""
    link = found.replica.client.info("replication").get("master_link_status")
    return link == "up" and all(b"cluster_state:ok" in information(node) for node in found.nodes)
