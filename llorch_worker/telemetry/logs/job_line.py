"""The one line of a job in a log of JSON documents."""

from __future__ import annotations

import logging
from typing import Any

from kombu.log import get_logger

from llorch_worker.broker.jobs.ended_jobs import EndedJob

logger = get_logger(__name__)


def log_job(job: EndedJob) -> None:
    """Logs how ``job`` ended; an observer of ``ENDED_JOBS``."""
    fields: dict[str, Any] = {
        "job_id": job.id,
        "model": job.model,
        "worker": job.worker,
        "attempt": job.attempts,
        "outcome": job.outcome,
    }
    if job.trace_id is not None:
        fields["trace_id"] = job.trace_id
    if job.error is not None:
        fields["error"] = job.error
    if job.usage is not None:
        fields |= {
            "prompt_tokens": job.usage.prompt,
            "cached_tokens": job.usage.cached,
            "completion_tokens": job.usage.completion,
        }
    if job.resumed:
        # Its times would be those of the last attempt.
        fields["resumed"] = True
    elif (timings := job.timings) is not None:
        fields |= {
            "queue_ms": round(timings.queue_ms, 1),
            "prefill_ms": round(timings.prefill_ms, 1),
            "first_token_ms": round(timings.first_token_ms, 1),
            "decode_ms": round(timings.decode_ms, 1),
        }
    logger.info("job ended: %s", job.error or job.outcome, extra={"fields": fields})


def is_of_celery(record: logging.LogRecord) -> bool:
    """Whether Celery's line says that a generation was received or how it ended."""
    data = getattr(record, "data", None)
    # A producer may have given the task another name, its shadow. Celery's own are not generations.
    named = isinstance(data, dict) and not str(data.get("name", "celery.")).startswith("celery.")
    return named and record.levelno == logging.INFO
