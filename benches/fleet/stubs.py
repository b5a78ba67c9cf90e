"""Workers without an engine, many in one process, with the package's claims, wake-ups and watchers.

    python -m benches.fleet.stubs REDIS_URL FIRST_NUMBER WORKERS SLOTS SERVICE_S

A stub looks, waits for a wake-up and ends jobs like a worker, with the same scripts. What it leaves
out is a job's way through Celery and the engine. It prints a line once all stubs have looked, and
at the end of its input a JSON document: which stub claimed which job, and when, by Redis' clock.
"""

from __future__ import annotations

import json
import random
import sched
import selectors
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from llorch_worker.broker import keys, queues
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest, ClaimTerms
from llorch_worker.broker.jobs.results import SUCCESS, result_meta
from llorch_worker.broker.scripts import run_script
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.broker.waiting.wake_ups import WakeUps
from llorch_worker.contract import Finished, Started, Timings, Tokens, Usage, encode_event
from llorch_worker.settings import Settings
from llorch_worker.worker.claimer import JITTER, WAIT_S
from llorch_worker.worker.inbox_watcher import InboxWatcher

MODEL = "toy"
TERMS = ClaimTerms(
    lease_ms=5_000, max_attempts=5, max_deaths=20, result_ttl_s=600, stream_ttl_s=600
)
RENEW_S = TERMS.lease_ms / 4e3
TIMINGS = Timings(queue_ms=1, prefill_ms=1, first_token_ms=1, decode_ms=1)
USAGE = Usage(prompt=1, cached=0, completion=1)


class Loop:
    """Sockets and timers of one thread."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()
        self._timers = sched.scheduler()

    def later(self, after_s: float, act: Callable[[], None]) -> None:
        self._timers.enter(after_s, 0, act)

    def run_once(self) -> None:
        due_s = self._timers.run(blocking=False)
        for key, _ in self.selector.select(1.0 if due_s is None else min(due_s, 1.0)):
            key.data()


class Stub:
    """One worker; see the module's docstring."""

    def __init__(self, number: int, slots: int, service_s: float, client: Any, loop: Loop) -> None:
        self.watcher = InboxWatcher(client, MODEL, Settings())
        self.name = f"stub{number}@bench"
        self.claimed: list[tuple[str, int]] = []
        self.held: dict[str, Claim] = {}
        self._slots, self._service_s = slots, service_s
        self._client, self._loop = client, loop
        self._consumed = queues.queues(MODEL)
        self._place = queues.place_of(MODEL, self.name)
        self._wake_keys = [keys.wake(name) for name in (*self._consumed, self._place)]
        self._wake_ups = WakeUps(client)
        self._wake_ups.wait(self._wake_keys, 1)
        loop.selector.register(self._wake_ups, selectors.EVENT_READ, self._on_wake_up)

    def look(self) -> None:
        """Claims; then waits for a wake-up if there is room."""
        while len(self.held) < self._slots:
            self._leave()
            request = ClaimRequest(
                model=MODEL,
                queues=self._consumed,
                limit=self._slots - len(self.held),
                worker=self.name,
                held=tuple(self.held.values()),
                place="" if self.watcher.alone else self._place,
            )
            taken = claims.claim(self._client, request, TERMS)
            for claim in taken.claims:
                self._begin(claim)
            if len(self.held) < self._slots and taken.look_again_s != 0:
                wait_s = WAIT_S * random.uniform(1 - JITTER, 1 + JITTER)
                self._wake_ups.wait(self._wake_keys, wait_s)
                return

    def _leave(self) -> None:
        if self._wake_ups.leave():
            inbox_watch.look(self._client, MODEL, wakes_anyway=True)

    def _on_wake_up(self) -> None:
        self._wake_ups.read()
        self.look()

    def _begin(self, claim: Claim) -> None:
        self.claimed.append((claim.job_id, claim.fence))
        self.held[claim.tag] = claim
        if self._service_s:
            self._loop.later(self._service_s, lambda: self._end(claim, look=True))
        else:
            self._end(claim)

    def _end(self, claim: Claim, *, look: bool = False) -> None:
        """Stores a result of one token, with its events, as a worker does."""
        started = Started(
            worker=self.name, model=MODEL, attempt=claim.attempt, prompt_tokens=1,
            cached_tokens=0, queue_ms=1,
        )  # fmt: skip
        ended = Finished(finish_reason="length", usage=USAGE, timings=TIMINGS)
        document = json.dumps(result_meta(claim.job_id, SUCCESS, {"text": "x", "id": claim.job_id}))
        tokens = Tokens(index=0, ids=(1,), text="x")
        run_script(
            self._client,
            "finish",
            [claim.job_id, claim.fence, document, TERMS.result_ttl_s, encode_event(ended),
             TERMS.stream_ttl_s, "", "", claim.fence, encode_event(started), encode_event(tokens)],
        )  # fmt: skip
        was_full = len(self.held) == self._slots
        del self.held[claim.tag]
        if look and was_full:
            self.look()


def announce(client: Any, loop: Loop, stub: Stub, slots: int, *, whole: bool = True) -> None:
    """Now, and then from time to time: jobs are placed only with workers that were seen of late."""
    card = WorkerCard(
        hostname=stub.name, pid=1, model=MODEL, max_context=4096, max_sequences=slots,
        device="stub", started_at=0, last_seen=time.time(), engine={},
    )  # fmt: skip
    registry.announce(client, card, whole=whole)
    again_s = registry.ANNOUNCE_INTERVAL_S * random.uniform(0.5, 1)  # so that not all do at once
    loop.later(again_s, partial(announce, client, loop, stub, slots, whole=False))


def main(url: str, first: int, workers: int, slots: int, service_s: float) -> None:
    client, loop = connect(url), Loop()
    stubs = [Stub(first + n, slots, service_s, client, loop) for n in range(workers)]
    for stub in stubs:
        announce(client, loop, stub, slots)
    over = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_end, daemon=True).start()

    def renew() -> None:
        held = [claim for stub in stubs for claim in stub.held.values()]
        claims.renew(client, held, lease_ms=TERMS.lease_ms)
        claims.sweep(client, lease_ms=TERMS.lease_ms)
        loop.later(RENEW_S, renew)

    if service_s:
        renew()
    for stub in stubs:
        stub.watcher.start()
    for stub in stubs:
        stub.look()
    print("ready", flush=True)
    while not over.is_set():
        loop.run_once()
    print(json.dumps({stub.name: stub.claimed for stub in stubs}), flush=True)


if __name__ == "__main__":
    url, first, workers, slots, service_s = sys.argv[1:]
    main(url, int(first), int(workers), int(slots), float(service_s))
