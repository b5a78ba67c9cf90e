"""Workers, models and what is wrong with them, as ``status`` and ``top`` show them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from llorch_worker.broker.fleet.recent_jobs import Durations, percentile_ms
from llorch_worker.broker.queues import normal_queue
from llorch_worker.broker.waiting.waiting import remedy_for
from llorch_worker.contract import printable
from llorch_worker.contract.quantities import counted, human_ms, human_time

if TYPE_CHECKING:
    from llorch_worker.broker.figures.fleet import Fleet, ModelLoad
    from llorch_worker.broker.figures.listed_jobs import ListedJob
    from llorch_worker.broker.fleet.registry import WorkerCard
    from llorch_worker.broker.waiting.waiting import Queue
    from llorch_worker.cli.fleet_reading import Reading

NOTHING = "-"
_ID_CHARS = 8
LATELY_S = 900.0
"""For so long an engine's death is told."""

ModelColumns = Sequence[tuple[str, "Callable[[ModelLoad], str | Text]"]]


def _table(words: Sequence[str], figures: Sequence[str]) -> Table:
    """An empty table that shortens or wraps words before it cuts a figure."""
    made = Table(*words, box=None, header_style="dim", pad_edge=False)
    for title in figures:
        made.add_column(title, justify="right", no_wrap=True)
    return made


def _name(text: str, *, cut: bool = False) -> Text:
    """A name that others chose: neither markup nor invisible characters."""
    return Text(printable(text), overflow="ellipsis" if cut else "fold", no_wrap=cut)


def workers_table(workers: Sequence[WorkerCard], *, narrow: bool = False) -> Table:
    """A row for each worker, which is named after its card. ``narrow``: a line, on which names may
    be cut. 80 columns hold all figures."""
    drafted = _drafted(workers)
    seen = ["last seen"] if any(worker.silent for worker in workers) else []
    made = _table(
        ("worker", "model"),
        ("running", "tokens/s", "KV used", "cached", *drafted, *seen),
    )
    for worker in workers:
        made.add_row(
            _name(worker.hostname, cut=narrow),
            _name(_model(worker), cut=narrow),
            _running(worker.running, worker.max_sequences, worker.waiting),
            f"{worker.tokens_per_s:,.0f}",
            _percent(worker.kv_used),
            _percent(worker.recent.cache_hits),
            *(_percent(worker.recent.draft_hits) for _ in drafted),
            *(f"{_silence(worker)} ago" for _ in seen),
            style="red" if worker.silent or worker.away else None,
        )
    return made


def _model(worker: WorkerCard) -> str:
    """The loaded one, and of how many."""
    several = len(worker.models)
    return f"{worker.model} (of {several})" if several > 1 else worker.model


def _drafted(workers: Sequence[WorkerCard]) -> list[str]:
    """The column for tokens that were guessed, if a worker guesses."""
    guesses = any(worker.recent.draft_hits is not None for worker in workers)
    return ["drafted"] if guesses else []


def _running(running: int, slots: int, preempting: int) -> str:
    return f"{running:,}/{slots:,}" + (f" +{preempting:,}" if preempting else "")


def _silence(worker: WorkerCard) -> str:
    return human_time(time.time() - worker.last_seen)


def _percent(share: float | None) -> str:
    return NOTHING if share is None else f"{share:.0%}"


def _queue(queue: Queue) -> str:
    if queue.oldest_s is None:
        return f"{queue.jobs:,}"
    return f"{queue.jobs:,} ({human_time(queue.oldest_s)})"


def _saturation(load: ModelLoad) -> Text:
    if load.saturation is None:
        return Text(NOTHING, "red" if load.waiting else "")
    return Text(f"{load.saturation:.2f}", "yellow" if load.saturation > 1 else "")


def _percentiles(durations: Durations) -> str:
    p50, p95 = (percentile_ms(durations, share) for share in (0.5, 0.95))
    return NOTHING if p50 is None or p95 is None else f"{human_ms(p50)} / {human_ms(p95)}"


WORKERS: ModelColumns = (("workers", lambda load: f"{load.workers}"),)
WORK: ModelColumns = (
    ("running", lambda load: _running(load.running, load.slots, load.preempting)),
    ("high", lambda load: _queue(load.queues["high"])),
    ("normal", lambda load: _queue(load.queues["normal"])),
    ("low", lambda load: _queue(load.queues["low"])),
    ("saturation", _saturation),
)
"""What a model has to do: jobs by priority, with the age of the oldest."""
RECENT: ModelColumns = (
    ("tokens/s", lambda load: f"{load.tokens_per_s:,.0f}"),
    ("jobs/min", lambda load: f"{load.recent.jobs_per_min:,.0f}"),
    ("first token p50/p95", lambda load: _percentiles(load.recent.first_token_ms)),
    ("whole job p50/p95", lambda load: _percentiles(load.recent.e2e_ms)),
)
"""What became of its jobs in the last minutes."""


def jobs_table(jobs: Sequence[ListedJob]) -> Table:
    """A line for each job that runs or waits."""
    made = _table(("job", "state", "model", "tenant", "worker"), ("age", "tokens"))
    for job in jobs:
        waits = f"place {job.place:,}" if job.place else job.state
        made.add_row(
            _name(job.id[:_ID_CHARS], cut=True),
            Text(waits if job.priority == "normal" else f"{waits}, {job.priority}", no_wrap=True),
            _name(job.model, cut=True),
            _name(job.tenant or job.owner or NOTHING, cut=True),
            _name(job.worker or NOTHING, cut=True),
            NOTHING if job.age_s is None else human_time(job.age_s),
            NOTHING if job.tokens is None else f"{job.tokens:,}",
        )
    return made


def loads_table(models: Sequence[ModelLoad], columns: ModelColumns) -> Table:
    """A line for each model, with what ``columns`` say of it."""
    made = _table(["model"], [title for title, _ in columns])
    for load in models:
        made.add_row(_name(load.model, cut=True), *(cell(load) for _, cell in columns))
    return made


def models_table(models: Sequence[ModelLoad]) -> Table:
    """A row for each model: its queue, and how much waits in it."""
    seen = ["last seen"] if any(not load.workers for load in models) else []
    made = _table(("model", "queue"), ("workers", "queued", "oldest", *seen))
    for load in models:
        ages = [queue.oldest_s for queue in load.queues.values() if queue.oldest_s is not None]
        made.add_row(
            _name(load.model),
            _name(normal_queue(load.model)),
            f"{load.workers}",
            Text(f"{load.waiting:,}", "yellow" if load.waiting and not load.workers else ""),
            human_time(max(ages)) if ages else NOTHING,
            *(
                "now" if load.workers else f"{human_time(time.time() - load.card.last_seen)} ago"
                for _ in seen
            ),
        )
    return made


def summary(fleet: Fleet) -> Text:
    """What all workers do together, on a line."""
    slots = sum(load.slots for load in fleet.models)
    running = sum(load.running for load in fleet.models)
    preempting = sum(load.preempting for load in fleet.models)
    waiting = sum(load.waiting for load in fleet.models)
    tokens_per_s = sum(load.tokens_per_s for load in fleet.models)
    more = f", {preempting:,} preempting" if preempting else ""
    return Text(
        f"{counted(fleet.worker_count, 'worker')}  {running:,} of {slots:,} running{more}  "
        f"{waiting:,} waiting  {tokens_per_s:,.0f} tokens/s"
    )


def silence(workers: Sequence[WorkerCard]) -> Iterator[Text]:
    """A sentence for all silent workers, whose own lines may not be on the screen."""
    if silent := {worker.hostname: worker for worker in workers if worker.silent}:
        last = min(silent.values(), key=lambda worker: worker.last_seen)
        others = f", and {len(silent) - 1} more" if len(silent) > 1 else ""
        seen = f": {last.hostname}, last seen {_silence(last)} ago{others}"
        yield _warning(counted(len(silent), "silent worker"), seen)


def notices(reading: Reading) -> Iterator[Text]:
    """A sentence for each thing that somebody may have to look at, the most urgent first."""
    fleet = reading.fleet
    if not fleet.workers:
        yield Text("No worker is running; start one with llorch worker or llorch up.")
    for load in fleet.models:
        if load.waiting and not load.workers:
            yield _waits(load.model, load.waiting)
    for load in fleet.models:
        if load.orphaned:
            rest = f" of {load.model}: another worker takes over when the lease ends"
            yield _warning(f"{counted(load.orphaned, 'job')} of a silent worker", rest)
    servers = {(card.model, card.device): card for card in fleet.workers if card.weakens}
    for card in servers.values():
        weakened = f"{card.model} is computed by {card.device}: {'; '.join(card.weakens)}."
        yield Text(printable(weakened))
    if (late_s := max((card.late_s for card in fleet.workers), default=0.0)) > 0:
        rest = f": a model may wait {human_time(late_s)} longer than LLORCH_MAX_WAIT_S"
        yield _warning("too few workers for their models", rest)
    models = [load.model for load in fleet.models]
    for queue, count in fleet.unserved.items():
        yield _waits(queue, count, remedy_for(queue, models))
    for load in fleet.models:
        for sentence in load.wrong_keys:
            yield _warning("stopped queue", f" of {load.model}: {sentence}")
        if load.mixture:
            yield _warning("mixed models", f": {load.mixture}")
    if fleet.dead_letters:
        yield _warning(counted(fleet.dead_letters, "dead letter"), ": see llorch dead list")
    yield from _engines(fleet.workers)
    for load in fleet.models:
        if load.suspects:
            rest = " may have killed an engine: a worker runs one of them at a time"
            yield _warning(counted(load.suspects, "suspect"), f" of {load.model}{rest}")
    for load in fleet.models:
        if load.recent.failed:
            rest = f" of {load.model} among the last {load.recent.ended:,}"
            yield _warning(counted(load.recent.failed, "failed job"), rest)
    for load in fleet.models:
        if load.scheduled:
            jobs = counted(load.scheduled, "job")
            yield Text(f"{jobs} of {printable(load.model)} for a later time (ETA)")


def _engines(workers: Sequence[WorkerCard]) -> Iterator[Text]:
    """A sentence for all workers without an engine, and one for those that have had another one
    for a short time."""
    away = [(worker, worker.away) for worker in workers if worker.away]
    died = [
        (worker, f"{human_time(worker.died_s)} ago ({worker.last_death})")
        for worker in sorted(workers, key=lambda worker: worker.died_s)
        if not worker.away and worker.died_s < LATELY_S
    ]
    told = [(worker, worker.reload) for worker in workers if worker.reload]
    for what, found in (
        ("without an engine", away),
        ("told to reload", told),
        ("whose engine was lost and is back", died),
    ):
        if found:
            worker, why = found[0]
            others = f", and {len(found) - 1} more" if len(found) > 1 else ""
            yield _warning(
                f"{counted(len(found), 'worker')} {what}", f": {worker.hostname}, {why}{others}"
            )


def _waits(queue: str, jobs: int, what_to_do: str = "") -> Text:
    wait = "job waits" if jobs == 1 else "jobs wait"
    more = f"; {printable(what_to_do)}" if what_to_do else ""
    return Text.assemble(
        f"{printable(queue)}: ", (f"{jobs:,} {wait}", "yellow"), f", no worker serves it{more}"
    )


def _warning(what: str, rest: str) -> Text:
    return Text.assemble((what, "yellow"), printable(rest))
