"""``llorch worker``: one worker in the foreground."""

from __future__ import annotations

import os

from llorch_worker.cli import extras
from llorch_worker.cli.options import (
    DeviceOption,
    DtypeOption,
    KvCacheBytesOption,
    MaxContextOption,
    MaxSequencesOption,
    MaxStepTokensOption,
    ModelFileOption,
    ModelNameOption,
    RedisOption,
    settings_from,
    worker_hostname,
)
from llorch_worker.cli.screen import Screen


def worker(
    model: ModelFileOption = None,
    name: ModelNameOption = None,
    device: DeviceOption = None,
    dtype: DtypeOption = None,
    max_sequences: MaxSequencesOption = None,
    max_context: MaxContextOption = None,
    max_step_tokens: MaxStepTokensOption = None,
    kv_cache_bytes: KvCacheBytesOption = None,
    redis: RedisOption = None,
) -> None:
    """Run one worker here: one process, one device, one resident model.

    SIGTERM or Ctrl-C drains: what runs is finished, nothing new is taken.
    """
    settings = settings_from(
        model=model,
        model_name=name,
        device=device,
        dtype=dtype,
        max_sequences=max_sequences,
        max_context=max_context,
        max_step_tokens=max_step_tokens,
        kv_cache_bytes=kv_cache_bytes,
        redis_url=redis,
    )
    extras.require("worker")
    from llorch_worker.cli.cluster import Cluster
    from llorch_worker.cli.model_report import report
    from llorch_worker.worker.main import run_worker

    # A running worker waits for a Redis that went away; one that was never there is a typo. And a
    # model that cannot load is told in one sentence, before Celery begins to log.
    with Cluster(settings.redis_url) as cluster:
        cluster.ping()
    report(settings)
    with Screen().bar(f"loading {settings.served_name}", "bytes") as progress:
        run_worker(
            settings, hostname=worker_hostname(settings, os.getpid()), on_load_progress=progress
        )
