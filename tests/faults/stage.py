"""A Redis with jobs of the model ``toy``, those who move them, and what must hold."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self, TypeVar

import redis
from celery import Celery
from kombu.exceptions import OperationalError
from redis.backoff import NoBackoff
from redis.retry import Retry

from benches.battle.audit import TERMINAL_STATES
from benches.battle.recovery import TERMINAL_EVENTS
from llorch_worker.broker import keys, scripts
from llorch_worker.broker.connections.connection import RETRIES, connect
from llorch_worker.broker.jobs import claims, dead_letters
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.client import Client
from llorch_worker.contract import InternalError
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.config import worker_config
from tests.broker.steps import TERMS, announce, push, sweep, take
from tests.faults.proxy import FaultProxy
from tests.store import entries_of, leases_in, message_of, record_of, set_leases, stored_result

T = TypeVar("T")

SCRIPTS = [
    path.stem
    for path in sorted((Path(scripts.__file__).parent / "lua").glob("*.lua"))
    if path.stem != "prelude"
]
MOST_CALLS = 10
MOST_ROUNDS = 10
RESULTS = keys.result("*")
MARK = keys.result(".")
"""A channel that the results' pattern matches and no job has."""


class Stage:
    """``store`` is a direct connection; all others pass the proxy, and none waits between tries.

    ``client`` connects like clients, ``llorch`` and the worker's threads, which send a failed
    command again; ``channel`` like kombu, which does not. ``user`` and ``backend`` are our client
    and the worker's result backend, ``stock`` is a producer without this package.
    """

    def __init__(self, store: redis.Redis, proxy: FaultProxy) -> None:
        self.store = store
        self.client = connect(proxy.url)
        self.client.set_retry(Retry(NoBackoff(), RETRIES))
        self.channel = redis.Redis.from_url(
            proxy.url, protocol=2, decode_responses=True, retry=Retry(NoBackoff(), 0)
        )
        settings = Settings(redis_url=proxy.url, model_name="toy")
        self.user = Client(settings, model="toy")
        self.user.redis.set_retry(Retry(NoBackoff(), RETRIES))
        self.app: Any = Celery("llorch", set_as_current=False)
        self.app.settings = settings
        self.app.conf.update(
            worker_config(settings), result_backend_base_sleep_between_retries_ms=0
        )
        self.backend = self.app.backend
        self.stock = Celery("stock", broker=proxy.url, set_as_current=False)
        self._published = store.pubsub()
        self._published.psubscribe(RESULTS)
        for name in SCRIPTS:
            scripts.load(store, name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._published.close()
        self.user.close()
        self.stock.close()
        self.app.close()
        self.client.close()
        self.channel.close()

    def clear(self) -> None:
        self.store.flushall()
        announce(self.store)
        self.ends()

    # To bring a job to where a step begins, without faults ---------------------------------------

    def claimed(self, *job_ids: str) -> list[Claim]:
        """Claims of new jobs with these ids."""
        push(self.store, *job_ids)
        return take(self.store)

    def lapse(self, *kept: Claim) -> None:
        """Ends the leases of all other jobs and sweeps."""
        held = {claim.job_id for claim in kept}
        lapsed = {job_id: 0.0 for job_id in leases_in(self.store) if job_id not in held}
        if lapsed:
            set_leases(self.store, lapsed)
            sweep(self.store)

    def settle(self) -> None:
        """Workers take what waits and what was left behind, until every job has ended."""
        for _ in range(MOST_ROUNDS):
            self.lapse()
            taken = take(self.store)
            for claim in taken:
                assert claims.fail(self.store, claim, InternalError("the end"), TERMS)
            if not taken:
                return
        raise AssertionError("there is no end of jobs")

    # What a look at Redis shows ------------------------------------------------------------------

    def waiting(self) -> Counter[str]:
        """How often each job waits, wherever: a copy of its message may be in an inbox."""
        found: Counter[str] = Counter(self.store.zrange(keys.waiting("toy"), 0, -1))
        found.update(self.store.zrange(keys.scheduled("toy"), 0, -1))
        for name in self.store.keys("llorch.*"):
            messages = self.store.lrange(name, 0, -1)
            found.update(json.loads(message)["headers"]["id"] for message in messages)
        return found

    def record(self, job_id: str) -> dict[str, str]:
        return record_of(self.store, job_id)

    def events(self, job_id: str) -> list[dict[str, Any]]:
        """The events in the job's stream, after a check of their numbers."""
        entries = entries_of(self.store, job_id)
        numbers = [int(entry_id.removesuffix("-0")) for entry_id, _ in entries]
        assert numbers == [number for number, _ in enumerate(numbers, *numbers[:1])]
        return [json.loads(event) for _, event in entries]

    def ends(self) -> Counter[str]:
        """How many final results of each job were published since the last call."""
        self.store.publish(MARK, "")
        found: Counter[str] = Counter()
        while True:
            message = self._published.get_message(timeout=60)
            assert message is not None, "Redis publishes nothing"
            if message["channel"] == MARK:
                return +found
            if message["type"] == "pmessage":
                meta = json.loads(message["data"])
                found[meta["task_id"]] += meta["status"] in TERMINAL_STATES

    def assert_in_one_place(self, job_ids: Iterable[str]) -> None:
        """Each job waits, or a worker holds it under a lease, or it has ended."""
        waiting = self.waiting()
        assert waiting.keys() <= set(job_ids)
        for job_id in job_ids:
            record = self.record(job_id)
            leased = leases_in(self.store).get(job_id) is not None
            match record.get("state"):
                case "claimed":
                    assert (waiting[job_id], leased) == (0, True), record
                    message = message_of(self.store, job_id)
                    assert json.loads(message)["headers"]["id"] == job_id
                case "ended":
                    # The message of a job that was cancelled in an inbox is dropped later.
                    in_inbox = self._status(job_id) == "REVOKED" and "list" not in record
                    assert waiting[job_id] <= in_inbox, record
                    assert not leased, record
                case _:
                    assert (waiting[job_id], leased) == (1, False), record

    def assert_all_ended_once(self, job_ids: Iterable[str], earlier: Counter[str]) -> None:
        """Nothing waits or runs; each job has one result, and its stream one end.

        ``earlier``: the final results that were published before the last look.
        """
        assert not self.waiting()
        assert not leases_in(self.store)
        assert earlier + self.ends() == Counter(job_ids)
        for job_id in job_ids:
            assert self._status(job_id) in TERMINAL_STATES
            *before, last = self.events(job_id)
            assert last["type"] in TERMINAL_EVENTS
            assert all(event["type"] not in TERMINAL_EVENTS for event in before)

    def letters(self) -> list[str]:
        return [letter.id for letter in dead_letters.letters(self.store)]

    def _status(self, job_id: str) -> str | None:
        document = stored_result(self.store, job_id)
        return None if document is None else json.loads(document)["status"]


def insist(call: Callable[[], T]) -> tuple[T, int]:
    """Calls again while Redis does not answer; returns the answer and the number of calls."""
    for calls in range(1, MOST_CALLS + 1):
        try:
            return call(), calls
        except (redis.ConnectionError, redis.TimeoutError, OperationalError, BrokerUnavailable):
            continue
    raise AssertionError(f"no answer to {MOST_CALLS} calls")
