"""Queues at whose names somebody wrote a key of another type. Nobody claims from them."""

from __future__ import annotations

from collections.abc import Sequence

from kombu.log import get_logger
from redis import Redis

from llorch_worker.broker.scripts import run_script, text
from llorch_worker.contract import shown

logger = get_logger(__name__)

MOST_ASKED = 1000
"""How many lists to ask for at a time. Redis answers nobody meanwhile."""


class StoppedQueues:
    """Those of one model, and the log of them."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def look(self, client: Redis, lists: Sequence[str]) -> set[str]:
        """Logs which of the ``lists`` have stopped since the last look, and which go on. Returns
        those with jobs."""
        found: dict[str, str] = {}
        filled: set[str] = set()
        for first in range(0, len(lists), MOST_ASKED):
            _, *heads = run_script(client, "heads", [], lists[first : first + MOST_ASKED])
            for place, jobs, kind in heads:
                name = lists[first + place - 1]
                if jobs < 0:
                    found[name] = wrong_key(name, text(kind))
                else:
                    filled.add(name)
        for name in found.keys() - self._known.keys():
            logger.error("a queue is stopped: %s", found[name])
        for name in self._known.keys() - found.keys():
            logger.info("the queue of the key %s goes on", shown(name))
        self._known = found
        return filled


def wrong_key(name: str, kind: str) -> str:
    """The sentence about a key of this type."""
    return f"the key {shown(name)} holds a {kind}, not jobs; rename or delete it"
