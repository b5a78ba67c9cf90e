"""The resident models and the threads around them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, MutableMapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.fleet import residents
from llorch_worker.broker.jobs import dead_letters
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.ended_jobs import ENDED_JOBS
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.contract import InternalError
from llorch_worker.engine.interface import EngineDied
from llorch_worker.settings import Settings
from llorch_worker.worker.active_jobs import ActiveJobs, CancelListener
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.engine_loader import EngineLoader, Loaded
from llorch_worker.worker.inbox_watcher import InboxWatcher
from llorch_worker.worker.job_runner import JobRunner
from llorch_worker.worker.leases import RENEWALS_A_LEASE, LeaseKeeper
from llorch_worker.worker.publisher import Publisher
from llorch_worker.worker.residency_check import violation
from llorch_worker.worker.resident_engine import LoadReason
from llorch_worker.worker.seat import Seat, Worker
from llorch_worker.worker.token_desk import TokenDesk

if TYPE_CHECKING:
    from llorch_worker.contract.token_questions import TokenQuestion
    from llorch_worker.telemetry.metrics.http_server import MetricsServer
    from llorch_worker.telemetry.metrics.worker_metrics import WorkerFigures

logger = get_logger(__name__)


class Residency:
    """The seats of a worker, each with an engine, and the threads that talk to Redis for the jobs
    of all."""

    def __init__(
        self,
        engines: Sequence[Loaded],
        loaders: MutableMapping[str, EngineLoader],
        settings: Settings,
        hostname: str,
        active_jobs: ActiveJobs,
        assignment: Assignment,
        *,
        on_lost_card: Callable[[], None],
        claim_again: Sequence[Callable[[], None]] = (lambda: None,),
        on_repeated: Callable[[str], object] = lambda _: None,
        hand_back: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        """``engines``: of each seat; ``loaders``: of each model that it serves. ``hand_back``
        returns running jobs to their queues, by their ids.

        ``on_lost_card`` is called once no engine can run here. ``claim_again``, for each seat:
        see :class:`.Seat`. ``on_repeated``: see :class:`.InboxWatcher`.
        """
        self._loaders = loaders
        self._active_jobs = active_jobs
        self._settings = settings
        self._on_lost_card = on_lost_card
        self._assignment = assignment
        self._redis = connect(settings.redis_url)
        publisher = Publisher(
            self._redis, settings, on_lost=active_jobs.lose, on_cancelled=active_jobs.cancel
        )
        watchers = {
            name: InboxWatcher(self._redis, name, settings, on_repeated) for name in loaders
        }
        self._leases_redis = connect(
            settings.redis_url, reply_timeout_s=settings.lease_s / RENEWALS_A_LEASE
        )
        self._leases = LeaseKeeper(self._leases_redis, settings, on_lost=active_jobs.lose)
        worker = Worker(
            self._redis,
            settings,
            hostname,
            loaders,
            assignment,
            active_jobs,
            publisher,
            hand_back,
            is_alone=lambda model: watchers[model].alone,
            metrics_address=self._metrics_address,
        )
        self.seats: tuple[Seat, ...] = tuple(
            Seat(
                worker,
                loaded.engine,
                load_s=loaded.load_s,
                name=residents.seat_name(hostname, number),
                others=partial(self._seats_but, number),
                claim_again=again,
            )
            for number, (loaded, again) in enumerate(zip(engines, claim_again, strict=True))
        )
        self._check = Repeater(
            "residency", "check the model's place", self._check_place, settings.residency_check_s
        )
        self._threads = [
            self._leases,
            publisher,
            CancelListener(self._redis, active_jobs),
            *(seat.announcer for seat in self.seats),
            *watchers.values(),
            *(TokenDesk(self._redis, name, partial(self._answer, name)) for name in loaders),
            self._check,
            *(seat.reloader for seat in self.seats),
            *(seat.changer for seat in self.seats if seat.changer is not None),
        ]
        self._metrics = self._serve_metrics()

    def _seats_but(self, number: int) -> list[Seat]:
        return [seat for place, seat in enumerate(self.seats) if place != number]

    def start(self) -> None:
        for seat in self.seats:
            seat.start()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads and the engines, about which they ask. Jobs must have ended before."""
        if self._metrics is not None:
            self._metrics.close()
        for thread in reversed(self._threads):
            thread.close()
        for seat in self.seats:
            seat.engine.close()
        self._leases_redis.close()
        self._redis.close()

    def refuse_jobs(self) -> None:
        """Announces that no more jobs are to be handed over to this worker, which keeps its models
        until it ends."""
        for seat in self.seats:
            if seat.changer is not None:
                seat.changer.closing.set()
            seat.announcer.leave()

    def is_ready(self, model: str) -> bool:
        """Whether an engine takes jobs of the model."""
        return any(seat.is_ready for seat in self.seats if seat.model == model)

    def runner_of(self, claim: Claim) -> JobRunner:
        """What runs the job, on a thread of the pool; it hands back one of a model that is not
        loaded any more."""
        kept = (seat for seat in self.seats if seat.model == claim.model)
        return next(kept, self.seats[0]).job_runner

    def stats(self) -> dict[str, dict[str, Any]]:
        """By model that it keeps: see :meth:`.Seat.stats`."""
        return {seat.model: seat.stats() for seat in self.seats}

    def ask_for(self, model: object, *, loads: bool) -> str | None:
        """Has a model loaded, or what is loaded ended, soon. The reason if that cannot be."""
        if not isinstance(model, str) or model not in self._loaders:
            return f"it has no model of that name; it has {', '.join(self._loaders)}"
        if self._loaders[model].is_server:
            return None if loads else f"{model} is a server's, which stays"
        own = (seat for seat in self.seats if not seat.is_of_server)
        seats = [(seat, seat.changer) for seat in own if seat.changer is not None]
        if not seats:
            return "it keeps its one model; LLORCH_IDLE_UNLOAD_S has it end"
        has = [changer for seat, changer in seats if model in seat.models]
        if not loads and not has:
            return f"it has {' and '.join(seat.model for seat, _ in seats)} loaded"
        # Else the seat that waits least for its jobs' end.
        idlest = min(seats, key=lambda each: (each[1].is_pinned, each[0].engine.stats().running))
        asked = has[0] if has else idlest[1]
        asked.ask(str(model) if loads else None)
        return None

    def reload(self, model: object = None) -> str | None:
        """Has the new weights of a model loaded soon; None: of what is loaded. The reason if that
        cannot be. A signal handler may call it."""
        if model is not None and model not in self._loaders:
            return f"it has no model of that name; it has {', '.join(self._loaders)}"
        has = [seat for seat in self.seats if model is None or model in seat.models]
        for seat in has or self.seats[:1]:
            seat.reloader.ask(None if model is None else str(model))
        return None

    def _answer(self, model: str, question: TokenQuestion) -> dict[str, Any]:
        loader = self._loaders[model]
        try:
            return loader.answer(question)
        except InternalError:
            if loader is self._loaders[model]:
                raise
            return self._loaders[model].answer(question)  # a reload came meanwhile

    def status(self) -> str:
        """The worker in one line."""
        return "; ".join(seat.status() for seat in self.seats)

    def engine_stacks(self) -> Iterator[tuple[str, Callable[[], str]]]:
        """Each engine's name, and what says where its threads are."""
        for seat in self.seats:
            name = f"engine of {seat.model}" if len(self.seats) > 1 else "engine"
            yield name, seat.engine.stacks

    def dead_letters(self) -> int | None:
        """The number of dead letters; None if Redis does not answer."""
        try:
            return dead_letters.count(self._redis)
        except RedisError:
            return None

    def _check_place(self) -> None:
        """Hands every job back to other workers and ends this one, if model and cache are not where
        they should be. A card that hangs in a call is left to the watchdog of the leases."""
        for seat in self.seats:
            if seat.is_of_server:
                continue
            try:
                fault = violation(seat.engine, self._assignment)
            except (EngineDied, TimeoutError):
                continue
            if fault is not None:
                logger.critical("%s; the worker ends and its jobs resume elsewhere", fault)
                self._active_jobs.hand_back_all()
                self._on_lost_card()
                self._check.closing.set()
                return

    def _metrics_address(self) -> tuple[str, int] | None:
        return None if self._metrics is None else (self._metrics.host, self._metrics.port)

    def _serve_metrics(self) -> MetricsServer | None:
        """Nothing is counted if no port is free: a worker without metrics still works."""
        first_port = self._settings.metrics_port
        if first_port is None:
            return None
        # Here, because they need an extra.
        from llorch_worker.telemetry.metrics.http_server import serve
        from llorch_worker.telemetry.metrics.worker_metrics import WorkerMetrics

        metrics = WorkerMetrics(tuple(self._loaders), self._worker_figures)
        server = serve(metrics.registry, self._settings.metrics_host, first_port)
        if server is not None:
            ENDED_JOBS.observe(metrics.job_ended)
        return server

    def _worker_figures(self) -> WorkerFigures:
        from llorch_worker.telemetry.metrics.worker_metrics import SeatFigures, WorkerFigures

        never = {(model, reason): 0 for model in self._loaders for reason in get_args(LoadReason)}
        return WorkerFigures(
            [
                SeatFigures(
                    stats=seat.engine.stats(),
                    steps=seat.engine.step_figures(),
                    deaths=seat.engine.deaths,
                    deliveries=seat.job_runner.deliveries,
                    load_s=seat.engine.load_s,
                    is_there=seat.engine.absence is None,
                    # From 0 on: Prometheus sees no increase in a first value.
                    loads={**never, **seat.engine.loads},
                )
                for seat in self.seats
            ],
            fenced_writes=HELD_CLAIMS.fenced_writes,
            lease_age_s=self._leases.age_s(),
            late_s=max(seat.late_s for seat in self.seats),
        )
