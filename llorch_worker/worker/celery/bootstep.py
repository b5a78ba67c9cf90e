"""The Celery bootstep that loads the model before the worker takes its first job."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NoReturn

from celery import bootsteps, signals
from celery.app.trace import logger as trace_logger
from celery.exceptions import Reject, WorkerShutdown
from celery.platforms import EX_FAILURE, EX_OK
from celery.utils.log import get_logger
from celery.worker import state
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import broker_errors, connect, connect_impatient
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.waiting import older_version
from llorch_worker.contract import LlorchError
from llorch_worker.contract.command_errors import USAGE
from llorch_worker.contract.errors import BrokerUnavailable, InvalidLoadOption
from llorch_worker.contract.installing import install_command
from llorch_worker.misspelt import warnings
from llorch_worker.processors import bind, thread_count
from llorch_worker.settings import Settings
from llorch_worker.telemetry.traces.tracing import Tracing, is_traced, start_tracing
from llorch_worker.worker.card.assignment import Assignment, assign_device
from llorch_worker.worker.celery.flower import shown_figures
from llorch_worker.worker.celery.follow_ups import FollowUps
from llorch_worker.worker.celery.refusals import foreign_queue, refused_option, refused_setting
from llorch_worker.worker.celery.stacks import write_on_sigusr1
from llorch_worker.worker.engine_loader import (
    EngineLoader,
    Loaded,
    load_first,
    survey_all,
    warn_of_ignored,
)
from llorch_worker.worker.model_changer import first_models
from llorch_worker.worker.residency import Residency
from llorch_worker.worker.signs_of_life import SignsOfLife

if TYPE_CHECKING:
    from llorch_worker.telemetry.traces.attempts import AttemptSpans

logger = get_logger(__name__)

GRACE_S = 5.0
"""How long after its time to drain a worker may take to leave by itself."""
PAUSE_S = 1.0
"""Between two looks whether Redis answers."""


class ResidencyStep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Loads and warms up the model. The consumer starts afterwards, so a worker that answers is
    ready.

    The step stops before the pool, but closes the engine only when the pool is empty.
    """

    requires = ("celery.worker.components:Pool",)
    label = "Model"

    def __init__(self, worker: Any, **options: Any) -> None:
        """Raises WorkerShutdown with one logged sentence if the worker must not start like this."""
        super().__init__(worker, **options)
        refusal = (
            refused_option(worker, options)
            or refused_setting(worker.app)
            or foreign_queue(worker.app, worker.named_queues)
        )
        if refusal is not None:
            _give_up(refusal, USAGE)
        for sentence in warnings(Settings):
            logger.warning(sentence)
        most = worker.app.settings
        if most.max_deaths < most.max_attempts:
            logger.warning(
                "LLORCH_MAX_DEATHS=%d ends jobs before LLORCH_MAX_ATTEMPTS=%d can; raise it, or "
                "lower the other",
                most.max_deaths,
                most.max_attempts,
            )
        self._residency: Residency | None = None
        self._follow_ups: FollowUps | None = None
        self._loaders: dict[str, EngineLoader] = {}
        self._tracing = Tracing()
        self._attempt_spans: AttemptSpans | None = None
        self._interrupted = False
        self._worker = worker
        health_file = worker.app.settings.health_file
        try:
            self._signs = SignsOfLife(health_file)
        except OSError as error:
            _give_up(f"cannot write LLORCH_HEALTH_FILE {health_file}: {error.strerror}", USAGE)
        if worker.app.settings.metrics_port is not None and find_spec("prometheus_client") is None:
            _give_up(
                f"LLORCH_METRICS_PORT needs prometheus_client: {install_command('metrics')}, "
                "or unset it"
            )
        # Attributes, because signals hold their receivers weakly.
        self._note_interrupt, self._note_ready = self._on_shutting_down, self._on_ready
        # Celery sends it in its signal handlers, one of which may interrupt the other. With its own
        # lock, the second SIGTERM would wait for the first for ever.
        signals.worker_shutting_down.lock = threading.RLock()
        signals.worker_shutting_down.connect(self._note_interrupt)
        signals.worker_ready.connect(self._note_ready)

    def start(self, worker: Any) -> None:
        """Exits with one sentence if the model cannot be loaded: with 2 for a wrong setting, else
        with 1."""
        write_on_sigusr1(self._stacks_of_others)
        trace_logger.addFilter(_HandBackInOneLine())
        self._trace(worker.hostname)
        settings = worker.app.settings
        try:
            if settings.processors is not None and not bind(settings.processors):
                usable = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                logger.warning(
                    "LLORCH_PROCESSORS=%s: of these, only %s can be used here",
                    settings.processors,
                    usable,
                )
        except ValueError as error:
            _give_up(f"LLORCH_PROCESSORS: {error}", USAGE)
        redis = RedisAtStart(worker.app, self._signs.loading)
        # Loading may take minutes, and Redis may come back meanwhile.
        redis.works()
        try:
            # Before the engine's module, and with it torch, is imported.
            assignment: Assignment = worker.app.assignment or (
                assign_device(settings.device, settings.device_locks, worker=worker.hostname)
                if settings.computes_here
                else Assignment("server")
            )
            worker.app.assignment = assignment
            self._loaders = {
                each.served_name: EngineLoader(
                    each,
                    assignment,
                    engine_class=worker.app.engine_class,
                    max_sequences=_asked_sequences(worker),
                    num_threads=_threads_each(settings.resident),
                    report=self._signs.loading,
                )
                for each in settings.of_each_model
            }
            engines = self._load(worker)
            facts = [each.engine.facts for each in engines]
            # What the engines cannot batch stays in the queue.
            most = sum(each.max_sequences for each in facts)
            worker.concurrency = worker.consumer.initial_prefetch_count = most
            # Beside them jobs that read texts, of models that generate too.
            worker.pool.limit = most + sum(each.max_sequences for each in facts if each.does_both)
        except LlorchError as error:
            # torch calls every card cuda:0, so its message does not say which card failed.
            assigned = worker.app.assignment
            where = f"on {assigned.card.name}: " if assigned and assigned.card else ""
            code = USAGE if isinstance(error, InvalidLoadOption) else EX_FAILURE
            if worker.app.on_load_error is None:
                _give_up(where + error.message, code)
            worker.app.on_load_error(error)
            raise WorkerShutdown(code) from None
        redis.wait()
        for name in self._loaders:
            _take_over_jobs(settings, name)
        claimers, pool = worker.consumer.claimers, worker.pool
        residency = Residency(
            engines,
            self._loaders,
            settings,
            worker.hostname,
            pool.active_jobs,
            assignment,
            on_lost_card=_shut_down,
            claim_again=[worker.consumer.look_again] * len(engines),
            on_repeated=claimers[0].note_repeated,
            hand_back=lambda ids: pool.call_soon(lambda: pool.hand_back_running(ids)),
        )
        residency.start()
        answer_sighup(residency.reload)
        pool.figures = lambda: shown_figures(residency.stats())
        worker.app.out_of_time = pool.out_of_time
        self._follow_ups = FollowUps(worker.app, settings, worker.hostname)
        self._follow_ups.start()
        self._residency = worker.app.residency = residency
        if threading.current_thread() is threading.main_thread():
            # Else a collection that one job's many objects set off looks at all that a worker has,
            # for tens of ms in which no token of another job goes on. In a thread it is a test's.
            gc.collect()
            gc.freeze()
        for seat in residency.seats:
            how = seat.engine.facts.drafter
            logger.info(
                "%s is resident on %s, warm and ready%s",
                seat.model,
                seat.device,
                "" if how == "off" else f", speculation by {how}",
            )

    def _load(self, worker: Any) -> list[Loaded]:
        """The engines of the seats: those of files, then those of servers. Raises LlorchError."""
        settings = worker.app.settings
        servers = [each for each in self._loaders.values() if each.is_server]
        names = [name for name, each in self._loaders.items() if not each.is_server]
        if not names:
            warn_of_ignored(settings)
        # First: one that is not there must not have loads of minutes wait for it.
        there = load_first(servers, len(servers), None)
        if len(self._loaders) > 1:
            survey_all(self._loaders, settings)
        if len(names) > 1:
            with connect_impatient(settings.redis_url) as client:
                first = first_models(client, settings, worker.hostname, names)
            names = [*first, *(name for name in names if name not in first)]
        loaders = [self._loaders[name] for name in names]
        return load_first(loaders, settings.resident, worker.app.on_load_progress) + there

    def stop(self, worker: Any) -> None:
        if self._residency is not None:
            self._residency.refuse_jobs()
        worker.pool.drain(worker.app.settings.drain_s)
        self._close()
        if self._interrupted:
            # Celery exits with an error after Ctrl-C, but this worker has drained.
            worker.exitcode = EX_OK

    def terminate(self, worker: Any) -> None:
        worker.pool.terminate()
        self._close()

    def info(self, _worker: Any) -> dict[str, Any]:
        """The figures that ``inspect stats`` adds."""
        if self._residency is None:
            return {}
        first, *others = self._residency.stats().values()
        several = {"other_engines": others} if others else {}
        return {"engine": first, **several, "dead_letters": self._residency.dead_letters()}

    def _close(self) -> None:
        # First, because it asks the engine.
        self._signs.close()
        if self._follow_ups is not None:
            self._follow_ups.close()
        if self._residency is not None:
            self._residency.close()
        for loader in self._loaders.values():
            loader.close()
        if self._attempt_spans is not None:
            self._attempt_spans.disconnect()
        self._tracing.close()

    def _trace(self, hostname: str) -> None:
        self._tracing = start_tracing("llorch-worker", hostname)
        if is_traced():
            from llorch_worker.telemetry.traces.attempts import AttemptSpans

            self._attempt_spans = AttemptSpans()
            self._attempt_spans.connect()

    def _stacks_of_others(self) -> Iterator[str]:
        """Where the threads of the engine and the intake are, as far as they answer."""
        asked = {} if self._residency is None else dict(self._residency.engine_stacks())
        for name, loader in self._loaders.items():
            asked[f"intake of {name}" if len(self._loaders) > 1 else "intake"] = (
                loader.intake_stacks
            )
        for name, ask in asked.items():
            try:
                yield ask()
            except Exception as error:  # noqa: BLE001 - the others are asked in any case
                yield f"The {name} does not say where its threads are: {error or 'it hangs'}\n"

    def _on_ready(self, **_: Any) -> None:
        residency = self._residency
        if residency is not None:
            self._signs.begin(residency.status)

    def _on_shutting_down(self, sig: str = "", how: str = "", **_: Any) -> None:
        self._signs.stopping()
        self._interrupted = sig == "SIGINT" and how == "Warm"
        if how == "Warm":
            settings = self._worker.app.settings
            leave_in_time(settings.redis_url, settings.drain_s)
            # Otherwise the event loop finishes its wait and may take a job meanwhile.
            self._worker.pool.wake()


class _HandBackInOneLine(logging.Filter):
    """Removes the traceback that Celery logs when a job goes back to its queue."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.exc_info and isinstance(record.exc_info[1], Reject):
            record.exc_info = None
        return True


def _give_up(sentence: str, exit_code: int = EX_FAILURE) -> NoReturn:
    logger.critical("cannot start: %s", sentence)
    raise WorkerShutdown(exit_code)


def _asked_sequences(worker: Any) -> int | None:
    """None if the engine has to find out how many its card has memory for."""
    limit: int = worker.pool.limit
    is_asked = worker.app.settings.max_sequences is not None
    return limit if is_asked or limit != worker.app.own_config["worker_concurrency"] else None


def _threads_each(engines: int) -> int | None:
    """How many threads each of several engines computes with: its share. ``OMP_NUM_THREADS``
    decides, if it is set."""
    if engines == 1 or os.environ.get("OMP_NUM_THREADS"):
        return None
    return max(1, thread_count() // engines)


def _take_over_jobs(settings: Settings, model: str) -> None:
    """Moves what an older version left, unless workers of it still live."""
    with connect(settings.redis_url) as client:
        try:
            if (refusal := older_version.living(client, model)) is not None:
                _give_up(refusal)
            if moved := older_version.move(client, model):
                logger.warning("took over %d jobs that an older version left", moved)
        except RedisError as error:
            logger.warning("cannot look for jobs of an older version: %s", error)


def answer_sighup(reload: Callable[[], object]) -> None:
    """Reloads where Celery's handler would restart the whole worker. On a terminal Celery has none,
    and the signal says that the window was closed: the worker drains, as after SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        return
    handler = signal.getsignal(signal.SIGHUP)
    if callable(handler):
        signal.signal(signal.SIGHUP, lambda *_: reload() and None)
    elif handler == signal.SIG_DFL:  # no nohup
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))


def _shut_down() -> None:
    # Celery checks this in every iteration of its event loop.
    state.should_stop = EX_FAILURE


def leave_in_time(redis_url: str, drain_s: float) -> None:
    """Ends the process soon after ``drain_s``, unless Redis answers.

    Each part that says goodbye to Redis would wait for its reply, one after the other. What they
    would say, Redis finds by itself: leases lapse, and others take the jobs over.
    """
    leave_at_s = time.monotonic() + drain_s + GRACE_S

    def leave() -> None:
        if time.monotonic() < leave_at_s:
            return
        try:
            with connect_impatient(redis_url) as client:
                client.ping()
        except RedisError as error:
            logger.warning("Redis is away, and the worker leaves without it: %s", error)
            os._exit(EX_OK)

    Repeater("last-exit", "leave in time", leave, 1.0).start()


class RedisAtStart:
    """A worker that could claim jobs, but not store their results, would fail each of them."""

    def __init__(self, app: Any, report: Callable[[str], None]) -> None:
        """``report`` gets a sign of life while the worker waits."""
        self._app = app
        self._report = report
        self._logged = ""

    def works(self) -> bool:
        """Whether all connections work now; if not, logs why, once for each reason."""
        url = self._app.settings.redis_url
        try:
            with broker_errors(url):
                with connect(url, retries=0) as client:
                    client.ping()
                self._app.backend.client.ping()
                with self._app.connection_for_read() as connection:
                    connection.default_channel.client.ping()
        except BrokerUnavailable as error:
            if str(error) != self._logged:
                logger.error("takes no jobs yet, will retry: %s", error)
            self._logged = str(error)
            return False
        if self._logged:
            logger.info("every connection to Redis works now")
        return True

    def wait(self) -> None:
        """Returns when all connections work; ends with the worker."""
        while not self.works():
            self._report("waiting for Redis")
            state.maybe_shutdown()
            time.sleep(PAUSE_S)
            state.maybe_shutdown()
