"""Enqueues a job, of which a signal meanwhile leaves nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from uuid import uuid4

from llorch_worker.cli.terminal.interrupts import deaf
from llorch_worker.contract import GenerationRequest

if TYPE_CHECKING:
    from llorch_worker.client import Client, Job


def enqueue(client: Client, request: GenerationRequest, **options: Any) -> Job:
    """As :meth:`.Client.submit`; a job whose id nobody has learned is cancelled."""
    job_id = str(uuid4())
    try:
        return client.submit(request, job_id=job_id, **options)
    except (KeyboardInterrupt, SystemExit):
        # It may be in its queue already.
        with deaf():
            client.job(job_id).cancel()
        raise
