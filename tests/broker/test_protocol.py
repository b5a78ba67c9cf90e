"""Every promise of the protocol under any schedule of producers, workers, clients, deaths, lost
replies and clock jumps: the real scripts on a real Redis against :mod:`tests.broker.protocol`.

``LLORCH_FULL_SIZE=1`` tries thousands of schedules.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from functools import partial

import pytest
import redis
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

from llorch_worker.broker import keys, scripts
from llorch_worker.broker.celery.producer import producer_app
from llorch_worker.broker.jobs import claims, follow_ups
from llorch_worker.broker.scripts import run_script
from tests.broker.protocol import REGISTRY, TERMS, Process
from tests.broker.protocol_users import PLACES
from tests.broker.protocol_workers import LAST_EVENTS, Workers, workers
from tests.broker.steps import DAYS_S, announce, note_seen
from tests.services import RedisServer

FULL_SIZE = bool(os.environ.get("LLORCH_FULL_SIZE"))
EXAMPLES, STEPS = (5_000, 60) if FULL_SIZE else (100, 50)
HOUR_MS = 3_600_000
SHIFT = """
for _, key in ipairs(KEYS) do
  for _, member in ipairs(redis.call('ZRANGE', key, 0, -1)) do
    redis.call('ZINCRBY', key, ARGV[1], member)
  end
end
"""


class Protocol(Workers):
    """Time, deaths, and what follows."""

    @rule(ms=st.sampled_from([30_000, 61_000, 61_000, 2 * HOUR_MS, -HOUR_MS]))
    def jump(self, ms: int) -> None:
        """Time passes, or Redis' clock jumps."""
        self.disturbed |= set(self.seen.follow_ups)
        self.store.eval(SHIFT, 3, keys.LEASES, keys.FOLLOW_UPS, keys.scheduled("toy"), -ms)

    @precondition(lambda self: self.seen.leases)
    @rule(worker=workers)
    def die(self, worker: int) -> None:
        """A process dies, and the others go on until it is found dead."""
        self.crash(worker)
        self.jump(TERMS.lease_ms + 1000)
        for process in self.processes:
            claims.renew(self.store, process.held.all(), lease_ms=TERMS.lease_ms)
        self.sweep()

    @precondition(lambda self: self.seen.leases)
    @rule(restored=st.booleans())
    def lose(self, restored: bool) -> None:
        """Redis comes back without its data. Workers put back what they run, or are gone, too."""
        before = self.look()
        self.store.flushall()
        announce(self.store)
        self.ends_owed.clear()
        for job in self.jobs.values():
            job.forgotten, job.lost = True, job.end is None
            job.end, job.keyed, job.cancelled, job.tokens = None, False, False, 0
        for process in self.processes:
            for run in process.runs:
                job = self.jobs[run.claim.job_id]
                if restored and before.holds(run.claim):
                    assert claims.restore(self.store, run.claim)
                    job.forgotten, job.lost = False, False
                    job.deaths, job.strikes, job.progress = 0, None, False

    @precondition(lambda self: self.seen.leases)
    @rule()
    def sweep(self) -> None:
        before = self.look()
        swept = claims.sweep(self.store, lease_ms=TERMS.lease_ms)
        lapsed = {it for it, until_ms in before.leases.items() if until_ms <= before.now_ms}
        assert lapsed <= set(swept)
        for job_id in swept:
            job = self.jobs[job_id]
            job.deaths += 1
            job.strikes = None if job.progress else job.strikes
            job.progress = False
        now = self.look()
        assert all(until_ms <= now.now_ms + TERMS.lease_ms for until_ms in now.leases.values())

    @rule()
    def leave_for_long(self) -> None:
        """The workers have been gone for long, as far as others know."""
        note_seen(self.store, *PLACES, ago_s=DAYS_S)

    # What follows an end -----------------------------------------------------------------------

    @precondition(lambda self: self.seen.follow_ups)
    @rule(worker=workers, late=st.booleans())
    def follow_up(self, worker: int, late: bool) -> None:
        self.follow_up_as(self.processes[worker], late=late)

    def follow_up_as(self, process: Process, *, late: bool = False) -> None:
        taken = follow_ups.take(self.store, TERMS.lease_ms / 1e3)
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
        follow_ups.note_done(self.store, job_id, TERMS.result_ttl_s, fence)

    @precondition(lambda self: any(process.following for process in self.processes))
    @rule(worker=workers)
    def note_late(self, worker: int) -> None:
        process = self.processes[worker]
        if process.following:
            self.note_followed(*process.following.pop())

    # In the end ------------------------------------------------------------------------------

    def teardown(self) -> None:
        """One healthy worker brings every job to its end."""
        healthy = Process("healthy@h", "c")
        self.processes = [healthy]
        for _ in range(2 * len(self.jobs)):
            self.jump(2 * HOUR_MS)
            self.sweep()
            self.leave_for_long()
            self.watch()
            for run in self.claim_as(healthy, 64):
                job = self.jobs[run.claim.job_id]
                self.append_to(healthy, run, job, 1)
                self.finish_as(healthy, run, job, "SUCCESS", 1, "all done")
            self.follow_up_as(healthy)
            self.promises_hold()
            seen = self.seen
            if not (seen.inbox or seen.waiting or seen.scheduled or seen.leases or seen.follow_ups):
                break
        assert all(job.end or job.forgotten for job in self.jobs.values()), "a job never ends"
        assert not self.seen.waiting
        assert not self.seen.follow_ups
        assert not self.store.keys(keys.message("*"))
        kept = {key for key, ttl_s in self.seen.ttl_s.items() if ttl_s == -1}
        assert kept <= REGISTRY, "something stays for ever"
        for end in self.ends_owed:
            times = self.ends_followed[end]
            assert times == 1 or (times > 1 and end[0] in self.disturbed), (end, times)


@pytest.fixture
def protocol(redis_server: RedisServer, store: redis.Redis) -> Iterator[type[Protocol]]:
    for name in ("append", "claim", "finish"):
        scripts.load(store, name)
    Protocol.store = store
    with producer_app(redis_server.url) as app:
        Protocol.app = app
        yield Protocol


@pytest.mark.timeout(3600 if FULL_SIZE else 600)
def test_every_promise_holds_under_every_schedule(
    protocol: type[Protocol], store: redis.Redis
) -> None:
    # Outside full size each run tries the same schedules, and others with each version of Redis.
    major = int(store.info("server")["redis_version"].partition(".")[0])
    run_state_machine_as_test(
        protocol if FULL_SIZE else seed(major)(protocol),
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def follow(machine: Protocol, *rules: Callable[[], object]) -> None:
    """Runs one schedule."""
    for act in rules:
        act()
        machine.promises_hold()
    machine.teardown()


def test_a_key_that_a_lost_claim_reserved_for_a_forgotten_job_is_free(
    protocol: type[Protocol],
) -> None:
    it = protocol()
    push = partial(it.push, place="llorch.toy", due_in_h=None, twice=False, key="k", part=False)
    claim = partial(it.claim, limit=1, unheard=False)
    follow(
        it,
        push,
        partial(claim, worker=0),
        partial(it.jump, ms=61_000),
        it.sweep,
        partial(claim, worker=1),
        partial(it.finish, which=1, status="SUCCESS", tokens=1, then="all done"),
        partial(it.expire, which=0, stream_too=True),
        partial(it.reserve, which=0),
        push,
        partial(claim, worker=1),
        partial(it.reserve, which=1),
    )
