"""The span of a job's enqueueing, and the headers that carry its trace to the worker."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from llorch_worker import __version__
from llorch_worker.broker.queues import normal_queue
from llorch_worker.contract import LlorchError
from llorch_worker.telemetry.traces.faults import guarded, refusal

SCOPE = "llorch_worker"


@contextmanager
def publishing(model: str, job_id: str) -> Iterator[dict[str, str]]:
    """Wraps the enqueueing of a job; yields the headers for its message.

    The span goes to the tracer provider of the caller's process, if it has one. Without
    OpenTelemetry there are no headers.
    """
    if not _is_usable():
        yield {}
        return
    from opentelemetry import context, trace

    queue = normal_queue(model)
    span: trace.Span = trace.INVALID_SPAN
    token = None
    with guarded():
        span = trace.get_tracer(SCOPE, __version__).start_span(
            f"publish {queue}",
            kind=trace.SpanKind.PRODUCER,
            attributes=message_attributes("publish", "send", queue, job_id),
        )
        token = context.attach(trace.set_span_in_context(span))
    try:
        yield carried()
    except Exception as error:
        # Without a message, which belongs to the caller.
        code = error.code if isinstance(error, LlorchError) else type(error).__name__
        with guarded():
            span.set_attribute("error.type", code)
            span.set_status(trace.StatusCode.ERROR)
        raise
    finally:
        if token is not None:
            context.detach(token)
        with guarded():
            span.end()


def carried() -> dict[str, str]:
    """The headers that carry the current trace on: ``traceparent`` and ``tracestate``, unless
    ``OTEL_PROPAGATORS`` names others. Empty without OpenTelemetry."""
    headers: dict[str, str] = {}
    if _is_usable():
        with guarded():
            from opentelemetry import propagate

            propagate.inject(headers)
    return headers


def _is_usable() -> bool:
    return "opentelemetry.trace" in sys.modules and refusal() is None


def message_attributes(name: str, kind: str, queue: str, job_id: str) -> dict[str, str]:
    """The attributes of a span about a message, by the conventions for messaging."""
    return {
        "messaging.system": "celery",
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": queue,
        "messaging.message.id": job_id,
    }
