"""The resident model and the threads around it."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from celery.utils.log import get_logger
from redis.exceptions import RedisError

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.connections.repeater import Repeater
from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard
from llorch_worker.broker.jobs import dead_letters
from llorch_worker.broker.jobs.ended_jobs import ENDED_JOBS
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.engine.interface import EngineDied
from llorch_worker.settings import Settings
from llorch_worker.worker.active_jobs import ActiveJobs, CancelListener
from llorch_worker.worker.announcer import Announcer
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.engine_loader import EngineLoader
from llorch_worker.worker.inbox_watcher import InboxWatcher
from llorch_worker.worker.job_runner import JobRunner
from llorch_worker.worker.job_window import JobWindow
from llorch_worker.worker.leases import RENEWALS_A_LEASE, LeaseKeeper
from llorch_worker.worker.model_changer import ModelChanger
from llorch_worker.worker.publisher import Publisher
from llorch_worker.worker.residency_check import violation
from llorch_worker.worker.resident_engine import ResidentEngine
from llorch_worker.worker.token_desk import TokenDesk

if TYPE_CHECKING:
    from llorch_worker.telemetry.metrics.http_server import MetricsServer
    from llorch_worker.telemetry.metrics.worker_metrics import WorkerFigures
    from llorch_worker.worker.resident_engine import AnyEngine

logger = get_logger(__name__)


class Residency:
    """One engine at a time, and the threads that talk to Redis for its jobs.

    ``job_runner`` runs the jobs, on the pool's threads.
    """

    def __init__(
        self,
        engine: AnyEngine,
        loaders: Mapping[str, EngineLoader],
        settings: Settings,
        hostname: str,
        active_jobs: ActiveJobs,
        assignment: Assignment,
        *,
        on_lost_card: Callable[[], None],
        claim_again: Callable[[], None] = lambda: None,
        on_repeated: Callable[[str], object] = lambda _: None,
        hand_back: Callable[[], None] = lambda: None,
        load_s: float = 0.0,
    ) -> None:
        """``loaders``: of each model that it serves. ``hand_back`` returns all running jobs to
        their queues.

        ``on_lost_card`` is called once no engine can run here. ``claim_again``, from any thread:
        :attr:`is_ready` has changed. ``on_repeated``: see :class:`.InboxWatcher`. ``load_s``: how
        long loading and warming up the model took.
        """
        model = engine.facts.model_name
        self._loaders = loaders
        self._engine = ResidentEngine(
            engine,
            loaders[model].load,
            watchdog_s=settings.watchdog_s,
            on_death=lambda death: self.job_runner.judge(death),
            on_change=self._engine_changed,
        )
        self._claim_again = claim_again
        self._active_jobs = active_jobs
        self._settings = settings
        self._hostname = hostname
        self._on_lost_card = on_lost_card
        self._assignment = assignment
        self._load_s = load_s
        self._started_at = time.time()
        self._redis = connect(settings.redis_url)
        self._publisher = Publisher(
            self._redis, settings, on_lost=active_jobs.lose, on_cancelled=active_jobs.cancel
        )
        self._watchers = {
            name: InboxWatcher(self._redis, name, settings, on_repeated) for name in loaders
        }
        self._leases_redis = connect(
            settings.redis_url, reply_timeout_s=settings.lease_s / RENEWALS_A_LEASE
        )
        self._leases = LeaseKeeper(self._leases_redis, settings, on_lost=active_jobs.lose)
        self._job_window = JobWindow()
        self.job_runner = JobRunner(
            self._engine,
            active_jobs,
            self._publisher,
            self._redis,
            hostname=hostname,
            key_ttl_s=settings.result_ttl_s,
            max_attempts=settings.max_attempts,
        )
        self._announcer = Announcer(self._redis, hostname, self._worker_card, self._other_models)
        self._changer = None
        if len(loaders) > 1 or settings.idle_unload_s is not None:
            self._changer = ModelChanger(
                self._redis,
                settings,
                hostname,
                self._engine,
                loaders,
                load_s=load_s,
                hand_back=hand_back,
                on_change=self._engine_changed,
            )
        self._check = Repeater(
            "residency", "check the model's place", self._check_place, settings.residency_check_s
        )
        self._threads = [
            self._leases,
            self._publisher,
            CancelListener(self._redis, active_jobs),
            self._announcer,
            *self._watchers.values(),
            *(TokenDesk(self._redis, name, loader.answer) for name, loader in loaders.items()),
            self._check,
            *([] if self._changer is None else [self._changer]),
        ]
        self._metrics = self._serve_metrics()

    def start(self) -> None:
        ENDED_JOBS.observe(self._job_window.add)
        ENDED_JOBS.observe(self._engine.note_end)
        if self._changer is not None:
            ENDED_JOBS.observe(self._changer.note_end)
        self._engine.start()
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Ends the threads and the engine, about which they ask. Jobs must have ended before."""
        if self._metrics is not None:
            self._metrics.close()
        for thread in reversed(self._threads):
            thread.close()
        self._engine.close()
        self._leases_redis.close()
        self._redis.close()

    def refuse_jobs(self) -> None:
        """Announces that no more jobs are to be handed over to this worker, which keeps its model
        until it ends."""
        if self._changer is not None:
            self._changer.closing.set()
        self._announcer.leave()

    def stats(self) -> dict[str, Any]:
        """The engine's figures as plain JSON. ``device`` is our name for the card, ``gpu3``,
        because torch calls the only card that it sees cuda:0."""
        engine = self._engine
        several = {} if self._changer is None else self._changer.figures()
        return (
            several
            | dataclasses.asdict(engine.stats())
            | {
                "device": self._assignment.name,
                "deaths": engine.deaths.total(),
                "last_death": engine.last_death,
                "away": engine.away,
                "weakens": engine.facts.weakens,
            }
        )

    @property
    def model(self) -> str:
        """The model that it has loaded, or had before a load."""
        return self._engine.facts.model_name

    def ask_for(self, model: object, *, loads: bool) -> str | None:
        """Has a model loaded, or what is loaded ended, soon. The reason if that cannot be."""
        if self._changer is None:
            return "it keeps its one model; LLORCH_IDLE_UNLOAD_S has it end"
        if model not in self._loaders:
            return f"it has no model of that name; it has {', '.join(self._loaders)}"
        if not loads and model != self.model:
            return f"it has {self.model} loaded"
        self._changer.ask(str(model) if loads else None)
        return None

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine that takes jobs."""
        changing = self._changer is not None and self._changer.changing
        return self._engine.healthy and not changing

    @property
    def may_be_chosen(self) -> bool:
        """Whether jobs may be placed with this worker rather than with another."""
        settings = self._settings
        if not (settings.placement and settings.prefix_caching and self.is_ready):
            return False
        return not self._watchers[self.model].alone

    def status(self) -> str:
        """The worker in one line."""
        stats = self.stats()
        if stats["away"]:
            return f"{stats['model']} on {stats['device']}: {stats['away']}"
        return (
            f"{stats['model']} on {stats['device']}: {stats['running']} running, "
            f"{stats['waiting']} waiting, {stats['tokens_per_s']:.0f} tokens/s"
        )

    def engine_stacks(self) -> str:
        """See :meth:`.EngineProcess.stacks`."""
        return self._engine.stacks()

    def dead_letters(self) -> int | None:
        """The number of dead letters; None if Redis does not answer."""
        try:
            return dead_letters.count(self._redis)
        except RedisError:
            return None

    def _check_place(self) -> None:
        """Hands every job back to other workers and ends this one, if model and cache are not where
        they should be. A card that hangs in a call is left to the watchdog of the leases."""
        try:
            fault = violation(self._engine, self._assignment)
        except (EngineDied, TimeoutError):
            return
        if fault is not None:
            logger.critical("%s; the worker ends and its jobs resume elsewhere", fault)
            self._active_jobs.hand_back_all()
            self._on_lost_card()
            self._check.closing.set()

    def _engine_changed(self) -> None:
        self._claim_again()
        # Redis may be away, and the next engine shall not wait for it.
        threading.Thread(target=self._announcer.attempt, daemon=True).start()

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
        from llorch_worker.telemetry.metrics.worker_metrics import WorkerFigures

        return WorkerFigures(
            stats=self._engine.stats(),
            steps=self._engine.step_figures(),
            deaths=self._engine.deaths,
            **self.job_runner.deliveries,
            fenced_writes=HELD_CLAIMS.fenced_writes,
            lease_age_s=self._leases.age_s(),
            load_s=self._load_s,
            loads={} if self._changer is None else self._changer.loads,
        )

    def serves(self) -> dict[str, Any]:
        """What jobs may need of this worker, as fields of :class:`.ClaimRequest`."""
        facts = self._engine.facts
        return {"fingerprint": facts.fingerprint, "max_context": facts.max_context}

    def _other_models(self) -> list[ModelCard]:
        """Those that it has not loaded now, as far as their files say what they are."""
        config = self._settings.generation_config == "auto"
        return [
            ModelCard(
                name=name,
                max_context=loader.surveyed.max_context,
                queue_limit=self._settings.queue_limit,
                generation_config=loader.surveyed.generation_config if config else {},
                tasks=tuple(loader.surveyed.tasks),
                last_seen=time.time(),
            )
            for name, loader in self._loaders.items()
            if name != self.model and loader.surveyed is not None
        ]

    def _worker_card(self) -> WorkerCard:
        engine = self._engine
        facts = engine.facts
        return WorkerCard(
            hostname=self._hostname,
            pid=os.getpid(),
            model=facts.model_name,
            models=tuple(self._loaders) if len(self._loaders) > 1 else (),
            fingerprint=facts.fingerprint,
            tenant_weights=self._settings.tenant_weights,
            max_context=facts.max_context,
            max_sequences=facts.max_sequences,
            queue_limit=self._settings.queue_limit,
            generation_config=(
                dict(facts.generation_config) if self._settings.generation_config == "auto" else {}
            ),
            tasks=facts.tasks,
            device=self._assignment.name,
            started_at=self._started_at,
            last_seen=time.time(),
            engine=self.stats(),
            last_death=engine.last_death,
            last_death_at=engine.last_death_at,
            away=engine.away,
            engine_pid=None if engine.away else engine.pid,
            recent=self._job_window.read(),
            metrics_host=None if self._metrics is None else self._metrics.host,
            metrics_port=None if self._metrics is None else self._metrics.port,
        )
