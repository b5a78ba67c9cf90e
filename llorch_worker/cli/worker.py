"""``llorch worker``: one worker in the foreground."""

from __future__ import annotations

import os
from typing import Any

from llorch_worker.cli.options import WORKER_SETTINGS, JsonOption, settings_of_one_worker
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.settings import Settings


@settings_of_one_worker("device", *WORKER_SETTINGS, "models_folder", "resident", "pin")
def worker(settings: Settings, as_json: JsonOption = False) -> None:
    """Run one worker here: one process, one device, one model.

    With several --model it keeps one of them loaded, or --resident, and changes as the jobs that
    wait ask for.

    A GPU has at most one worker, which is named after it: gpu0@host. SIGTERM or Ctrl-C drains: the
    worker finishes its running jobs and takes no new ones. With --json, it prints its name and
    queue once it takes jobs. The log always goes to stderr.
    """
    for each in settings.of_each_model:
        extras.require("worker" if each.engine_url is None else "server")
    if settings.metrics_port is not None:
        extras.require("metrics")
    from llorch_worker.broker.figures.fleet_client import FleetClient

    # A running worker waits if Redis goes away, but a Redis that never answered may be a typo.
    with FleetClient(settings.redis_url) as client:
        client.ping()

    from celery.signals import worker_ready

    from llorch_worker.broker.queues import normal_queue
    from llorch_worker.worker.card.assignment import assign_device
    from llorch_worker.worker.main import run_worker, worker_hostname

    assignment = None
    if settings.computes_here:
        # Before the engine's process loads torch, which sees only the cards that are visible then.
        assignment = assign_device(settings.device, settings.device_locks)
    screen = Screen(as_json=as_json)
    card = None if assignment is None or assignment.card is None else assignment.card.name
    hostname = worker_hostname(settings, os.getpid(), card)
    model = settings.served_names[0]

    def announce(**_: Any) -> None:
        screen.document(
            {
                "hostname": hostname,
                "model": model,
                "queue": normal_queue(model),
                "models": settings.served_names,
            },
            indent=None,
        )

    if as_json:
        worker_ready.connect(announce)
    run_worker(
        settings,
        hostname=hostname,
        on_load_progress=screen.loading_bar(f"loading {model}"),
        assignment=assignment,
    )
