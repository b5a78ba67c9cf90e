"""What producers and clients do to a queue, in any order: see ``test_protocol.py``."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, ClassVar
from uuid import uuid4

import redis
from celery import Celery
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llorch_worker.broker import keys, queues
from llorch_worker.broker.jobs import dead_letters
from llorch_worker.broker.jobs.results import failure_document, revoked_document
from llorch_worker.broker.queues import Route
from llorch_worker.broker.scripts import run_script
from llorch_worker.broker.waiting import waiting
from llorch_worker.broker.waiting.enqueue import LONGEST_WAIT_S, enqueue
from llorch_worker.contract import (
    CancelledEvent,
    DeadlineExceeded,
    Failed,
    GenerationRequest,
    encode_event,
)
from tests.broker.protocol import TERMS, Job, Process, Snapshot, check
from tests.broker.steps import announce, card
from tests.messages import GOOD_BODY, envelope
from tests.store import message_of

MOST_JOBS = 6
WORKERS = ("w0@h", "w1@h")
PLACES = [queues.place_of("toy", worker) for worker in WORKERS]
LISTS = [
    *(Route("llorch.toy", step).list_key for step in (None, 3, 7, 9)), "llorch.toy:high",
    Route("llorch.toy:high", 5).list_key,
]  # fmt: skip

anything = st.integers(0, 7)
has_letters = precondition(lambda self: self.seen.value(keys.DEAD))


class Users(RuleBasedStateMachine):
    """Rules name jobs, runs and letters by a number, and take it modulo how many there are."""

    store: ClassVar[redis.Redis]
    app: ClassVar[Celery]

    def __init__(self) -> None:
        super().__init__()
        self.store.flushall()
        announce(self.store)
        self.numbers = count()
        self.jobs: dict[str, Job] = {}
        self.processes = [Process(name) for name in WORKERS]
        self.ends_followed: Counter[tuple[str, str]] = Counter()
        self.ends_owed: set[tuple[str, str]] = set()
        self.disturbed: set[str] = set()
        """Jobs whose follow-ups may be done twice: a worker died, or the clock jumped."""
        self.look()

    @invariant()
    def promises_hold(self) -> None:
        self.look()
        check(self.jobs, self.processes, self.seen)

    def look(self) -> Snapshot:
        self.seen = Snapshot(self.store)
        return self.seen

    def accept(self, job: Job) -> None:
        self.jobs[job.id] = job

    def note_end(self, job: Job, document: str | None, *, owed: bool) -> None:
        assert document is not None
        assert job.end is None
        job.end = document
        if owed:
            self.ends_owed.add((job.id, document))

    def job(self, which: int) -> Job:
        return list(self.jobs.values())[which % len(self.jobs)]

    @precondition(lambda self: len(self.jobs) < MOST_JOBS)
    @rule(
        place=st.sampled_from(LISTS),
        due_in_h=st.sampled_from([None, None, -1, 1]),
        twice=st.booleans(),
        key=st.sampled_from([None, None, "k"]),
        part=st.booleans(),
    )
    def push(
        self, place: str, due_in_h: int | None, twice: bool, key: str | None, part: bool
    ) -> None:
        """A stock producer sends a job."""
        job_id = f"j{next(self.numbers)}"
        headers: dict[str, Any] = {"id": job_id}
        if due_in_h is not None:
            headers["eta"] = (datetime.now(UTC) + timedelta(hours=due_in_h)).isoformat()
        message = json.dumps(envelope(GOOD_BODY, headers=headers))
        self.store.lpush(place, *[message] * (1 + twice))
        key = key and keys.idempotency("toy", key)
        self.accept(Job(job_id, message, pushed=1 + twice, key=key, part=part))

    @precondition(lambda self: self.jobs)
    @rule(which=anything, place=st.sampled_from(LISTS))
    def push_again(self, which: int, place: str) -> None:
        """A producer that heard no reply sends its message again."""
        job = self.job(which)
        if job.message and not job.forgotten and job.pushed < 3:
            job.pushed += 1
            self.store.lpush(place, job.message)

    @precondition(lambda self: len(self.jobs) < MOST_JOBS)
    @rule(
        priority=st.sampled_from(["high", "normal", "low"]),
        key=st.sampled_from([None, "k"]),
        tenant=st.sampled_from([None, None, "a", "b"]),
        sender=st.sampled_from(["", "alice", "bob"]),
        placed=st.booleans(),
        twice=st.booleans(),
    )
    def submit(
        self,
        priority: Any,
        key: str | None,
        tenant: str | None,
        sender: str,
        placed: bool,
        twice: bool,
    ) -> None:
        """Our client sends a job, and sends it again if the reply is lost."""
        request = GenerationRequest(
            prompt="x", priority=priority, idempotency_key=key, tenant=tenant
        )
        full_key = key and keys.idempotency("toy", key)
        owner = next((job for job in self.jobs.values() if job.key == full_key and job.keyed), None)
        job_id = f"j{next(self.numbers)}"
        places = PLACES if placed else ()
        for _ in range(1 + twice):
            found = enqueue(
                self.store, self.app, request, model=card(), job_id=job_id, places=places,
                owner=sender, digest="one request",
            )  # fmt: skip
        free = owner is None or owner.forgotten or self.seen.may_be_repeated(owner.id)
        if found == job_id:
            assert full_key is None or free, "two jobs have one key"
            if owner is not None and full_key is not None:
                owner.keyed = False
            message = message_of(self.store, job_id)
            keyed = key is not None
            job = Job(job_id, message, key=full_key, keyed=keyed, owner=sender, watched=True)
            self.accept(job)
        else:
            assert found in self.jobs
            assert owner is None or owner.forgotten or (found == owner.id and not free)

    @precondition(lambda self: self.jobs)
    @rule(which=anything, twice=st.booleans(), heard=st.booleans(), overdue=st.booleans())
    def cancel(self, which: int, twice: bool, heard: bool, overdue: bool) -> None:
        """Somebody cancels it, or its deadline passes, which ends it only if it waits."""
        job = self.job(which)
        if job.forgotten:
            return
        state = self.seen.state(job.id)
        lease_ms = self.seen.leases.get(job.id, 0)
        expected = "queued"
        if job.end is not None:
            expected = "ended"
        elif state == "claimed" and lease_ms > self.seen.now_ms + 1000:
            expected = "running"
        elif not (heard or self.seen.record(job.id)):
            expected = "unknown"
        error = DeadlineExceeded("too late")
        document = failure_document(job.id, error) if overdue else revoked_document(job.id)
        event = Failed(error=error.document()) if overdue else CancelledEvent()
        channel = "" if overdue else keys.cancel_channel(0)
        # Our client's jobs are in no chain or chord.
        owed = "sent" not in self.seen.record(job.id)
        inbox = queues.inbox_of("toy") if heard else []
        for _ in range(1 + twice):
            outcome = run_script(
                self.store,
                "cancel",
                [job.id, document, encode_event(event), TERMS.result_ttl_s,
                 TERMS.stream_ttl_s, LONGEST_WAIT_S, int(heard), channel, ""],
                inbox,
            )  # fmt: skip
            assert outcome == expected
        if expected == "running":
            job.cancelled = job.cancelled or not overdue
        elif expected == "queued":
            self.note_end(job, document, owed=owed)

    @precondition(lambda self: self.seen.waiting or self.seen.inbox)
    @rule(queue=st.sampled_from(queues.queues("toy")))
    def purge(self, queue: str) -> None:
        """An operator deletes what waits in a queue; what runs goes on."""
        before = self.look()
        if any(before.inbox[job_id] for job_id in before.waiting):
            # A second message, in the other queue, would begin the job anew, as a stock producer's.
            return
        waiting.purge(self.store, queue)
        now = self.look()
        for job in self.jobs.values():
            took = before.inbox[job.id] and not now.inbox[job.id]
            if job.id in before.waiting.keys() - now.waiting or (took and not now.state(job.id)):
                job.forgotten = job.lost = True
                job.keyed, job.cancelled, job.tokens = False, False, 0
            elif took and job.end is not None and "list" not in now.record(job.id):
                # It was cancelled before its message was here, which says what follows.
                self.ends_owed.discard((job.id, job.end))

    @has_letters
    @rule(which=anything, twice=st.booleans())
    def retry(self, which: int, twice: bool) -> None:
        letters = list(dead_letters.letters(self.store))
        letter, call = letters[which % len(letters)], uuid4().hex
        job = self.jobs[letter.id]
        for _ in range(1 + twice):
            outcome = run_script(self.store, "retry", [letter.raw, call, letter.number])
        under_way = self.seen.state(job.id) in ("claimed", "waiting", "scheduled")
        assert outcome == "under way" if under_way else outcome in ("retried", "ended")
        if outcome == "retried":
            if job.end is not None:
                self.ends_owed.discard((job.id, job.end))
            if job.forgotten:
                job.keyed = False
            job.forgotten, job.lost, job.end = False, False, None
            job.deaths, job.strikes, job.progress = 0, None, False

    @has_letters
    @rule(which=anything)
    def drop(self, which: int) -> None:
        letters = list(dead_letters.letters(self.store))
        dead_letters.drop(self.store, letters[which % len(letters)])

    @precondition(lambda self: any(job.end for job in self.jobs.values()))
    @rule(which=anything, stream_too=st.booleans())
    def expire(self, which: int, stream_too: bool) -> None:
        """An end of long ago is forgotten; perhaps its stream is kept for longer."""
        ended = [job for job in self.jobs.values() if job.end is not None]
        job = ended[which % len(ended)]
        if self.seen.inbox[job.id] or job.id in self.seen.follow_ups:
            return
        self.store.delete(keys.job(job.id), keys.result(job.id), keys.cancel(job.id))
        if job.keyed and job.key:
            self.store.delete(job.key)
        if stream_too:
            self.store.delete(keys.events(job.id))
            job.tokens = 0
        job.forgotten, job.end, job.keyed, job.cancelled = True, None, False, False
