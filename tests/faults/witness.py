"""Observes every stream entry and every result as it appears, independently of the broker."""

from __future__ import annotations

import json
import threading
import time
from typing import Any, Self

import redis

from benches.battle.audit import SUCCESS, TERMINAL_STATES, judge_results, judge_stream
from benches.battle.ledger import Entry, Ledger, Result
from benches.battle.ledger import Job as Promise
from llorch_worker.broker import keys
from llorch_worker.client import Client, Job
from tests.services import wait_until
from tests.store import entries_of, record_of

POLL_INTERVAL_S = 0.01
END_TIMEOUT_S = 120.0


class Witness:
    """Sends jobs and records their output, on its own connection that no fault affects.

    The ledger keeps what the witness has seen, so it notices a token that is written and removed,
    or a result that is replaced. A witness outlives a restart of Redis.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._redis: Any = redis.Redis.from_url(client.settings.redis_url, decode_responses=True)
        self._ledger = Ledger()
        self._promises: dict[str, Promise] = {}
        self._last: dict[str, str] = {}
        self._lock = threading.RLock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="witness", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._redis.close()

    def send(self, tokens: int, prompt: str = "x", **fields: Any) -> Job:
        """Sends a job of ``tokens`` tokens with ids that no other job has."""
        seed = len(self._promises) + 1
        job = self._client.submit(prompt=prompt, max_tokens=tokens, seed=seed, **fields)
        with self._lock:
            promise = Promise(job.id, seed, tokens, time.monotonic())
            self._promises[job.id] = promise
            self._ledger.jobs.append(promise)
            self._last[job.id] = "0"
        return job

    def events(self, job: Job) -> list[dict[str, Any]]:
        """The events that a reader of the job's stream has seen so far."""
        return [json.loads(entry.document) for entry in self._ledger.entries[job.id]]

    def tokens(self, job: Job) -> int:
        """The number of tokens that a reader has seen so far."""
        return sum(len(event["ids"]) for event in self.events(job) if event["type"] == "tokens")

    def runs(self, job: Job) -> list[str]:
        """The hostnames of the workers that began the job, in order."""
        return [event["worker"] for event in self.events(job) if event["type"] == "started"]

    def begun(self, job: Job, tokens: int = 1) -> Job:
        """Waits until the stream of ``job`` has at least ``tokens`` tokens."""
        wait_until(lambda: self.tokens(job) >= tokens, what=f"{tokens} tokens of {job.id}")
        return job

    def ended(self, job: Job) -> bool:
        found = self._ledger.results[job.id]
        return any(json.loads(one.document)["status"] in TERMINAL_STATES for one in found)

    def _saw_end(self, job: Job) -> bool:
        # The whole stream of a short job arrives with its result, and may be read after it.
        return any(event["type"] == "finished" for event in self.events(job)[-1:])

    def record(self, job: Job) -> dict[str, str]:
        """The broker's record of the job."""
        return record_of(self._redis, job.id)

    def assert_whole(self, *jobs: Job, timeout_s: float = END_TIMEOUT_S) -> None:
        """Waits until each job has succeeded once; every token was seen once and in order."""
        for job in jobs:
            wait_until(lambda job=job: self.ended(job), timeout_s=timeout_s, what=f"end of {job}")
            wait_until(lambda job=job: self._saw_end(job), what=f"the last event of {job}")
        self._compare()
        for job in jobs:
            promise = self._promises[job.id]
            stream = judge_stream(promise, self._ledger.entries[job.id])
            assert stream.faultless, (job, stream, self.events(job))
            results = self._ledger.results[job.id]
            verdict = judge_results(promise, results)
            assert verdict.status == SUCCESS, (job, results)
            assert verdict.tokens_right, (job, results)
            assert not verdict.changed, (job, results)
        assert not self._ledger.withdrawn, "entries that were seen are gone"

    def _run(self) -> None:
        while not self._stop.wait(POLL_INTERVAL_S):
            try:
                self._poll()
            except redis.RedisError:
                # Redis restarts, and keeps its data.
                continue

    def _poll(self) -> None:
        with self._lock:
            if not self._last:
                return
            ids = list(self._last)
            streams = {keys.events(job_id): last for job_id, last in self._last.items()}
            replies = self._redis.xread(streams)
            documents = self._redis.mget([keys.result(job_id) for job_id in ids])
            now_s = time.monotonic()
            for stream, entries in replies or ():
                job_id = stream.split(":")[2]
                for entry_id, fields in entries:
                    self._last[job_id] = entry_id
                    self._ledger.entry(job_id, Entry(entry_id, now_s, fields["event"]))
            for job_id, document in zip(ids, documents, strict=True):
                if document is not None:
                    self._ledger.result(job_id, Result(now_s, document))

    def _compare(self) -> None:
        """Reads every stream again and notes entries that are gone."""
        with self._lock:
            self._poll()
            for job_id in self._promises:
                there = dict(entries_of(self._redis, job_id))
                for entry in self._ledger.entries[job_id]:
                    if there.get(entry.id) != entry.document:
                        self._ledger.withdrawn.append((job_id, entry.id))
