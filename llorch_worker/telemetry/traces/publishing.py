"""The span of a job's enqueueing, and the headers that carry its trace to the worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from llorch_worker import __version__
from llorch_worker.broker.queues import normal_queue
from llorch_worker.contract import LlorchError

SCOPE = "llorch_worker"


@contextmanager
def publishing(model: str, job_id: str) -> Iterator[dict[str, str]]:
    """Wraps the enqueueing of a job; yields the headers for its message.

    The span goes to the tracer provider of the caller's process, if it has one. Without
    OpenTelemetry there are no headers.
    """
    if "opentelemetry.trace" not in sys.modules:
        yield {}
        return
    from opentelemetry import trace

    queue = normal_queue(model)
    tracer = trace.get_tracer(SCOPE, __version__)
    with tracer.start_as_current_span(
        f"publish {queue}",
        kind=trace.SpanKind.PRODUCER,
        attributes=message_attributes("publish", "send", queue, job_id),
        # An error's message belongs to the caller.
        record_exception=False,
        set_status_on_exception=False,
    ) as span:
        try:
            yield carried()
        except Exception as error:
            code = error.code if isinstance(error, LlorchError) else type(error).__name__
            span.set_attribute("error.type", code)
            span.set_status(trace.StatusCode.ERROR)
            raise


def carried() -> dict[str, str]:
    """The headers that carry the current trace on: ``traceparent`` and ``tracestate``, unless
    ``OTEL_PROPAGATORS`` names others. Empty without OpenTelemetry."""
    headers: dict[str, str] = {}
    if "opentelemetry.trace" in sys.modules:
        from opentelemetry import propagate

        propagate.inject(headers)
    return headers


def message_attributes(name: str, kind: str, queue: str, job_id: str) -> dict[str, str]:
    """The attributes of a span about a message, by the conventions for messaging."""
    return {
        "messaging.system": "celery",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": queue,
        "messaging.message.id": job_id,
    }
