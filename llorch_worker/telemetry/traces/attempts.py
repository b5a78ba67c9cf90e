"""A span for each attempt at a job, with its wait in the queue, its prefill and its decode."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextvars import Token
from dataclasses import dataclass
from typing import Any

from celery import Task, signals, states
from opentelemetry import context, propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanContext, SpanKind, StatusCode

from llorch_worker import __version__
from llorch_worker.broker.jobs.claims import Claim
from llorch_worker.broker.jobs.held_claims import HELD_CLAIMS
from llorch_worker.broker.messages.message import ENQUEUED_AT, enqueue_time_s
from llorch_worker.broker.queues import normal_queue_of
from llorch_worker.contract import (
    REQUESTS,
    TASK_NAME,
    EmbedRequest,
    GenerationResult,
    JobResult,
    LlorchError,
    Timings,
)
from llorch_worker.telemetry.traces.faults import guarded, refusal
from llorch_worker.telemetry.traces.publishing import SCOPE, carried, message_attributes

_REQUEST_ATTRIBUTES = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "n": "gen_ai.request.choice.count",
}
"""Numbers only: stop strings, and whatever else is text, belong to the content."""


@dataclass(frozen=True)
class _Attempt:
    claim: Claim
    span: Span
    queue_parent: SpanContext
    """The message's producer; without one, the span itself."""
    token: Token[Context] | None
    """Takes the span's context off the thread."""
    began_ns: int
    """When the claim arrived: Unix time by this machine's clock."""
    enqueued_s: float | None


class AttemptSpans:
    """Celery's signals call it in the job's own thread, before the task and after its end is
    stored; the engine knows nothing of it."""

    def __init__(self) -> None:
        self._tracer = trace.get_tracer(SCOPE, __version__)
        # Those that carry a trace.
        self._headers = tuple(propagate.get_global_textmap().fields)

    def connect(self) -> None:
        signals.task_prerun.connect(self._begin)
        signals.task_postrun.connect(self._end)
        signals.before_task_publish.connect(self._carry_on)

    def disconnect(self) -> None:
        signals.task_prerun.disconnect(self._begin)
        signals.task_postrun.disconnect(self._end)
        signals.before_task_publish.disconnect(self._carry_on)

    def _carry_on(self, headers: dict[str, Any], **_: Any) -> None:
        """What a task sends, such as the next of its chain, belongs to the task's trace."""
        for name, value in carried().items():
            headers.setdefault(name, value)

    def _begin(self, task: Task, **_: Any) -> None:
        if refusal() is None:
            with guarded():
                self._start(task)

    def _start(self, task: Task) -> None:
        request = task.request
        claim = HELD_CLAIMS.get((request.properties or {}).get("delivery_tag", ""))
        if claim is None:
            return
        headers = {name: request.get(name) for name in self._headers}
        # Anyone may have written them.
        text = {name: value for name, value in headers.items() if isinstance(value, str)}
        parent = propagate.extract(text)
        instrumented = trace.get_current_span()
        if instrumented.is_recording():
            # opentelemetry-instrumentation-celery has made the consumer's span.
            parent = context.get_current()
        queue = normal_queue_of(claim.list_key)
        enqueued_s = enqueue_time_s(request.get(ENQUEUED_AT))
        began_ns = time.time_ns() - round((time.monotonic() - claim.taken_s) * 1e9)
        span = self._tracer.start_span(
            f"process {queue}",
            parent,
            SpanKind.INTERNAL if instrumented.is_recording() else SpanKind.CONSUMER,
            message_attributes("process", "process", queue, claim.job_id)
            | {"llorch.attempt": claim.attempt},
            start_time=began_ns,
        )
        # The instrumentation would take its own context off before ours.
        ours = trace.set_span_in_context(span, parent)
        token = None if instrumented.is_recording() else context.attach(ours)
        about = span.get_span_context()
        producer = trace.get_current_span(parent).get_span_context()
        # For the log. A job whose producer is not traced has its first trace id now.
        request.traceparent = f"00-{about.trace_id:032x}-{about.span_id:016x}-01"
        request.llorch_attempt = _Attempt(
            claim,
            span,
            producer if producer.is_valid else about,
            token,
            began_ns,
            enqueued_s,
        )

    def _end(
        self, task: Task, state: str | None, retval: Any, kwargs: Mapping[str, Any], **_: Any
    ) -> None:
        attempt = vars(task.request).pop("llorch_attempt", None)
        if not isinstance(attempt, _Attempt):  # a producer's headers are among these attributes
            return
        if attempt.token is not None:
            context.detach(attempt.token)
        with guarded():
            if attempt.span.is_recording():
                if task.name in REQUESTS:
                    self._record(attempt, task.name, state, retval, kwargs)
                elif state == states.FAILURE:
                    _fail(attempt.span, type(retval).__name__)
            attempt.span.end()

    def _record(
        self,
        attempt: _Attempt,
        task: str,
        state: str | None,
        end: Any,
        fields: Mapping[str, Any],
    ) -> None:
        claim, queued_ns = attempt.claim, _queued_ns(attempt)
        # A worker that died has not recorded the wait.
        if attempt.enqueued_s is not None and (claim.first or claim.attempt > 1):
            first_ns = attempt.began_ns - (claim.claimed_ms - claim.first_claimed_ms) * 1_000_000
            self._add_part("queue", attempt.queue_parent, queued_ns, first_ns)
        attributes: dict[str, Any] = {
            "gen_ai.provider.name": "llorch",
            "gen_ai.operation.name": _operation(task, fields),
        }
        if state is not None and not HELD_CLAIMS.has_ended(claim):
            # It was handed back, or another worker has taken it over.
            attributes["llorch.outcome"] = "continues elsewhere"
        elif isinstance(end, JobResult):
            attributes |= _of_request(fields) | _of_result(end)
            self._engine_parts(attempt.span, queued_ns, end.timings)
        elif state == states.IGNORED:
            attributes["llorch.outcome"] = "cancelled"
        else:
            attributes["llorch.outcome"] = "failed"
            _fail(attempt.span, end.code if isinstance(end, LlorchError) else "INTERNAL")
        attempt.span.set_attributes(attributes)

    def _engine_parts(self, attempt: Span, queued_ns: int, timings: Timings) -> None:
        parent = attempt.get_span_context()
        started_ns = queued_ns + round(timings.queue_ms * 1e6)
        first_ns = queued_ns + round(timings.first_token_ms * 1e6)
        self._add_part("prefill", parent, started_ns, first_ns)
        self._add_part("decode", parent, first_ns, first_ns + round(timings.decode_ms * 1e6))

    def _add_part(self, name: str, parent: SpanContext, start_ns: int, end_ns: int) -> None:
        """Adds a span that is over."""
        within = trace.set_span_in_context(trace.NonRecordingSpan(parent))
        self._tracer.start_span(name, within, start_time=start_ns).end(end_ns)


def _of_request(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        attribute: fields[name]
        for name, attribute in _REQUEST_ATTRIBUTES.items()
        if isinstance(fields.get(name), int | float)
    }


def _operation(task: str, fields: Mapping[str, Any]) -> str:
    """As OpenTelemetry names it; it has none for scores."""
    if task == TASK_NAME:
        return "chat" if "messages" in fields else "text_completion"
    return "embeddings" if task == EmbedRequest.task else task.rpartition(".")[2]


def _of_result(result: JobResult) -> dict[str, Any]:
    reasons = [result.ended]
    if isinstance(result, GenerationResult):
        reasons = [choice.finish_reason for choice in result.choices]
    return {
        "gen_ai.request.model": result.model,
        "gen_ai.response.finish_reasons": reasons,
        "gen_ai.usage.input_tokens": result.usage.prompt,
        "gen_ai.usage.cache_read.input_tokens": result.usage.cached,
        "gen_ai.usage.output_tokens": result.usage.completion,
        "llorch.outcome": reasons[0],
    }


def _queued_ns(attempt: _Attempt) -> int:
    """When the job was enqueued, as ``Delivery.queued_at_s`` gives it to the engine."""
    claimed_s, since_s = attempt.claim.claimed_ms / 1e3, attempt.enqueued_s
    if since_s is None:
        since_s = attempt.claim.first_claimed_ms / 1e3
    return attempt.began_ns - round(max(0.0, claimed_s - since_s) * 1e9)


def _fail(span: Span, code: str) -> None:
    # Without a message, which might quote the request.
    span.set_attribute("error.type", code)
    span.set_status(StatusCode.ERROR)
