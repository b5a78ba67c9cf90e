"""What users and operators do while jobs run: cancels, control commands, and dead letters."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections import Counter
from functools import partial
from typing import Any

from celery import Celery
from redis import Redis

from benches.battle import other_app
from benches.battle.background import Background
from benches.battle.fleet import MODEL, QUEUE
from benches.battle.ledger import POISON, Ledger, Reply
from benches.battle.schedule import CLIENT, ELSEWHERE, TERMINATE, Cancel
from benches.battle.watch import StreamReader
from llorch_worker.broker.jobs import dead_letters
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from llorch_worker.settings import Settings

TICK_S = 0.05
REPLY_TIMEOUT_S = 1.0
SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 1.5, 4.0
MOST_RETRIES = 2
RATE_LIMIT = "10/s"
COMMANDS: dict[str, dict[str, Any]] = {
    "ping": {},
    "active": {},
    "rate_limit": {"task_name": TASK_NAME, "rate_limit": RATE_LIMIT},
    "cancel_consumer": {"queue": QUEUE},
    "add_consumer": {"queue": QUEUE},
    "pool_grow": {"n": 1},
}
REFUSED = ("pool_grow",)
REMEDIES: dict[str, dict[str, Any]] = {
    "rate_limit": {"task_name": TASK_NAME, "rate_limit": "0"},
    "add_consumer": {"queue": QUEUE},
}
OUR_WORKERS: dict[str, Any] = {"pattern": "w*@test", "matcher": "glob"}
STOCK_WORKER = f"{other_app.NAME}@test"


class Meddler(Background):
    """A thread that cancels the jobs given to it, sends a command every few seconds and lifts it,
    and retries or drops the dead letters of poison jobs."""

    def __init__(self, url: str, seed: int, ledger: Ledger, reader: StreamReader) -> None:
        super().__init__("meddler")
        self._dice = random.Random(f"meddler {seed}")
        self._app = Celery("operator", broker=url, set_as_current=False)
        self._client = Client(Settings(redis_url=url, model_name=MODEL), model=MODEL)
        self._ledger = ledger
        self._reader = reader
        self._cancels: list[tuple[float, str, str]] = []
        self._retries: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._calm = threading.Event()

    def calm(self) -> None:
        """From now on it only lifts what commands did, beside cancels and letters."""
        self._calm.set()

    def stop(self) -> None:
        try:
            super().stop()
        finally:
            self._app.close()
            self._client.close()

    def cancel(self, job_id: str, cancel: Cancel) -> None:
        """Cancels a job that was just sent when its time comes."""
        with self._lock:
            due = (time.monotonic() + cancel.after_s, job_id, cancel.how)
            heapq.heappush(self._cancels, due)

    def _run(self) -> None:
        command_s = time.monotonic()
        while not self._stopping.wait(TICK_S):
            self._cancel_due()
            if time.monotonic() < command_s:
                continue
            self._settle_letters()
            if self._calm.is_set():
                self._remedy()
            else:
                self._command()
            pause_s = self._dice.uniform(SHORTEST_PAUSE_S, LONGEST_PAUSE_S)
            command_s = time.monotonic() + pause_s

    def _cancel_due(self) -> None:
        with self._lock:
            due = []
            while self._cancels and self._cancels[0][0] <= time.monotonic():
                due.append(heapq.heappop(self._cancels))
        for _, job_id, how in due:
            if how == CLIENT:
                self._client.job(job_id).cancel()
            elif how == ELSEWHERE:
                self._app.control.revoke(job_id, destination=[STOCK_WORKER])
            else:
                # Not to both: a stock worker looks and then stores, in two steps.
                self._app.control.revoke(job_id, terminate=how == TERMINATE, **OUR_WORKERS)

    def _command(self) -> None:
        """One command, to one worker or to all, once the last one is lifted."""
        self._remedy()
        name = self._dice.choice(tuple(COMMANDS))
        workers = [hostname for reply in self._broadcast("ping", {}) for hostname in reply]
        if workers:
            to = [self._dice.choice(workers)] if self._dice.random() < 0.5 else None
            self._broadcast(name, COMMANDS[name], to)

    def _remedy(self) -> None:
        for name, arguments in REMEDIES.items():
            self._app.control.broadcast(name, arguments, **OUR_WORKERS)

    def _broadcast(
        self, name: str, arguments: dict[str, Any], to: list[str] | None = None
    ) -> list[dict[str, Any]]:
        replies: list[dict[str, Any]] = (
            self._app.control.broadcast(
                name,
                arguments,
                reply=True,
                timeout=REPLY_TIMEOUT_S,
                **({"destination": to} if to else OUR_WORKERS),
            )
            or []
        )
        for reply in replies:
            for answer in reply.values():
                self._ledger.replies.append(Reply(name, name in REFUSED, answer))
        return replies

    def _retry(self, letter: dead_letters.DeadLetter) -> bool:
        return dead_letters.retry(self._client.redis, letter) == "retried"

    def _settle_letters(self) -> None:
        poison = {job.id for job in self._ledger.jobs if job.kind == POISON}
        client: Redis = self._client.redis
        for letter in dead_letters.letters(client):
            if letter.id not in poison:
                continue
            if self._retries[letter.id] < MOST_RETRIES and self._dice.random() < 0.5:
                self._retries[letter.id] += 1
                self._reader.retried(letter.id, partial(self._retry, letter))
            else:
                dead_letters.drop(client, letter)
