"""Queues at whose names somebody wrote a key of another type. Nobody claims from them."""

from __future__ import annotations

from collections.abc import Sequence

from kombu.log import get_logger
from redis import Redis

from llorch_worker.broker.scripts import run_script, text
from llorch_worker.contract import shown

logger = get_logger(__name__)


class StoppedQueues:
    """Those of one model, and the log of them."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def look(self, client: Redis, lists: Sequence[str]) -> None:
        """Logs which of the ``lists`` have stopped since the last look, and which go on."""
        _, *heads = run_script(client, "heads", [], lists)
        found = {lists[place - 1]: wrong_key(lists[place - 1], text(kind))
                 for place, jobs, kind in heads if jobs < 0}  # fmt: skip
        for name in found.keys() - self._known.keys():
            logger.error("a queue is stopped: %s", found[name])
        for name in self._known.keys() - found.keys():
            logger.info("the queue of the key %s goes on", shown(name))
        self._known = found


def wrong_key(name: str, kind: str) -> str:
    """The sentence about a key of this type."""
    return f"the key {shown(name)} holds a {kind}, not jobs; rename or delete it"
