"""``llorch worker``: one worker in the foreground."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import llorch_worker
from llorch_worker.cli.options import (
    DeviceOption,
    DtypeOption,
    JsonOption,
    KvCacheBytesOption,
    KvDtypeOption,
    MaxContextOption,
    MaxSequencesOption,
    MaxStepTokensOption,
    ModelFileOption,
    ModelNameOption,
    PrefixCachingOption,
    RedisOption,
    queue_of,
    settings_from,
)
from llorch_worker.cli.terminal import extras
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.contract.command_errors import CommandError


def _refuse_other_tasks() -> None:
    """A team that uses Celery often has ``tasks`` of its own, and the path says which is found."""
    found = find_spec("tasks")
    origin = None if found is None else found.origin
    ours = Path(llorch_worker.__file__).parents[1] / "tasks" / "__init__.py"
    if origin is None or Path(origin) != ours:
        raise CommandError(
            "HIDDEN_PACKAGE",
            f"{origin or 'nothing'} is found where this worker's own package tasks should be; take "
            "its folder off PYTHONPATH, or run llorch worker without it",
        )


def worker(
    model: ModelFileOption = None,
    name: ModelNameOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    kv_dtype: KvDtypeOption = None,
    max_sequences: MaxSequencesOption = None,
    max_context: MaxContextOption = None,
    max_step_tokens: MaxStepTokensOption = None,
    kv_cache_bytes: KvCacheBytesOption = None,
    prefix_caching: PrefixCachingOption = None,
    redis: RedisOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run one worker here: one process, one device, one resident model.

    On a card it is the only worker, and is called after it: gpu0@host. SIGTERM or Ctrl-C drains:
    what runs is finished, nothing new is taken. With --json, its name and queue are printed once
    it takes jobs; the log goes to stderr in any case.
    """
    settings = settings_from(
        model=model,
        model_name=name,
        device=device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        max_sequences=max_sequences,
        max_context=max_context,
        max_step_tokens=max_step_tokens,
        kv_cache_bytes=kv_cache_bytes,
        prefix_caching=prefix_caching,
        redis_url=redis,
    )
    extras.require("worker")
    _refuse_other_tasks()
    from llorch_worker.broker.cluster import Cluster

    # A running worker waits for a Redis that went away; one that was never there is a typo.
    with Cluster(settings.redis_url) as cluster:
        cluster.ping()

    from celery.signals import worker_ready

    from llorch_worker.worker.card.assignment import assign_device
    from llorch_worker.worker.main import run_worker, worker_hostname

    # Before torch is loaded, which sees the cards that are visible at that moment.
    assignment = assign_device(settings.device, settings.device_locks)
    from llorch_worker.engine.memory.load_plan import plan_load  # loads torch

    # Says in one sentence why a model cannot load, before Celery begins to log.
    options = settings.engine_options | {"device": assignment.device}
    plan_load(settings.model, **options).require_fit()
    screen = Screen(as_json=as_json)
    card = None if assignment.card is None else assignment.card.name
    hostname = worker_hostname(settings, os.getpid(), card)

    def announce(**_: Any) -> None:
        screen.document(
            {"hostname": hostname, "model": settings.served_name, "queue": queue_of(settings)}
        )

    if as_json:
        worker_ready.connect(announce)
    run_worker(
        settings,
        hostname=hostname,
        on_load_progress=screen.loading_bar(f"loading {settings.served_name}"),
        assignment=assignment,
    )
