"""A Redis in memory, and a thread that answers jobs from it as a worker would.

Everything but the engine and Celery's event loop is what production runs: the scripts that claim,
cancel and finish, the contract's validation, the journal, and Celery's tracer with its chains and
chords.
"""

from __future__ import annotations

import os
import threading
import time
from types import SimpleNamespace
from typing import Any, Self

from celery import Celery
from celery.app.trace import trace_task
from fakeredis import TcpFakeServer

from llorch_worker.broker import keys, queues
from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.broker.jobs import claims
from llorch_worker.broker.jobs.claims import Claim, ClaimRequest, ClaimTerms
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.messages.message import ENQUEUED_AT, read_task
from llorch_worker.broker.scripts import load
from llorch_worker.broker.waiting import inbox_watch
from llorch_worker.contract import TASK_NAME, Event, GenerationRequest
from llorch_worker.engine.told import TokensTold
from llorch_worker.settings import Settings
from llorch_worker.testing.answers import Answers, Reply, Script
from llorch_worker.testing.engine import MAX_CONTEXT, StubEngine
from llorch_worker.worker.active_jobs import ActiveJobs, CancelListener
from llorch_worker.worker.celery.config import worker_config
from llorch_worker.worker.celery.task import register
from llorch_worker.worker.job_runner import JobRunner
from llorch_worker.worker.publisher import Publisher

HOSTNAME = "stub@llorch-testing"
MAX_SEQUENCES = 64
LOOK_S = 0.02
"""How often the stub looks for jobs: a stock producer's wake nobody."""
KEEP_S = 3600
"""How long leases, results and streams last: longer than a test."""
TERMS = ClaimTerms(
    lease_ms=KEEP_S * 1000, max_attempts=1, max_deaths=1, result_ttl_s=KEEP_S, stream_ttl_s=KEEP_S
)


class _WordByWord(Publisher):
    """Writes each event before the next, so that a stream always has the same entries."""

    def append(self, claim: Claim, event: Event | TokensTold) -> None:
        super().append(claim, event)
        self.flush(claim, lambda: False)


class Stub:
    """Serves ``model`` at :attr:`url` until the context ends.

    ``url`` is that of a Redis, for :class:`Client`, ``LLORCH_REDIS_URL``, and the broker and result
    backend of any Celery app.
    """

    def __init__(self, model: str = "demo") -> None:
        self.model = model
        self._answers = Answers()
        self._engine = StubEngine(model, self._answers)
        self._server = TcpFakeServer(("127.0.0.1", 0))
        # A client that stays open must not keep the process.
        self._server.daemon_threads = True
        self.url = f"redis://127.0.0.1:{self._server.server_address[1]}/0"
        self._stop = threading.Event()
        self._active_jobs = ActiveJobs()
        self._threads = [
            threading.Thread(target=run, name=f"llorch-stub-{name}", daemon=True)
            for name, run in (("redis", self._server.serve_forever), ("worker", self._run))
        ]

    @property
    def requests(self) -> list[GenerationRequest]:
        """The valid requests so far, in the order in which they began."""
        return self._engine.requests

    def answer(self, *replies: Reply | Script) -> None:
        """Scripts the answers to the jobs from now on.

        One reply is for every job, several are for one job each, in turn. A reply is a text, an
        :class:`Answer`, or a :class:`LlorchError` with which the job fails. A function from the
        request to a reply decides for each job.
        """
        self._answers.set(*replies)

    def reset(self) -> None:
        """Ends all jobs and forgets everything but the model."""
        for job_id in self._active_jobs.ids():
            self._active_jobs.cancel(job_id)
        while self._active_jobs.ids():
            time.sleep(LOOK_S)
        self._answers.set()
        self._engine.requests.clear()
        self._redis.flushall()
        self._announce()

    def __enter__(self) -> Self:
        settings = Settings(redis_url=self.url)
        redis_thread, worker_thread = self._threads
        redis_thread.start()
        self._redis = connect(self.url)
        # fakeredis closes the connection after an error, here NOSCRIPT, and a pipeline is lost.
        load(self._redis, "append")
        self._announce()
        self._publisher = _WordByWord(
            self._redis,
            settings,
            on_lost=self._active_jobs.lose,
            on_cancelled=self._active_jobs.cancel,
        )
        self._publisher.start()
        self._listener = CancelListener(self._redis, self._active_jobs)
        self._listener.start()
        engine: Any = self._engine
        runner = JobRunner(
            engine,
            self._active_jobs,
            self._publisher,
            self._redis,
            hostname=HOSTNAME,
            key_ttl_s=KEEP_S,
            max_attempts=1,
        )
        # Not the current app of this process: that is the test's.
        self._app = Celery("llorch-testing", set_as_current=False)
        self._app.conf.update(worker_config(settings))
        self._app.settings = settings
        self._app.residency = SimpleNamespace(runner_of=lambda _: runner)
        register(self._app)
        self._task = self._app.tasks[TASK_NAME]
        worker_thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.reset()
        self._stop.set()
        self._threads[1].join()
        self._listener.close()
        self._publisher.close()
        self._app.close()
        self._redis.close()
        self._server.shutdown()
        self._server.server_close()

    def _announce(self) -> None:
        now_s = time.time()
        card = WorkerCard(
            hostname=HOSTNAME,
            pid=os.getpid(),
            model=self.model,
            max_context=MAX_CONTEXT,
            max_sequences=MAX_SEQUENCES,
            device="stub",
            started_at=now_s,
            last_seen=now_s,
            engine={},
        )
        registry.announce(self._redis, card)

    # The worker -----------------------------------------------------------------------------------

    def _run(self) -> None:
        consumed = queues.queues(self.model)
        waiting = [*queues.inbox(consumed), keys.waiting(self.model), keys.scheduled(self.model)]
        announced_s = time.monotonic()
        while not self._stop.wait(LOOK_S):
            if time.monotonic() - announced_s > registry.ANNOUNCE_INTERVAL_S:
                announced_s = time.monotonic()
                self._announce()
            if not self._redis.exists(*waiting):
                continue
            inbox_watch.look(self._redis, self.model)
            request = ClaimRequest(
                model=self.model,
                queues=consumed,
                limit=MAX_SEQUENCES,
                worker=HOSTNAME,
                held=HELD_CLAIMS.running(self.model),
            )
            taken = claims.claim(self._redis, request, TERMS)
            for claim in taken.claims:
                HELD_CLAIMS.add(claim)
                self._active_jobs.expect(claim.job_id)
                threading.Thread(target=self._answer, args=(claim,), daemon=True).start()

    def _answer(self, claim: Claim) -> None:
        """Runs one job as Celery's worker does: its result, and what follows in its canvas."""
        task = read_task(claim.message, TERMS.max_message_bytes)
        try:
            if task is None:
                raise ValueError("the message of a job cannot be read")
            headers, (args, kwargs, embed) = task
            request = {
                **headers,
                **embed,
                "id": claim.job_id,
                ENQUEUED_AT: headers.get(ENQUEUED_AT),
                "hostname": HOSTNAME,
                "ignore_result": False,
                "delivery_info": {},
                "properties": {"delivery_tag": claim.tag},
            }
            trace_task(
                self._task,
                claim.job_id,
                args,
                kwargs,
                request,
                hostname=HOSTNAME,
                loader=self._app.loader,
                app=self._app,
            )
            if not HELD_CLAIMS.has_ended(claim):
                claims.end(self._redis, claim, TERMS)
        except Exception as error:
            claims.fail(self._redis, claim, error, TERMS)
            raise
        finally:
            self._active_jobs.forget(claim.job_id)
            HELD_CLAIMS.discard(claim)
