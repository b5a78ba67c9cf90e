"""Every promise of the protocol under any schedule of producers, workers, clients, deaths, lost
replies and clock jumps: the real scripts on a real Redis against :mod:`tests.broker.protocol`.

``LLORCH_FULL_SIZE=1`` tries thousands of schedules.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import count
from typing import Any, ClassVar
from unittest.mock import patch
from uuid import uuid4

import pytest
import redis
from celery import Celery
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from llorch_worker.broker import (
    claims,
    dead_letters,
    keys,
    queues,
    scripts,
    unheard_claims,
    worker_queues,
)
from llorch_worker.broker.enqueue import LONGEST_WAIT_S, enqueue
from llorch_worker.broker.producer import producer_app
from llorch_worker.broker.queues import Route, route
from llorch_worker.broker.results import revoked_document, terminal_event
from llorch_worker.broker.scripts import run_script
from llorch_worker.contract import (
    Cancelled,
    CancelledEvent,
    GenerationRequest,
    InternalError,
    encode_event,
)
from tests.broker.jobs import announce, card
from tests.broker.protocol import HALVINGS, REGISTRY, TERMS, Job, Process, Run, Snapshot, check
from tests.broker.test_results import RESULT
from tests.messages import GOOD_BODY, envelope
from tests.services import RedisServer

FULL_SIZE = bool(os.environ.get("LLORCH_FULL_SIZE"))
EXAMPLES, STEPS = (int(os.environ.get("EXAMPLES", 5_000)), 60) if FULL_SIZE else (60, 40)
MOST_JOBS = 8
HOUR_MS = 3_600_000
WORKERS = ("w0@h", "w1@h", "w2@h")
OWN_QUEUE = queues.worker_queue("toy", WORKERS[0])
LISTS = [
    *(Route("llorch.toy", step).list_key for step in (None, 3, 7, 9)), "llorch.toy:high",
    OWN_QUEUE, Route(f"{OWN_QUEUE}:high", 5).list_key,
]  # fmt: skip
SHIFT = """
for _, key in ipairs(KEYS) do
  for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
    redis.call('ZINCRBY', key, ARGV[1], member)
  end
end
"""
LAST_EVENTS = {
    "SUCCESS": encode_event(terminal_event(RESULT)),
    "FAILURE": encode_event(terminal_event(InternalError("it failed"))),
    "REVOKED": encode_event(terminal_event(Cancelled("it was cancelled"))),
}

anything = st.integers(0, 7)
workers = st.integers(0, len(WORKERS) - 1)


class Protocol(RuleBasedStateMachine):
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

    def run_of(self, worker: int, which: int) -> tuple[Process, Run, Job] | None:
        process = self.processes[worker]
        if not process.runs:
            return None
        run = process.runs[which % len(process.runs)]
        return process, run, self.jobs[run.claim.job_id]

    # Producers and clients --------------------------------------------------------------------

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
        to=st.sampled_from([None, WORKERS[0]]),
        key=st.sampled_from([None, "k"]),
        twice=st.booleans(),
    )
    def submit(self, priority: Any, to: str | None, key: str | None, twice: bool) -> None:
        """Our client sends a job, and sends it again if the reply is lost."""
        request = GenerationRequest(prompt="x", priority=priority, idempotency_key=key)
        full_key = key and keys.idempotency("toy", key)
        owner = next((job for job in self.jobs.values() if job.key == full_key and job.keyed), None)
        job_id = f"j{next(self.numbers)}"
        for _ in range(1 + twice):
            found = enqueue(self.store, self.app, request, model=card(), job_id=job_id, worker=to)
        if found == job_id:
            assert full_key is None or owner is None or owner.forgotten, "two jobs have one key"
            if owner is not None and full_key is not None:
                owner.keyed = False
            message = self.store.lindex(route("toy", priority, to).list_key, 0) or ""
            self.accept(Job(job_id, str(message), key=full_key, keyed=key is not None))
        else:
            assert found in self.jobs
            assert owner is None or owner.forgotten or found == owner.id

    @precondition(lambda self: self.jobs)
    @rule(which=anything, twice=st.booleans())
    def cancel(self, which: int, twice: bool) -> None:
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
        document = revoked_document(job.id)
        for _ in range(1 + twice):
            outcome = run_script(
                self.store,
                "cancel",
                [job.id, document, encode_event(CancelledEvent()), TERMS.result_ttl_s,
                 TERMS.stream_ttl_s, LONGEST_WAIT_S],
            )  # fmt: skip
            assert outcome == expected
        if expected == "queued":
            self.note_end(job, document, owed=True)

    @rule(which=anything, twice=st.booleans())
    def retry(self, which: int, twice: bool) -> None:
        letters = list(dead_letters.letters(self.store))
        if not letters:
            return
        letter, call = letters[which % len(letters)], uuid4().hex
        job = self.jobs[letter.id]
        for _ in range(1 + twice):
            outcome = run_script(self.store, "retry", [letter.raw, call])
        under_way = self.seen.state(job.id) in ("claimed", "queued", "scheduled")
        assert outcome == "under way" if under_way else outcome in ("retried", "ended")
        if outcome == "retried":
            if job.end is not None:
                self.ends_owed.discard((job.id, job.end))
            if job.forgotten:
                job.keyed = False
            job.forgotten, job.end = False, None
            job.deaths, job.streak, job.progress = 0, 0, False

    @rule(which=anything)
    def drop(self, which: int) -> None:
        letters = list(dead_letters.letters(self.store))
        if letters:
            dead_letters.drop(self.store, letters[which % len(letters)])

    @precondition(lambda self: self.jobs)
    @rule(which=anything, stream_too=st.booleans())
    def expire(self, which: int, stream_too: bool) -> None:
        """An end of long ago is forgotten; perhaps its stream is kept for longer."""
        job = self.job(which)
        owed = job.id in self.seen.follow_ups
        if job.end is None or self.seen.waiting[job.id] or owed:
            return
        self.store.delete(keys.job(job.id), keys.result(job.id), keys.cancel(job.id))
        if job.keyed and job.key:
            self.store.delete(job.key)
        if stream_too:
            self.store.delete(keys.events(job.id))
            job.tokens = 0
        job.forgotten, job.end, job.keyed = True, None, False

    # Workers -----------------------------------------------------------------------------------

    @rule(worker=workers, limit=st.integers(1, 6), unheard=st.sampled_from([False, False, True]))
    def claim(self, worker: int, limit: int, unheard: bool) -> None:
        self.claim_as(self.processes[worker], limit, unheard=unheard)

    def claim_as(self, process: Process, limit: int, *, unheard: bool = False) -> list[Run]:
        taken: list[claims.Claim] = []
        lists = queues.lists(queues.queues("toy", process.name))
        with (
            patch.object(unheard_claims, "HELD_CLAIMS", process.held),
            suppress(redis.ConnectionError),
            process.unheard.around_claim(self.store, process.name),
        ):
            taken = claims.claim(
                self.store,
                lists=lists,
                model="toy",
                held=process.held.all(),
                limit=limit,
                worker=process.name,
                terms=TERMS,
            ).claims
            if unheard:
                raise redis.ConnectionError
        seen = self.look()
        for claim in taken:
            job = self.jobs[claim.job_id]
            assert claim.fence > job.fence, "fences grow"
            assert job.end is None
            assert job.deaths < TERMS.max_deaths
            assert job.streak < TERMS.max_attempts + HALVINGS
            job.fence, job.process, job.suspect = claim.fence, process, claim.suspect
            job.forgotten = False
            assert seen.is_suspect(job.id) == claim.suspect, "a worker knows its suspects"
        for job in self.jobs.values():
            if job.end is None and not job.forgotten and seen.state(job.id) == "ended":
                assert job.deaths >= TERMS.max_deaths or (
                    job.streak >= TERMS.max_attempts and job.alone
                ), f"{job.id} ended after {job.streak} deaths without progress, {job.deaths} in all"
                self.note_end(job, seen.end(job.id), owed=True)
        if len(taken) < limit:
            assert not any(seen.lists.get(name) for name in lists), "a worker with room is idle"
            suspect = any(claim.suspect for claim in (*taken, *process.held.all()))
            assert suspect or not seen.lists.get(queues.suspects("toy"))
        if unheard:
            return []
        runs = [Run(claim) for claim in taken]
        for run in runs:
            process.held.add(run.claim)
        process.runs += runs
        return runs

    @rule(worker=workers, told=st.booleans())
    def renew(self, worker: int, told: bool) -> None:
        process = self.processes[worker]
        held = process.held.all()
        lost = claims.renew(self.store, held, lease_ms=TERMS.lease_ms)
        assert set(lost) == {claim for claim in held if not self.seen.holds(claim)}
        for run in [run for run in process.runs if told and run.claim in lost]:
            process.forget(run)

    def entries(self, run: Run, tokens: int) -> list[str]:
        """Events of a run that are not known to be in the stream, ``tokens`` new ones included."""
        if not run.next_entry:
            page = self.store.xrevrange(keys.events(run.claim.job_id), count=1)
            last = int(page[0][0].partition("-")[0]) if page else 0
            run.next_entry = max(last + 1, run.claim.fence)
            run.tokens = self.jobs[run.claim.job_id].tokens
        first = run.tokens + run.unconfirmed_tokens
        if tokens:
            ids = list(range(first, first + tokens))
            event = {"type": "tokens", "index": first, "ids": ids, "text": "x"}
            run.unconfirmed.append(json.dumps(event))
            run.unconfirmed_tokens += tokens
        return run.unconfirmed

    @rule(worker=workers, which=anything, tokens=st.integers(1, 3), lost=st.booleans())
    def append(self, worker: int, which: int, tokens: int, lost: bool) -> None:
        if found := self.run_of(worker, which):
            _, run, job = found
            self.append_to(run, job, tokens, lost=lost)

    def append_to(self, run: Run, job: Job, tokens: int, *, lost: bool = False) -> None:
        # What was sent before is sent again as it was.
        events = self.entries(run, 0 if run.unconfirmed else tokens)
        written = run_script(
            self.store, "append", [job.id, run.claim.fence, run.next_entry, 1, *events]
        )
        assert bool(written) == self.seen.holds(run.claim), "a lost claim writes nothing"
        if written:
            job.tokens, job.progress = run.tokens + run.unconfirmed_tokens, True
            if not lost:
                run.next_entry += len(events)
                run.tokens, run.unconfirmed_tokens = job.tokens, 0
                run.unconfirmed = []

    @rule(
        worker=workers,
        which=anything,
        status=st.sampled_from(["SUCCESS", "FAILURE", "REVOKED"]),
        tokens=st.integers(0, 2),
        then=st.sampled_from(["all done", "all done", "no reply", "dies", "late"]),
    )
    def finish(self, worker: int, which: int, status: str, tokens: int, then: str) -> None:
        if found := self.run_of(worker, which):
            self.finish_as(*found, status, tokens, then)

    def finish_as(
        self, process: Process, run: Run, job: Job, status: str, tokens: int, then: str
    ) -> None:
        events = self.entries(run, tokens)
        document = json.dumps({"status": status, "result": uuid4().hex, "task_id": job.id})
        stored = run_script(
            self.store,
            "finish",
            [job.id, run.claim.fence, document, TERMS.result_ttl_s, LAST_EVENTS[status],
             TERMS.stream_ttl_s, TERMS.lease_ms if job.part else "", run.next_entry, *events],
        )  # fmt: skip
        holds = self.seen.holds(run.claim)
        record = self.seen.record(job.id)
        again = record.get("state") == "ended" and record.get("fence") == str(run.claim.fence)
        assert bool(stored) == (holds or again)
        if holds:
            job.tokens = run.tokens + run.unconfirmed_tokens
            self.note_end(job, document, owed=job.part)
        if then == "no reply":
            return
        if stored and job.part and job.end is not None:
            self.ends_followed[job.id, job.end] += 1 if then != "dies" and holds else 0
            if not holds:
                pass
            elif then == "all done":
                self.note_followed(job.id, document, run.claim.fence)
            else:
                self.disturbed.add(job.id)
        if then == "dies":
            self.crash_of(process)
        elif then == "late" and stored and job.part and holds:
            process.following.append((job.id, document, run.claim.fence))
        process.forget(run)

    @rule(worker=workers, which=anything)
    def acknowledge(self, worker: int, which: int) -> None:
        """A worker that did not hear that its result is stored ends its claim."""
        if found := self.run_of(worker, which):
            process, run, job = found
            record = self.seen.record(job.id)
            if record.get("state") == "ended" and record.get("fence") == str(run.claim.fence):
                claims.end(self.store, run.claim, TERMS)
                process.forget(run)

    @rule(worker=workers, which=anything, heard=st.booleans())
    def hand_back(self, worker: int, which: int, heard: bool) -> None:
        if found := self.run_of(worker, which):
            process, run, _ = found
            assert claims.hand_back(self.store, run.claim) == self.seen.holds(run.claim)
            if heard:
                process.forget(run)

    @rule(worker=workers, which=anything)
    def lapse(self, worker: int, which: int) -> None:
        if found := self.run_of(worker, which):
            process, run, _ = found
            claims.lapse(self.store, run.claim)
            process.forget(run)

    @rule(worker=workers, which=anything)
    def refuse(self, worker: int, which: int) -> None:
        if found := self.run_of(worker, which):
            process, run, job = found
            holds = self.seen.holds(run.claim)
            dead_letters.refuse(self.store, run.claim, "why", InternalError("no"), TERMS)
            if holds:
                self.note_end(job, self.look().end(job.id), owed=False)
            process.forget(run)

    @rule(worker=workers, which=anything)
    def reserve(self, worker: int, which: int) -> None:
        """A worker reserves the idempotency key of its job, which a stock producer sent."""
        if not (found := self.run_of(worker, which)) or not found[2].key:
            return
        process, run, job = found
        assert job.key is not None
        owner = run_script(self.store, "reserve_key", [job.id, TERMS.result_ttl_s], [job.key])
        first = next((it for it in self.jobs.values() if it.key == job.key and it.keyed), job)
        assert owner == first.id, "two jobs have one key"
        if owner == job.id:
            job.keyed = True
        else:
            self.look()
            self.finish_as(process, run, job, "FAILURE", 0, "all done")

    @rule(worker=workers)
    def crash(self, worker: int) -> None:
        self.crash_of(self.processes[worker])

    def crash_of(self, process: Process) -> None:
        """The process dies; another begins under its name."""
        self.disturbed |= {job_id for job_id, *_ in process.following}
        self.processes[self.processes.index(process)] = Process(process.name)

    @rule(ms=st.sampled_from([30_000, 61_000, 61_000, 2 * HOUR_MS, -HOUR_MS]))
    def jump(self, ms: int) -> None:
        """Time passes, or Redis' clock jumps."""
        self.disturbed |= set(self.seen.follow_ups)
        self.store.eval(SHIFT, 3, keys.LEASES, keys.FOLLOW_UPS, queues.scheduled("toy"), -ms)

    @rule()
    def sweep(self) -> None:
        before = self.look()
        swept = claims.sweep(self.store, lease_ms=TERMS.lease_ms, max_deaths=TERMS.max_deaths)
        lapsed = {it for it, until_ms in before.leases.items() if until_ms <= before.now_ms}
        assert lapsed <= set(swept)
        for job_id in swept:
            job = self.jobs[job_id]
            job.deaths += 1
            job.streak = 0 if job.progress else job.streak + 1
            job.alone = not any(
                other.suspect
                and other.process is job.process
                and before.state(other.id) == "claimed"
                and before.record(other.id)["progress"] == "0"
                for other in self.jobs.values()
                if other is not job
            )
        for job_id in swept:
            self.jobs[job_id].progress = False
        now = self.look()
        assert all(until_ms <= now.now_ms + TERMS.lease_ms for until_ms in now.leases.values())

    @rule()
    def reroute(self) -> None:
        """The worker of a queue has been gone for long."""
        self.store.zadd(keys.WORKER_QUEUES, {OWN_QUEUE: 0})
        worker_queues.reroute(self.store, grace_s=0)

    # What follows an end -----------------------------------------------------------------------

    @rule(worker=workers, late=st.booleans())
    def follow_up(self, worker: int, late: bool) -> None:
        self.follow_up_as(self.processes[worker], late=late)

    def follow_up_as(self, process: Process, *, late: bool = False) -> None:
        taken = run_script(self.store, "follow_up", [TERMS.lease_ms, 10])
        for job_id, message, document, fence in taken:
            assert message, f"nobody can follow up the end of {job_id}"
            self.ends_followed[job_id, document] += 1
            if late:
                process.following.append((job_id, document, int(fence)))
            else:
                self.note_followed(job_id, document, int(fence))

    def note_followed(self, job_id: str, document: str, fence: int) -> None:
        """Celery stores the end again when it follows it up; then no more is to be done."""
        status = json.loads(document)["status"]
        end = [document, TERMS.result_ttl_s, LAST_EVENTS[status], TERMS.stream_ttl_s, ""]
        if not self.jobs[job_id].forgotten:
            assert not run_script(self.store, "finish", [job_id, "", *end])
        run_script(self.store, "followed_up", [job_id, TERMS.result_ttl_s, fence])

    @rule(worker=workers)
    def note_late(self, worker: int) -> None:
        process = self.processes[worker]
        if process.following:
            self.note_followed(*process.following.pop())

    # In the end ------------------------------------------------------------------------------

    def teardown(self) -> None:
        """One healthy worker brings every job to its end."""
        healthy = Process("healthy@h")
        self.processes = [healthy]
        for _ in range(2 * len(self.jobs) + HALVINGS):
            self.jump(2 * HOUR_MS)
            self.sweep()
            self.reroute()
            for run in self.claim_as(healthy, 64):
                job = self.jobs[run.claim.job_id]
                self.append_to(run, job, 1)
                self.finish_as(healthy, run, job, "SUCCESS", 1, "all done")
                self.promises_hold()
            self.follow_up_as(healthy)
            self.promises_hold()
        assert all(job.end or job.forgotten for job in self.jobs.values()), "a job never ends"
        assert not self.seen.waiting
        assert not self.seen.follow_ups
        kept = {key for key, ttl_s in self.seen.ttl_s.items() if ttl_s == -1}
        assert kept <= REGISTRY, "something stays for ever"
        for end in self.ends_owed:
            times = self.ends_followed[end]
            assert times == 1 or (times > 1 and end[0] in self.disturbed), (end, times)


@pytest.mark.timeout(3600 if FULL_SIZE else 180)
def test_every_promise_holds_under_every_schedule(
    redis_server: RedisServer, store: redis.Redis
) -> None:
    for name in ("append", "claim", "finish"):
        scripts.load(store, name)
    Protocol.store = store
    with producer_app(redis_server.url) as app:
        Protocol.app = app
        run_state_machine_as_test(
            Protocol,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                derandomize=not FULL_SIZE,
                database=None,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )
