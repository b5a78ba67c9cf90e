"""A seat: room for one of the models that a worker keeps, with its engine and its card."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from redis import Redis

from llorch_worker.broker.fleet.registry import ModelCard, WorkerCard
from llorch_worker.broker.jobs.ended_jobs import ENDED_JOBS, EndedJob
from llorch_worker.settings import Settings
from llorch_worker.worker.active_jobs import ActiveJobs
from llorch_worker.worker.announcer import Announcer
from llorch_worker.worker.card.assignment import Assignment
from llorch_worker.worker.engine_loader import EngineLoader
from llorch_worker.worker.job_runner import JobRunner
from llorch_worker.worker.job_window import JobWindow
from llorch_worker.worker.model_changer import ModelChanger
from llorch_worker.worker.publisher import Publisher
from llorch_worker.worker.reloader import Reloader
from llorch_worker.worker.resident_engine import MOST_SHOWN, ResidentEngine

if TYPE_CHECKING:
    from llorch_worker.worker.resident_engine import AnyEngine


@dataclass(frozen=True)
class Worker:
    """What the seats of a worker share."""

    redis: Redis
    settings: Settings
    hostname: str
    loaders: MutableMapping[str, EngineLoader]
    """Of each model that it serves."""
    assignment: Assignment
    active_jobs: ActiveJobs
    publisher: Publisher
    hand_back: Callable[[Collection[str]], None]
    """Returns running jobs to their queues, by their ids."""
    is_alone: Callable[[str], bool]
    """Whether no other worker of a model is known."""
    metrics_address: Callable[[], tuple[str, int] | None]
    """Where it serves metrics."""
    reloading: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    started_at: float = dataclasses.field(default_factory=time.time)


class Seat:
    """One engine at a time, the jobs that run in it, and what is announced of it.

    A job belongs to the seat that has its model. No two seats of a worker have the same one.
    """

    def __init__(
        self,
        worker: Worker,
        engine: AnyEngine,
        *,
        load_s: float,
        name: str,
        others: Callable[[], Sequence[Seat]],
        claim_again: Callable[[], None],
    ) -> None:
        """``load_s``: how long loading and warming up took. ``name``: the seat's in the notes of
        who keeps which model. ``others``: the worker's. ``claim_again``, from any thread:
        :attr:`is_ready` has changed."""
        settings = worker.settings
        self._worker = worker
        self._others = others
        self._claim_again = claim_again
        self._window = JobWindow()
        self.engine = ResidentEngine(
            engine,
            worker.loaders[engine.facts.model_name].load,
            load_s=load_s,
            watchdog_s=settings.watchdog_s,
            on_death=lambda death: self.job_runner.judge(death),
            on_change=self._changed,
        )
        self.job_runner = JobRunner(
            self.engine,
            worker.active_jobs,
            worker.publisher,
            worker.redis,
            hostname=worker.hostname,
            key_ttl_s=settings.result_ttl_s,
            max_attempts=settings.max_attempts,
        )
        own = [model for model, loader in worker.loaders.items() if not loader.is_server]
        self.announcer = Announcer(worker.redis, worker.hostname, self._card, self._models_on_disk)
        self.reloader = Reloader(
            self.engine,
            worker.loaders,
            alone=worker.reloading,
            # A reload keeps the seat from other models for as long.
            drain_s=min(settings.drain_s, settings.max_wait_s)
            if len(own) > 1
            else settings.drain_s,
            hand_back=worker.hand_back,
            on_change=self._changed,
        )
        self.changer = None
        idles = settings.idle_unload_s is not None and not self.is_of_server
        if len(worker.loaders) > 1 or idles:
            # A server takes no memory here, so it stays, as a pin does.
            stays = settings.model_copy(update={"pin": self.model})
            self.changer = ModelChanger(
                worker.redis,
                stays if self.is_of_server else settings,
                name,
                self.engine,
                worker.loaders,
                [self.model] if self.is_of_server else own,
                taken=lambda: [model for other in others() for model in other.models],
                hand_back=worker.hand_back,
                on_change=self._changed,
            )

    def start(self) -> None:
        ENDED_JOBS.observe(self._note_end)
        self.engine.start()

    @property
    def model(self) -> str:
        """The model that it has loaded or loads, or that did not load."""
        return self.engine.facts.model_name

    @property
    def models(self) -> tuple[str, ...]:
        """That, and what it changes to."""
        return (self.model,) if self.changer is None else (self.model, self.changer.model)

    @property
    def is_of_server(self) -> bool:
        return self._worker.loaders[self.model].is_server

    @property
    def device(self) -> str:
        """Our name for the card, ``gpu3``, because torch calls the only one that it sees cuda:0; or
        which server it is."""
        return self.engine.facts.device if self.is_of_server else self._worker.assignment.name

    @property
    def late_s(self) -> float:
        """See :class:`.ModelChanger`."""
        return 0.0 if self.changer is None else self.changer.late_s

    @property
    def sequences(self) -> int:
        """The most jobs to hold of each kind."""
        return self.engine.facts.max_sequences

    @property
    def is_ready(self) -> bool:
        """Whether there is an engine that takes jobs."""
        changing = self.reloader.draining or (self.changer is not None and self.changer.changing)
        return self.engine.healthy and not changing

    @property
    def may_be_chosen(self) -> bool:
        """Whether jobs may be placed here rather than with another worker."""
        settings = self._worker.settings
        if not (settings.placement and settings.prefix_caching and self.is_ready):
            return False
        return not self._worker.is_alone(self.model)

    def serves(self) -> dict[str, Any]:
        """What jobs may need of it, as fields of :class:`.ClaimRequest`."""
        facts = self.engine.facts
        return {"fingerprint": facts.fingerprint, "max_context": facts.max_context}

    def stats(self) -> dict[str, Any]:
        """The engine's figures as plain JSON."""
        engine = self.engine
        several = {} if self.changer is None else self.changer.figures()
        return (
            several
            | dataclasses.asdict(engine.stats())
            | {
                "device": self.device,
                "deaths": engine.deaths.total(),
                "last_death": engine.last_death,
                "away": self._away,
                "reload": self._reload,
                "weakens": engine.facts.weakens,
            }
        )

    @property
    def _loading(self) -> dict[str, float]:
        """The models that are loaded here now, and the share of their bytes that is there."""
        loaders = {name: self._worker.loaders[name] for name in self.models}
        found = {
            name: each.loaded_share for name, each in (loaders | self.reloader.loading).items()
        }
        return {name: share for name, share in found.items() if share is not None}

    @property
    def _away(self) -> str | None:
        """Why there is no engine, and how far the next one is loaded."""
        return self._with_progress(self.engine.away)

    @property
    def _reload(self) -> str | None:
        """What a reload does, and how far it is, or why the old weights stay."""
        return self._with_progress(self.reloader.state)

    def _with_progress(self, said: str | None) -> str | None:
        if said is None:
            return None
        progress = "".join(f", {share:.0%} loaded" for share in self._loading.values())
        return said[: MOST_SHOWN - len(progress)] + progress

    def status(self) -> str:
        """The seat in one line."""
        stats = self.stats()
        if stats["away"]:
            return f"{stats['model']} on {stats['device']}: {stats['away']}"
        return (
            f"{stats['model']} on {stats['device']}: {stats['running']} running, "
            f"{stats['waiting']} waiting, {stats['tokens_per_s']:.0f} tokens/s"
        )

    def _note_end(self, job: EndedJob) -> None:
        if job.model != self.model:
            return  # another seat's
        self._window.add(job)
        self.engine.note_end(job)
        if self.changer is not None:
            self.changer.note_end(job)

    def _changed(self) -> None:
        self._claim_again()
        # Redis may be away, and the next engine shall not wait for it.
        threading.Thread(target=self.announcer.attempt, daemon=True).start()

    def _models_on_disk(self) -> Iterable[ModelCard]:
        """The worker's models that it has not loaded now, as far as their files say what they
        are."""
        settings = self._worker.settings
        config = settings.generation_config == "auto"
        loaded = {self.model, *(other.model for other in self._others())}
        return [
            ModelCard(
                name=name,
                max_context=loader.surveyed.max_context,
                queue_limit=settings.queue_limit,
                tenant_weights=settings.tenant_weights,
                generation_config=loader.surveyed.generation_config if config else {},
                tasks=tuple(loader.surveyed.tasks),
                last_seen=time.time(),
            )
            for name, loader in self._worker.loaders.items()
            if name not in loaded and loader.surveyed is not None
        ]

    def _card(self) -> WorkerCard:
        worker, engine = self._worker, self.engine
        settings, facts = worker.settings, engine.facts
        metrics_host, metrics_port = worker.metrics_address() or (None, None)
        return WorkerCard(
            hostname=worker.hostname,
            pid=os.getpid(),
            model=facts.model_name,
            models=tuple(worker.loaders) if len(worker.loaders) > 1 else (),
            fingerprint=facts.fingerprint,
            tenant_weights=settings.tenant_weights,
            max_context=facts.max_context,
            max_sequences=facts.max_sequences,
            queue_limit=settings.queue_limit,
            generation_config=(
                dict(facts.generation_config) if settings.generation_config == "auto" else {}
            ),
            tasks=facts.tasks,
            device=self.device,
            started_at=worker.started_at,
            last_seen=time.time(),
            engine=self.stats(),
            last_death=engine.last_death,
            last_death_at=engine.last_death_at,
            away=self._away,
            loading=self._loading,
            reload=self._reload,
            engine_pid=None if engine.away else engine.pid,
            recent=self._window.read(),
            metrics_host=metrics_host,
            metrics_port=metrics_port,
        )
