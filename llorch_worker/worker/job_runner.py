"""Runs one job in this worker, from its claim to its end."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import redis
from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker import keys
from llorch_worker.broker.jobs import claims, journal
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.deadlines import note_deadline
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.jobs.journal import FIRST_PAGE, JournalPage
from llorch_worker.broker.messages.body import is_exit
from llorch_worker.broker.scripts import run_script, text
from llorch_worker.contract import (
    TERMINAL_EVENTS,
    Cancelled,
    ContextLengthExceeded,
    Event,
    InternalError,
    InvalidRequest,
    JobRequest,
    JobResult,
    Journal,
    LlorchError,
    Timings,
    Tokens,
    Usage,
    Vectors,
    describe,
)
from llorch_worker.contract.errors import as_told
from llorch_worker.engine.interface import Death, EngineDied
from llorch_worker.engine.told import TokensTold
from llorch_worker.worker.active_jobs import ActiveJob, ActiveJobs
from llorch_worker.worker.delivery import Delivery
from llorch_worker.worker.other_workers import OtherWorkers
from llorch_worker.worker.publisher import WRONG_TYPE, Publisher

if TYPE_CHECKING:
    from llorch_worker.engine.handle import GenerationHandle
    from llorch_worker.worker.resident_engine import ResidentEngine

logger = get_logger(__name__)

HAND_BACK_FLUSH_S = 4.0
"""How long a job that is handed back waits for its tokens to be journalled. The next worker
recomputes missing ones."""
MOST_DEATHS = 16
"""Engines that died and whose jobs are not all handed back yet."""
CHECK_CANCEL_AFTER_S = 0.5
"""A job that starts this long after its claim first asks Redis whether it was cancelled."""


class HandedBack(Exception):
    """The job has not ended; it runs again, here or elsewhere."""


class JobRunner:
    """Runs jobs in the engine. Each call of :meth:`run` has its own thread."""

    def __init__(
        self,
        engine: ResidentEngine,
        active_jobs: ActiveJobs,
        publisher: Publisher,
        client: redis.Redis,
        *,
        hostname: str,
        key_ttl_s: int,
        max_attempts: int,
    ) -> None:
        """``key_ttl_s``: how long idempotency keys are remembered. ``max_attempts``: see
        :class:`.ClaimTerms`."""
        self._engine = engine
        self._active_jobs = active_jobs
        self._publisher = publisher
        self._redis = client
        self._hostname = hostname
        self._key_ttl_s = key_ttl_s
        self._max_attempts = max_attempts
        self._suspects: set[str] = set()
        """Those that run here and that no token has cleared yet."""
        self._blamed: deque[tuple[Death, tuple[str, ...]]] = deque(maxlen=MOST_DEATHS)
        self._counting = threading.Lock()
        self.deliveries: Counter[tuple[str, str]] = Counter()
        """By model: jobs that began to run here (attempts); of these, those that were claimed
        before (redeliveries), and those that already had tokens (resumes)."""

    def run(self, delivery: Delivery) -> JobResult:
        """Runs one claimed job and waits for its end. Tokens that are not yet in the job's stream
        are written with the result, in one step.

        Raises:
            LlorchError: the job is refused or failed; Cancelled if it was cancelled.
            HandedBack: it runs again, or another worker already has it.
        """
        job = self._active_jobs.enter(delivery.claim)
        try:
            return self._run(job, delivery)
        finally:
            self._active_jobs.leave(job)

    def _run(self, job: ActiveJob, delivery: Delivery) -> JobResult:
        claim = delivery.claim
        page = self._resumable(job, delivery, self._read_journal(claim))
        resumes = bool(page.journal)
        with self._counting:
            self.deliveries[claim.model, "attempts"] += 1
            self.deliveries[claim.model, "redeliveries"] += not claim.first
            self.deliveries[claim.model, "resumes"] += resumes
        # Above all entries of earlier claims, even of those that Redis has lost but a reader has
        # seen: fences are times.
        clears = self._clears(page.journal)
        self._publisher.open(claim, max(page.next_entry, claim.fence), clears=clears)
        try:
            try:
                self._check_wanted(job, claim)
            except Cancelled:
                if page.journal and not job.handed_back:
                    earlier = _spent_before(page.journal)
                    self._leave_entries(job, claim, earlier, resumed=resumes)
                raise
            generation = self._submit(job, delivery, page.journal)
            job.attach(generation)
            self._publisher.tell_readers(claim, generation.note_read)
            try:
                result = _with_past(generation.result(), page.journal)
            except LlorchError as error:
                died = isinstance(error, EngineDied)
                if not died and not (isinstance(error, Cancelled) and job.handed_back):
                    spent = error.spent if isinstance(error, Cancelled) else None
                    self._leave_entries(job, claim, spent, resumed=resumes)
                elif not self._publisher.flush(claim, self._patience(job, leaves=True)):
                    raise HandedBack from None
                raise
            self._leave_entries(job, claim, resumed=resumes)
            return result
        except Cancelled:
            if job.handed_back:
                raise HandedBack from None
            raise
        except ContextLengthExceeded:
            # Nobody knows what a server's answer holds of the context, so with one the job could
            # go to and fro.
            if self._engine.facts.replays or not resumes:
                with suppress(RedisError):
                    if self._others.hold(claim):
                        raise HandedBack from None
            raise
        except EngineDied as error:
            self._blame(claim, error.death)
            raise HandedBack from None
        except InternalError:
            # The engine was closed before it took in a job that it was to give back.
            if job.handed_back:
                raise HandedBack from None
            raise
        finally:
            self._suspects.discard(claim.job_id)
            self._publisher.close_job(claim)

    def _read_journal(self, claim: Claim) -> JournalPage:
        try:
            return FIRST_PAGE if claim.first else journal.read(self._redis, claim.job_id)
        except RedisError as error:
            if WRONG_TYPE in str(error):
                return FIRST_PAGE  # nor can anything be written there
            logger.warning("cannot read the journal of job %s: %s", claim.job_id, error)
            raise HandedBack from None

    def _resumable(self, job: ActiveJob, delivery: Delivery, page: JournalPage) -> JournalPage:
        """The page, if its tokens are of this model; else the job goes to a worker of its own, or
        begins again."""
        claim, journal = delivery.claim, page.journal
        if not journal:
            return page
        same = journal.fingerprint == self._engine.facts.fingerprint
        if same and self._engine.facts.replays:
            return page
        if job.stopped or claim.cancelled:
            return page  # it does not run here
        if not self._takes(claim):
            raise HandedBack
        try:
            request = _request_of(delivery)
        except LlorchError:
            return page  # refused later
        try:
            if same:
                if self._engine.continues(request, journal, lambda: not job.stopped):
                    return page
                why = "the server cannot go on after them"
            elif self._others.resume(claim, request, journal):
                raise HandedBack
            else:
                why = "they are of a model under the same name that no worker serves any more"
            entry = max(page.next_entry, claim.fence)
            self._others.restart(claim, journal, entry, why)
        except EngineDied:
            raise HandedBack from None
        except RedisError as error:
            logger.warning("job %s waits: %s", claim.job_id, error)
            raise HandedBack from None
        return JournalPage(Journal(restarted=True), entry + 1)

    def _clears(self, journal: Journal) -> bool:
        """Whether the first token clears a suspect: not if it would be void again after a death."""
        return self._engine.facts.replays or not journal.begins_again

    # Into the engine -------------------------------------------------------------------------

    @property
    def _others(self) -> OtherWorkers:
        facts = self._engine.facts
        return OtherWorkers(self._redis, facts.model_name, self._hostname, facts.max_context)

    def _check_wanted(self, job: ActiveJob, claim: Claim) -> None:
        if job.handed_back:
            raise HandedBack
        if job.stopped or self._was_cancelled(claim):
            raise Cancelled("the job was cancelled before it ran")
        if not self._takes(claim):
            raise HandedBack

    def _takes(self, claim: Claim) -> bool:
        """Whether there is an engine of the job's model."""
        return self._engine.healthy and claim.model == self._engine.facts.model_name

    def _was_cancelled(self, claim: Claim) -> bool:
        """Whether the job was cancelled before it was known here.

        The claim reports earlier cancels, and the first write to the stream finds later ones. Only
        a job that has waited here since its claim must ask.
        """
        if claim.cancelled or time.monotonic() - claim.taken_s <= CHECK_CANCEL_AFTER_S:
            return claim.cancelled
        try:
            return bool(self._redis.exists(keys.cancel(claim.job_id)))
        except RedisError as error:
            # The cancel listener checks again when Redis is back.
            logger.warning("cannot ask whether job %s was cancelled: %s", claim.job_id, error)
            return False

    def _submit(
        self, job: ActiveJob, delivery: Delivery, journal: Journal
    ) -> GenerationHandle[JobRequest, JobResult]:
        claim = delivery.claim
        publish = partial(self._publish, claim, clears=self._clears(journal))
        try:
            request = _request_of(delivery)
            self._check_idempotency(request, claim.job_id)
            if request.deadline_s is not None:
                at_ms = delivery.deadline_ms(request.deadline_s)
                with suppress(RedisError):
                    note_deadline(self._redis, claim.job_id, at_ms)
            if claim.suspect:
                self._suspects.add(claim.job_id)
            return self._engine.submit(
                request,
                job_id=claim.job_id,
                worker=self._hostname,
                attempt=claim.attempt,
                queued_at=delivery.queued_at_s(),
                retried_at=delivery.retried_at_s(),
                journal=journal,
                suspect=claim.suspect,
                on_event=publish,
                on_tokens=publish,
                on_asked=job.attach,
            )
        except LlorchError:
            raise
        except BaseException as error:
            told = as_told(error, "worker")
            if isinstance(told, InternalError):
                logger.error("job %s failed", claim.job_id, exc_info=told)
            raise told from None

    def _check_idempotency(self, request: JobRequest, job_id: str) -> None:
        """Refuses a second job with the same key. Our client never sends one; others may."""
        if request.idempotency_key is None:
            return
        key = keys.idempotency(self._engine.facts.model_name, request.idempotency_key)
        try:
            first = text(run_script(self._redis, "reserve_key", [job_id, self._key_ttl_s], [key]))
        except RedisError:
            return
        if first != job_id:
            rule = f"was used by job {first}"
            raise InvalidRequest.from_fault("idempotency_key", rule, "the same key again")

    # Out of the engine -----------------------------------------------------------------------

    def _publish(self, claim: Claim, event: Event | TokensTold, *, clears: bool) -> None:
        # The last event is written with the result, in one step.
        if isinstance(event, TERMINAL_EVENTS):
            self._publisher.expect_end(claim)
            return
        if clears and self._suspects and isinstance(event, Tokens | TokensTold | Vectors):
            self._suspects.discard(claim.job_id)
        self._publisher.append(claim, event)

    def _leave_entries(
        self,
        job: ActiveJob,
        claim: Claim,
        spent: tuple[Usage, Timings] | None = None,
        *,
        resumed: bool,
    ) -> None:
        """Leaves unwritten events to be written with the result."""
        entries = self._publisher.take(claim, self._patience(job))
        if entries is None:
            raise HandedBack
        HELD_CLAIMS.leave_entries(claim, replace(entries, spent=spent, resumed=resumed))

    def _patience(self, job: ActiveJob, *, leaves: bool = False) -> Callable[[], bool]:
        """Whether to stop waiting for Redis: never for a job that stays, so that no result precedes
        its tokens; after :data:`HAND_BACK_FLUSH_S` for one that ``leaves``."""
        give_up_s: float | None = None

        def give_up() -> bool:
            nonlocal give_up_s
            if (leaves or job.leaving) and give_up_s is None:
                give_up_s = time.monotonic() + HAND_BACK_FLUSH_S
            return give_up_s is not None and time.monotonic() > give_up_s

        return give_up

    def judge(self, death: Death) -> tuple[str, ...]:
        """Decides who is blamed for a death, before the jobs of the engine are handed back: those
        that it had in its hands. If one of them was a suspect already, that one alone: it came in
        while a step of others was on the device."""
        known = self._suspects.intersection(death.suspects)
        blamed = tuple(known) or death.suspects
        self._blamed.append((death, blamed))
        return blamed

    def _blame(self, claim: Claim, death: Death) -> None:
        """Hands back a job that is blamed, as a suspect."""
        # A job may come to an engine that has died and is not judged yet, which never had it.
        judged = tuple(self._blamed)
        blamed = next((blamed for known, blamed in judged if known is death), ())
        if death.lives:
            blamed = death.suspects
        if claim.job_id not in blamed:
            return
        alone = len(blamed) == 1
        try:
            claims.blame(self._redis, claim, max_attempts=self._max_attempts, alone=alone)
        except RedisError as error:
            logger.warning("job %s is not blamed for its engine: %s", claim.job_id, error)


def _with_past(result: JobResult, journal: Journal) -> JobResult:
    """``result`` with what became of the tokens of earlier attempts."""
    past = {"resumed": bool(journal.choices or journal.vectors), "restarted": journal.restarted}
    update = {name: True for name, has in past.items() if has}
    return result.model_copy(update=update) if update else result


def _spent_before(journal: Journal) -> tuple[Usage, Timings]:
    """What earlier attempts used of a job that is cancelled before it goes on."""
    tokens = sum(len(choice.token_ids) for choice in journal.choices.values())
    nothing = Timings(queue_ms=0, prefill_ms=0, first_token_ms=0, decode_ms=0)
    return Usage(prompt=journal.prompt_tokens, completion=tokens), nothing


def _request_of(delivery: Delivery) -> JobRequest:
    try:
        return delivery.request()
    except LlorchError:
        raise
    except BaseException as error:
        if is_exit(error):
            raise
        # Only the type: the message may quote the prompt.
        logger.error("job %s is refused: %s", delivery.claim.job_id, type(error).__name__)
        got = describe(delivery.fields)
        raise InvalidRequest.from_fault("request", "cannot be read", got) from None
