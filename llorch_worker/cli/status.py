"""``llorch status``: workers, models and queues, or the state of one job."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from llorch_worker.cli.options import JsonOption, settings_options
from llorch_worker.cli.terminal.screen import Screen, harmless
from llorch_worker.contract.command_errors import CommandError
from llorch_worker.contract.quantities import counted
from llorch_worker.settings import Settings

if TYPE_CHECKING:
    from llorch_worker.broker.registry import ModelCard, WorkerCard
    from llorch_worker.broker.waiting import Waiting
    from llorch_worker.client import JobStatus

LATE_S = 2.0
"""A worker is silent once its next announcement is overdue by this much."""


@settings_options("redis_url")
def status(
    job: Annotated[str | None, typer.Argument(help="A job's id; without one, show all.")] = None,
    *,
    settings: Settings,
    as_json: JsonOption = False,
) -> None:
    """Show workers, models and queues, or the state of one job."""
    screen = Screen(as_json=as_json)
    url = settings.redis_url
    if job is not None:
        _show_job(screen, url, job)
        return
    from llorch_worker.broker.cluster import Cluster

    with Cluster(url) as cluster:
        workers = cluster.figures(cluster.workers())
        models = cluster.models()
        waiting = {model.name: cluster.waiting(model.name) for model in models}
        unserved = cluster.unserved_queues()
        dead = cluster.dead_letters()
    if as_json:
        screen.document(
            {
                "workers": [worker.model_dump(mode="json") for worker in workers],
                "models": [
                    model.model_dump(mode="json")
                    | {
                        "queued": waiting[model.name].jobs,
                        "suspects": waiting[model.name].suspects,
                        "direct": waiting[model.name].direct,
                        "scheduled": waiting[model.name].scheduled,
                    }
                    for model in models
                ],
                "unserved_queues": unserved,
                "dead_letters": dead,
            }
        )
        return
    _show_workers(screen, workers)
    _show_models(screen, models, waiting, workers)
    _show_unserved(screen, unserved)
    if dead:
        screen.out.print()
        screen.out.print(f"[yellow]{counted(dead, 'dead letter')}[/]: see llorch dead list")


def _show_workers(screen: Screen, workers: list[WorkerCard]) -> None:
    from rich.table import Table

    from llorch_worker.broker.registry import ANNOUNCE_INTERVAL_S

    if not workers:
        screen.out.print("No worker is running; start one with llorch worker or llorch up.")
        return
    table = Table("worker", "model", "device", box=None, header_style="dim", pad_edge=False)
    now_s = time.time()
    # A killed worker stays listed until its announcement expires.
    silent = any(now_s - worker.last_seen > ANNOUNCE_INTERVAL_S + LATE_S for worker in workers)
    for title in ("running", "waiting", "tokens/s", "KV used", *(["last seen"] * silent)):
        table.add_column(title, justify="right")
    for worker in workers:
        engine = worker.engine
        total, free = engine.get("kv_blocks_total", 0), engine.get("kv_blocks_free", 0)
        table.add_row(
            worker.hostname,
            worker.model,
            worker.device,
            f"{engine.get('running', 0)}/{worker.max_sequences}",
            str(engine.get("waiting", 0)),
            f"{engine.get('tokens_per_s', 0):.0f}",
            f"{(total - free) / total:.0%}" if total else "-",
            *([ago(now_s - worker.last_seen)] * silent),
        )
    screen.wide.print(table)


def _show_models(
    screen: Screen,
    models: list[ModelCard],
    waiting: dict[str, Waiting],
    workers: list[WorkerCard],
) -> None:
    from rich.table import Table

    if not models:
        return
    table = Table("model", "queue", box=None, header_style="dim", pad_edge=False)
    for title in ("context", "workers", "queued", "last seen"):
        table.add_column(title, justify="right")
    for model in models:
        serving = sum(worker.model == model.name for worker in workers)
        depth = waiting[model.name].jobs
        table.add_row(
            model.name,
            f"llorch.{model.name}",
            f"{model.max_context:,}",
            str(serving),
            f"[yellow]{depth}[/]" if depth and not serving else str(depth),
            "now" if serving else ago(time.time() - model.last_seen),
        )
    screen.out.print()
    screen.wide.print(table)
    for name, jobs in waiting.items():
        if jobs.scheduled:
            screen.out.print(f"{counted(jobs.scheduled, 'job')} of {name} for a later time (ETA)")
        if jobs.suspects:
            screen.out.print(
                f"[yellow]{counted(jobs.suspects, 'suspect')}[/] of {name} may have killed a "
                "worker: a worker runs only some of them at a time",
                soft_wrap=True,
            )


def _show_unserved(screen: Screen, queues: dict[str, int]) -> None:
    from rich.markup import escape

    if queues:
        screen.out.print()
    for queue, jobs in queues.items():
        wait = "job waits" if jobs == 1 else "jobs wait"
        screen.out.print(
            f"{escape(harmless(queue))}: [yellow]{jobs:,} {wait}[/], no worker serves it",
            soft_wrap=True,
        )


def ago(seconds: float) -> str:
    """A time in the past: ``5 min ago``."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{max(seconds, 0):.0f} s ago"


def _show_job(screen: Screen, url: str, job_id: str) -> None:
    from llorch_worker.client import Client

    with Client(url) as client:
        found: JobStatus = client.job(job_id).status()
    if found.state == "unknown":
        raise unknown_job(job_id)
    if screen.as_json:
        screen.document(
            {
                "id": found.id,
                "state": found.state,
                "worker": found.worker,
                "error": found.error.model_dump(mode="json") if found.error else None,
            }
        )
        return
    by = f" by {found.worker}" if found.worker else ""
    why = f": {found.error.code}: {found.error.message}" if found.error else ""
    screen.line(f"{found.id} {found.state}{by}{why}")


def unknown_job(job_id: str) -> CommandError:
    """The error for an id of which Redis has no trace."""
    return CommandError(
        "UNKNOWN_JOB",
        f"no job {job_id[:80]!r}; llorch submit prints ids, results are kept for a day, and a job "
        "from another producer is known once a worker takes it",
    )
