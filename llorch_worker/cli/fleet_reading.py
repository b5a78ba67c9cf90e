"""What ``status`` and ``top`` read from Redis: once, as JSON lines, or again and again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llorch_worker.cli.terminal.screen import Screen, json_text
from llorch_worker.contract.command_errors import explain
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.contract.quantities import iso_time

if TYPE_CHECKING:
    from llorch_worker.broker.figures.fleet import Fleet, ModelLoad
    from llorch_worker.broker.figures.fleet_client import FleetClient
    from llorch_worker.broker.figures.history import Point
    from llorch_worker.broker.figures.listed_jobs import Listing
    from llorch_worker.broker.fleet.registry import WorkerCard


@dataclass(frozen=True)
class Reading:
    """The fleet at one moment."""

    fleet: Fleet
    at_s: float
    """Unix time."""
    jobs: Listing | None = None
    """Those that run or wait, if the screen shows them."""
    history: list[Point] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        """For scripts."""
        return {
            "at": iso_time(self.at_s),
            "workers": [_worker(card) for card in self.fleet.workers],
            "models": [_model(load) for load in self.fleet.models],
            "unserved_queues": self.fleet.unserved,
            "dead_letters": self.fleet.dead_letters,
        }


class FleetReader:
    """Reads the fleet; once it has started, in a thread of its own, so that a Redis which does not
    reply never stops the screen."""

    def __init__(self, client: FleetClient, *, jobs: int = 0) -> None:
        """``jobs``: so many of them, and the history, are read too."""
        self._client = client
        self._jobs = jobs
        self.away: BrokerUnavailable | None = None
        """Why the last reading failed."""
        self.defect: Exception | None = None
        """Why there will be no more readings."""
        self.last = self.read()

    def read(self) -> Reading:
        """Raises BrokerUnavailable if Redis does not answer."""
        if not self._jobs:
            return Reading(self._client.fleet(), time.time())
        return Reading(
            self._client.fleet(),
            time.time(),
            jobs=self._client.jobs(self._jobs),
            history=self._client.history(),
        )

    def start(self, interval_s: float, on_news: Callable[[], None]) -> None:
        """Reads every ``interval_s`` until the process ends; then calls ``on_news``."""
        threading.Thread(target=self._run, args=(interval_s, on_news), daemon=True).start()

    def _run(self, interval_s: float, on_news: Callable[[], None]) -> None:
        while True:
            time.sleep(interval_s)
            try:
                self.last, self.away = self.read(), None
            except BrokerUnavailable as error:
                self.away = error
            except Exception as error:
                # The main thread raises it, once the terminal is as it was.
                self.defect = error
                raise
            finally:
                on_news()


def readings(reader: FleetReader, interval_s: float) -> Iterator[Reading | BrokerUnavailable]:
    """What ``reader`` has read, and then a reading every ``interval_s``, or why there is none."""
    yield reader.last
    while True:
        time.sleep(interval_s)
        try:
            yield reader.read()
        except BrokerUnavailable as error:
            yield error


def print_lines(screen: Screen, reader: FleetReader, interval_s: float) -> None:
    """Prints one JSON document a line until it is interrupted."""
    for found in readings(reader, interval_s):
        document = found.document() if isinstance(found, Reading) else _error(found)
        screen.write_raw(json_text(document) + "\n")


def _error(error: BrokerUnavailable) -> dict[str, Any]:
    explained = explain(error)
    assert explained is not None
    return {"at": iso_time(time.time()), "error": explained[0].model_dump(mode="json")}


def _worker(card: WorkerCard) -> dict[str, Any]:
    return card.model_dump(mode="json", exclude={"recent"}) | {"recent": card.recent.document()}


def _model(load: ModelLoad) -> dict[str, Any]:
    return load.card.model_dump(mode="json") | {
        "queued": load.waiting,
        "queues": {
            name: {"jobs": queue.jobs, "oldest_s": queue.oldest_s}
            for name, queue in load.queues.items()
        },
        "suspects": load.suspects,
        "scheduled": load.scheduled,
        "wrong_keys": list(load.wrong_keys),
        "workers": load.workers,
        "fingerprints": dict(load.fingerprints),
        "slots": load.slots,
        "running": load.running,
        "orphaned": load.orphaned,
        "preempting": load.preempting,
        "saturation": load.saturation,
        "tokens_per_s": load.tokens_per_s,
        "recent": load.recent.document(),
    }
