"""What Redis shows of the fleet, and what people tell its workers."""

from __future__ import annotations

from contextlib import closing
from typing import Self

from llorch_worker.broker.celery.producer import producer_app
from llorch_worker.broker.connections.connection import broker_errors, connect
from llorch_worker.broker.figures.fleet import Fleet, FleetReader
from llorch_worker.broker.figures.history import Point, history
from llorch_worker.broker.figures.listed_jobs import Listing, listed_jobs
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.contract import ModelNotServed, shown
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.errors import BrokerUnavailable

PING_TIMEOUT_S = 1.0
TELL_TIMEOUT_S = 10.0
LOAD_COMMAND, UNLOAD_COMMAND, RELOAD_COMMAND = "llorch_load", "llorch_unload", "llorch_reload"
"""Control commands of our workers."""


class FleetClient:
    """The figures that ``status``, ``doctor`` and ``up`` read, and commands to workers.

    Every method raises :class:`BrokerUnavailable` if Redis does not answer.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._redis = connect(url)
        self._reader = FleetReader(self._redis)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._redis.close()

    def ping(self) -> None:
        """Raises unless Redis answers."""
        with broker_errors(self._url):
            self._redis.ping()

    def answers(self) -> bool:
        """Whether Redis answers."""
        try:
            self.ping()
        except BrokerUnavailable:
            return False
        return True

    def workers(self) -> list[WorkerCard]:
        """The live workers. Their figures are up to 5 s old."""
        with broker_errors(self._url):
            return registry.workers(self._redis)

    def answering(self, hostnames: set[str]) -> set[str]:
        """Those of ``hostnames`` that answer a ping, which means that they take jobs."""
        with broker_errors(self._url), closing(producer_app(self._url)) as app:
            replies = app.control.ping(
                destination=sorted(hostnames), timeout=PING_TIMEOUT_S, limit=len(hostnames)
            )
        return {hostname for reply in replies for hostname in reply}

    def load(self, model: str, worker: str | None = None) -> str:
        """Has a worker load one of its models; returns which one: ``worker``, or the one with least
        to do. Raises ``ModelNotServed`` if none can, ``CommandError`` if it refuses."""
        able = [card for card in self.workers() if model in card.served]
        return self._tell_one(LOAD_COMMAND, model, worker, able, "serves")

    def unload(self, model: str, worker: str | None = None) -> str:
        """Likewise, has it end its engine until jobs wait."""
        able = [card for card in self.workers() if model == card.model]
        return self._tell_one(UNLOAD_COMMAND, model, worker, able, "has loaded")

    def reload(self, model: str, worker: str | None = None) -> list[str]:
        """Has all workers that have the model loaded, or ``worker``, load the new weights of its
        files; returns which. Raises as :meth:`load`."""
        able = _named(
            [card for card in self.workers() if model == card.model], model, worker, "has loaded"
        )
        for card in able:
            self._obey(card.hostname, RELOAD_COMMAND, model)
        return [card.hostname for card in able]

    def _tell_one(
        self, command: str, model: str, worker: str | None, able: list[WorkerCard], what: str
    ) -> str:
        card = min(
            _named(able, model, worker, what),
            # One that has it already need not change.
            key=lambda card: (card.model != model, card.load, card.hostname),
        )
        self._obey(card.hostname, command, model)
        return card.hostname

    def _obey(self, hostname: str, command: str, model: str) -> None:
        if (refusal := self.tell(hostname, command, model=model)) is not None:
            raise CommandError("REFUSED", f"{hostname} does not: {refusal}")

    def tell(self, hostname: str, command: str, **arguments: object) -> str | None:
        """Sends a worker this command; the reason why it does not obey, or None."""
        with broker_errors(self._url), closing(producer_app(self._url)) as app:
            replies = app.control.broadcast(
                command,
                arguments=arguments,
                destination=[hostname],
                reply=True,
                timeout=TELL_TIMEOUT_S,
                limit=1,
            )
        answers = [reply[hostname] for reply in replies if hostname in reply]
        return answers[0].get("error") if answers else "it does not answer"

    def jobs(self, limit: int) -> Listing:
        """Jobs that run or wait, those that run first, then those that are claimed next."""
        with broker_errors(self._url):
            return listed_jobs(self._redis, limit)

    def history(self) -> list[Point]:
        """The last hour, as the gateways keep it; empty without a gateway."""
        with broker_errors(self._url):
            return history(self._redis)

    def fleet(self) -> Fleet:
        """What all workers have to do, and what they can do."""
        with broker_errors(self._url):
            return self._reader.read()


def _named(able: list[WorkerCard], model: str, worker: str | None, what: str) -> list[WorkerCard]:
    found = [card for card in able if worker in (None, card.hostname)]
    if not found:
        who = "no worker" if worker is None else f"no worker {shown(worker)}"
        raise ModelNotServed(f"{who} {what} {shown(model)!r}; see llorch status")
    return found
