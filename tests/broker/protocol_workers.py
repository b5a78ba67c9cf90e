"""What workers do with claims, valid or lost: see ``test_protocol.py``."""

from __future__ import annotations

import json
from dataclasses import replace
from uuid import uuid4

from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from llorch_worker.broker import queues
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.broker.jobs import claims, dead_letters, journal
from llorch_worker.broker.jobs.results import terminal_event
from llorch_worker.broker.scripts import run_script
from llorch_worker.broker.waiting import inbox_watch  # fmt: skip
from llorch_worker.contract import (
    Cancelled,
    GenerationRequest,
    InternalError,
    Started,
    encode_event,
)
from llorch_worker.worker.other_workers import OtherWorkers
from tests.broker.jobs.test_results import RESULT
from tests.broker.protocol import TERMS, Job, Process, Run
from tests.broker.protocol_users import WORKERS, Users, anything

LAST_EVENTS = {
    "SUCCESS": encode_event(terminal_event(RESULT)),
    "FAILURE": encode_event(terminal_event(InternalError("it failed"))),
    "REVOKED": encode_event(terminal_event(Cancelled("it was cancelled"))),
}

workers = st.integers(0, len(WORKERS) - 1)


of_a_run = precondition(lambda self: any(process.runs for process in self.processes))


class Workers(Users):
    """Rules that act on a claim name it by its number among all claims that are believed in."""

    def run_of(self, which: int) -> tuple[Process, Run, Job]:
        found = [(process, run) for process in self.processes for run in process.runs]
        process, run = found[which % len(found)]
        return process, run, self.jobs[run.claim.job_id]

    @rule(
        worker=workers,
        limit=st.integers(1, 6),
        unheard=st.sampled_from([False, False, True]),
    )
    def claim(self, worker: int, limit: int, unheard: bool) -> None:
        self.claim_as(self.processes[worker], limit, unheard=unheard)

    @rule()
    def watch(self) -> None:
        """A worker that watches the queues moves jobs of other priority steps."""
        inbox_watch.look(self.store, "toy", wakes_anyway=True)

    def claim_as(self, process: Process, limit: int, *, unheard: bool = False) -> list[Run]:
        consumed = queues.queues("toy")
        before = self.look()
        request, lost = process.unheard or (None, [])
        lost_tags = [claim.tag for claim in lost if before.holds(claim)]
        limit = request.limit if request else limit
        request = request or claims.ClaimRequest(
            model="toy",
            queues=consumed,
            limit=limit,
            worker=process.name,
            held=process.held.all(),
            place=queues.place_of("toy", process.name),
            fingerprint=process.model,
            max_context=4096,
        )
        found = claims.claim(self.store, request, TERMS)
        taken, looks_again = found.claims, found.look_again_s == 0
        process.unheard = (replace(request, sent_before=True), taken) if unheard else None
        seen = self.look()
        if lost_tags:
            assert [claim.tag for claim in taken] == lost_tags
        for claim in taken:
            job = self.jobs[claim.job_id]
            assert claim.tag in lost_tags or claim.fence > job.fence, "fences grow"
            assert job.end is None
            assert claim.cancelled == job.cancelled
            assert job.deaths < TERMS.max_deaths
            assert (job.strikes or 0) < TERMS.max_attempts
            job.fence, job.process = claim.fence, process
            job.forgotten = False
            if job.progress:
                # A drain ended the last attempt.
                job.strikes, job.progress = None, False
            last = job.deaths >= TERMS.max_deaths - 1
            assert claim.suspect == (last or job.strikes is not None), job
            assert seen.is_suspect(job.id) == claim.suspect, "a worker knows its suspects"
        for job in self.jobs.values():
            if job.end is None and not job.forgotten and seen.state(job.id) == "ended":
                exhausted = (job.strikes or 0) >= TERMS.max_attempts
                assert exhausted or job.deaths >= TERMS.max_deaths, job
                self.note_end(job, seen.end(job.id), owed=True)
        if not looks_again and len(taken) < limit and len(registry.living(self.store, "toy")) < 2:
            # Otherwise it leaves the others their share.
            assert not seen.inbox
            suspect = any(claim.suspect for claim in (*taken, *process.held.all()))
            for job_id in seen.waiting:
                record = seen.record(job_id)
                unfit = record.get("needs_fingerprint", "") not in ("", process.model)
                last = int(record.get("deaths", 0)) >= TERMS.max_deaths - 1
                is_suspect = last or ("strikes" in record and record["progress"] != "1")
                assert unfit or (suspect and is_suspect), "a worker with room is idle"
        if unheard:
            return []
        runs = [Run(claim) for claim in taken]
        for run in runs:
            process.held.add(run.claim)
        process.runs += runs
        return runs

    @of_a_run
    @rule(worker=workers, told=st.booleans())
    def renew(self, worker: int, told: bool) -> None:
        process = self.processes[worker]
        held = process.held.all()
        lost = claims.renew(self.store, held, lease_ms=TERMS.lease_ms)
        assert set(lost) == {claim for claim in held if not self.seen.holds(claim)}
        for run in [run for run in process.runs if told and run.claim in lost]:
            process.forget(run)

    def begin(self, process: Process, run: Run, job: Job) -> bool:
        """What a worker does before it runs a job; False if it gives the job to another."""
        if run.next_entry:
            return True
        page = journal.read(self.store, job.id)
        run.next_entry, run.tokens = max(page.next_entry, run.claim.fence), job.tokens
        if page.journal and page.journal.fingerprint != process.model:
            others = OtherWorkers(self.store, "toy", process.name, 4096)
            if others.resume(run.claim, GenerationRequest(prompt="x"), page.journal):
                process.forget(run)
                return False
            others.restart(run.claim, page.journal, run.next_entry, "of another model")
            run.next_entry, run.tokens = run.next_entry + 1, 0
            if self.seen.holds(run.claim):
                job.tokens = 0
        return True

    def entries(self, process: Process, run: Run, tokens: int) -> list[str]:
        """Events of a run that are not known to be in the stream, ``tokens`` new ones included."""
        first = run.tokens + run.unconfirmed_tokens
        if tokens:
            if not run.started:
                started = Started(worker=process.name, model="toy", prompt_tokens=1, queue_ms=0,
                                  model_fingerprint=process.model)  # fmt: skip
                run.unconfirmed.append(encode_event(started))
                run.started = True
            ids = list(range(first, first + tokens))
            event = {"type": "tokens", "index": first, "ids": ids, "text": process.model}
            run.unconfirmed.append(json.dumps(event))
            run.unconfirmed_tokens += tokens
        return run.unconfirmed

    @of_a_run
    @rule(which=anything, tokens=st.integers(1, 3), lost=st.booleans())
    def append(self, which: int, tokens: int, lost: bool) -> None:
        self.append_to(*self.run_of(which), tokens, lost=lost)

    def append_to(
        self, process: Process, run: Run, job: Job, tokens: int, *, lost: bool = False
    ) -> None:
        if not self.begin(process, run, job):
            return
        # What was sent before is sent again as it was.
        events = self.entries(process, run, 0 if run.unconfirmed else tokens)
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

    @of_a_run
    @rule(
        which=anything,
        status=st.sampled_from(["SUCCESS", "FAILURE", "REVOKED"]),
        tokens=st.integers(0, 2),
        then=st.sampled_from(["all done", "all done", "no reply", "dies", "late"]),
    )
    def finish(self, which: int, status: str, tokens: int, then: str) -> None:
        self.finish_as(*self.run_of(which), status, tokens, then)

    def finish_as(
        self, process: Process, run: Run, job: Job, status: str, tokens: int, then: str
    ) -> None:
        if not self.begin(process, run, job):
            return
        events = self.entries(process, run, tokens)
        document = json.dumps({"status": status, "result": uuid4().hex, "task_id": job.id})
        stored = run_script(
            self.store,
            "finish",
            [job.id, run.claim.fence, document, TERMS.result_ttl_s, LAST_EVENTS[status],
             TERMS.stream_ttl_s, TERMS.lease_ms if job.part else "", "", run.next_entry, *events],
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

    @of_a_run
    @rule(which=anything)
    def acknowledge(self, which: int) -> None:
        """A worker that did not hear that its result is stored ends its claim."""
        process, run, job = self.run_of(which)
        record = self.seen.record(job.id)
        if record.get("state") == "ended" and record.get("fence") == str(run.claim.fence):
            claims.end(self.store, run.claim, TERMS)
            process.forget(run)

    @of_a_run
    @rule(which=anything, heard=st.booleans())
    def hand_back(self, which: int, heard: bool) -> None:
        process, run, _ = self.run_of(which)
        assert claims.hand_back(self.store, run.claim) == self.seen.holds(run.claim)
        if heard:
            process.forget(run)

    @of_a_run
    @rule(which=anything)
    def lapse(self, which: int) -> None:
        """A worker cannot take a job."""
        process, run, job = self.run_of(which)
        if self.seen.holds(run.claim):
            self.strike(job, alone=True)
        claims.lapse(self.store, run.claim, max_attempts=TERMS.max_attempts)
        process.forget(run)

    @of_a_run
    @rule(which=anything, launched=st.integers(1, 3), heard=st.booleans())
    def lose_engine(self, which: int, launched: int, heard: bool) -> None:
        """The engine dies in a step of some jobs: these are blamed, the others handed back."""
        process, *_ = self.run_of(which)
        for at, run in enumerate(tuple(process.runs)):
            job, holds = self.jobs[run.claim.job_id], self.seen.holds(run.claim)
            if at < launched:
                alone = min(launched, len(process.runs)) == 1
                blamed = claims.blame(
                    self.store, run.claim, max_attempts=TERMS.max_attempts, alone=alone
                )
                assert blamed == holds
                if holds:
                    job.deaths += 1
                    self.strike(job, alone=alone)
            else:
                assert claims.hand_back(self.store, run.claim) == holds
        for run in tuple(process.runs) if heard else ():
            process.forget(run)

    def strike(self, job: Job, *, alone: bool) -> None:
        before = 0 if job.progress else job.strikes or 0
        most = TERMS.max_attempts if alone else TERMS.max_attempts - 1
        job.strikes, job.progress = min(before + 1, most), False

    @of_a_run
    @rule(which=anything)
    def refuse(self, which: int) -> None:
        process, run, job = self.run_of(which)
        holds = self.seen.holds(run.claim)
        dead_letters.refuse(self.store, run.claim, "why", InternalError("no"), TERMS)
        if holds:
            self.note_end(job, self.look().end(job.id), owed=False)
        process.forget(run)

    @of_a_run
    @rule(which=anything)
    def reserve(self, which: int) -> None:
        """A worker reserves the idempotency key of its job, which a stock producer sent."""
        process, run, job = self.run_of(which)
        if job.key is None:
            return
        owner = run_script(self.store, "reserve_key", [job.id, TERMS.result_ttl_s], [job.key])
        # A worker that lost its claim may reserve the key of a job that Redis has forgotten since.
        first = next(
            (
                it
                for it in self.jobs.values()
                if it.key == job.key and it.keyed and not it.forgotten
            ),
            job,
        )
        if self.seen.may_be_repeated(first.id):
            first.keyed, first = False, job
        assert owner == first.id, "two jobs have one key"
        if owner == job.id:
            job.keyed = True
        else:
            self.look()
            self.finish_as(process, run, job, "FAILURE", 0, "all done")

    @of_a_run
    @rule(worker=workers)
    def crash(self, worker: int) -> None:
        self.crash_of(self.processes[worker])

    @rule(worker=workers, leaving=st.booleans())
    def announce(self, worker: int, leaving: bool) -> None:
        self.announce_as(self.processes[worker], leaving=leaving)

    def announce_as(self, process: Process, *, leaving: bool = False) -> None:
        card = WorkerCard(
            hostname=process.name, pid=1, model="toy", fingerprint=process.model, max_context=4096,
            max_sequences=4, device="cpu", started_at=1, last_seen=1, engine={},
        )  # fmt: skip
        registry.announce(self.store, card, leaving=leaving)

    def crash_of(self, process: Process) -> None:
        """The process dies; another begins under its name, one of them with another model. It is
        announced later, so jobs are handed to the dead."""
        self.disturbed |= {job_id for job_id, *_ in process.following}
        other = {"a": "b", "b": "a"}[process.model]
        model = process.model if process.name == WORKERS[0] else other
        self.processes[self.processes.index(process)] = Process(process.name, model)
