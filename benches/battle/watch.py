"""Two readers outside the strikes: they write every stream entry and result to the ledger."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import redis

from benches.battle.audit import TERMINAL_STATES
from benches.battle.background import Background
from benches.battle.ledger import Entry, Ledger, Result
from benches.battle.recovery import TERMINAL_EVENTS, read_object
from llorch_worker.broker import keys
from llorch_worker.broker.scripts import database

POLL_INTERVAL_S = 0.04
EPILOGUE_S = 30.0
"""How long a stream is followed after its end. Later entries are found when the battle is over."""
RESULT_PATTERN = keys.result("*")
SET_PATTERN = "__keyspace@*__:" + RESULT_PATTERN


class StreamReader(Background):
    """A thread that follows the streams of all jobs as a client would."""

    def __init__(self, url: str, ledger: Ledger) -> None:
        super().__init__("streams")
        self._redis: Any = redis.Redis.from_url(url, decode_responses=True)
        self._pubsub = self._redis.pubsub()
        self._ledger = ledger
        self._lock = threading.RLock()
        self._last: dict[str, str] = {}
        self._worker: dict[str, str] = {}
        self._ended: dict[str, float] = {}

    def follow(self, job_id: str, *, listens: bool) -> None:
        """Starts to read this job's stream. If it ``listens``, its worker writes more often."""
        with self._lock:
            self._last[job_id] = "0"
            if listens:
                self._pubsub.subscribe(keys.events_channel(database(self._redis), job_id))

    def held_by(self, worker: str) -> dict[str, int]:
        """The jobs that ``worker`` has started and that have neither ended nor been started by
        another worker since, each with its number of entries."""
        with self._lock:
            self.poll()
            return {
                job_id: len(self._ledger.entries[job_id])
                for job_id, holder in self._worker.items()
                if holder == worker and job_id not in self._ended
            }

    def retried(self, job_id: str, retry: Callable[[], bool]) -> bool:
        """Retries a dead letter: its stream loses its end, and goes on under the same number."""
        with self._lock:
            self.poll()
            if not retry():
                return False
            number, _, _ = self._last[job_id].partition("-")
            self._last[job_id] = f"{int(number) - 1}-0"
            self._ended.pop(job_id, None)
            self._ledger.retries[job_id] += 1
            return True

    def poll(self) -> None:
        """Reads new entries."""
        with self._lock:
            live = self._by_key(time.monotonic())
            if not live:
                return
            found = self._redis.xread(live) or ()
            while self._pubsub.subscribed and self._pubsub.get_message():
                pass
            # Not before the read, which takes long on a busy machine: a job would begin too early.
            now_s = time.monotonic()
            for stream, entries in found:
                job_id = stream.split(":")[2]
                for entry_id, fields in entries:
                    self._take(job_id, Entry(entry_id, now_s, fields.get("event", "")))

    def compare(self) -> None:
        """Reads every stream again from its beginning and notes added and removed entries."""
        with self._lock:
            self.poll()
            now_s = time.monotonic()
            for job in self._ledger.jobs:
                known = {entry.id: entry.document for entry in self._ledger.entries[job.id]}
                there = dict(self._redis.xrange(keys.events(job.id)))
                for entry_id, fields in there.items():
                    document = fields.get("event", "")
                    if known.get(entry_id) != document:
                        self._take(job.id, Entry(entry_id, now_s, document))
                for entry_id in known.keys() - there.keys():
                    self._ledger.withdrawn.append((job.id, entry_id))

    def _by_key(self, now_s: float) -> dict[str, str]:
        return {
            keys.events(job_id): last
            for job_id, last in self._last.items()
            if now_s - self._ended.get(job_id, now_s) < EPILOGUE_S
        }

    def _take(self, job_id: str, entry: Entry) -> None:
        self._last[job_id] = entry.id
        self._ledger.entry(job_id, entry)
        event = read_object(entry.document)
        if event.get("type") == "started":
            self._worker[job_id] = str(event.get("worker"))
        elif event.get("type") in TERMINAL_EVENTS:
            self._ended.setdefault(job_id, entry.seen_s)

    def _run(self) -> None:
        while not self._stopping.wait(POLL_INTERVAL_S):
            self.poll()


class ResultWatcher(Background):
    """Records every document that is stored as a result, in order.

    Celery's backend and ours publish a document in the step that stores it. Keyspace notifications
    count the stores, so that one without a publication is noticed.
    """

    def __init__(self, url: str, ledger: Ledger) -> None:
        super().__init__("results")
        self._redis: Any = redis.Redis.from_url(url, decode_responses=True)
        self._ledger = ledger
        self._stores: Counter[str] = Counter()
        self._published: Counter[str] = Counter()
        self._documents: dict[str, str] = {}
        self._ended: set[str] = set()
        self._pubsub = self._redis.pubsub(ignore_subscribe_messages=True)

    def start(self) -> None:
        self._redis.config_set("notify-keyspace-events", "K$")
        self._pubsub.psubscribe(RESULT_PATTERN, SET_PATTERN)
        super().start()

    def stop(self) -> None:
        super().stop()
        self._pubsub.close()

    @property
    def ended_count(self) -> int:
        """The number of jobs whose latest document is terminal."""
        return len(self._ended)

    def compare(self) -> list[str]:
        """Reads every result again; returns the jobs whose result changed without a publication."""
        silent = [
            job
            for job, count in self._stores.items()
            if (unheard := count - self._published[job]) > 0
            # One script stores a state over a revoke and puts the revoke back, which nobody sees.
            and not (unheard % 2 == 0 and '"status": "REVOKED"' in self._documents.get(job, ""))
        ]
        for job in self._ledger.jobs:
            document = self._redis.get(keys.result(job.id))
            if document is not None and document != self._documents.get(job.id):
                silent.append(job.id)
                self._ledger.result(job.id, Result(time.monotonic(), str(document)))
        return sorted(set(silent))

    def _run(self) -> None:
        while not self._stopping.is_set():
            message = self._pubsub.get_message(timeout=0.2)
            if message is not None:
                self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        job_id = str(message["channel"]).partition(keys.result(""))[2]
        if message["pattern"] == SET_PATTERN:
            self._stores[job_id] += message["data"] == "set"
            return
        self._published[job_id] += 1
        self._documents[job_id] = str(message["data"])
        if read_object(str(message["data"])).get("status") in TERMINAL_STATES:
            self._ended.add(job_id)
        else:
            self._ended.discard(job_id)
        self._ledger.result(job_id, Result(time.monotonic(), str(message["data"])))
