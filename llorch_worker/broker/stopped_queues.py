"""Queues at whose names somebody wrote a key of another type."""

from __future__ import annotations

from collections.abc import Collection

from kombu.log import get_logger
from redis import Redis

from llorch_worker.broker import queues
from llorch_worker.broker.scripts import text
from llorch_worker.contract import shown

logger = get_logger(__name__)


class StoppedQueues:
    """Those of one worker. It claims from the others meanwhile, and logs which are stopped."""

    def __init__(self) -> None:
        self._keys: frozenset[str] = frozenset()

    def __contains__(self, queue: str) -> bool:
        """Whether the queue's own list, to which a claim looks first, is no list."""
        return queue in self._keys

    def __bool__(self) -> bool:
        return bool(self._keys)

    def look(self, client: Redis, consumed: Collection[str]) -> bool:
        """Asks for the types of the keys of the ``consumed`` queues; whether any is stopped."""
        names = queues.lists(consumed)
        kinds: dict[str, str] = {}
        for model in set(map(queues.model_of, consumed)):
            kinds |= {queues.suspects(model): "list", queues.scheduled(model): "zset"}
        if names and client.exists(*names):
            kinds |= dict.fromkeys(names, "list")
        with client.pipeline(transaction=False) as pipe:
            for name in kinds:
                pipe.type(name)
            types = dict(zip(kinds, map(text, pipe.execute()), strict=True))
        found = {name: kind for name, kind in types.items() if kind not in ("none", kinds[name])}
        for name in found.keys() - self._keys:
            logger.error("a queue is stopped: %s", wrong_key(name, found[name]))
        for name in self._keys - found.keys():
            logger.info("the queue of the key %s goes on", shown(name))
        self._keys = frozenset(found)
        return bool(found)


def wrong_key(name: str, kind: str) -> str:
    """The sentence about a key of this type."""
    return f"the key {shown(name)} holds a {kind}, not jobs; rename or delete it"
