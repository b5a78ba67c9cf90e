"""OpenTelemetry's SDK with one exporter: OTLP over HTTP, in batches, from a thread of its own."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from kombu.log import get_logger
from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult

from llorch_worker import __version__
from llorch_worker.telemetry.traces.publishing import SCOPE

logger = get_logger(__name__)


class Provider(TracerProvider):
    """The process' tracer provider. The SDK itself reads the other ``OTEL_*``: sampler, limits,
    sizes of batches, headers and certificates of the collector."""

    def __init__(self, service: str, instance: str) -> None:
        named = {
            "service.name": service,
            "service.version": __version__,
            "service.instance.id": instance,
        }
        resource = Resource.create({**named, **OTELResourceDetector().detect().attributes})
        super().__init__(resource=resource, shutdown_on_exit=False)
        # While nobody receives it: some limits are read with the first span.
        self.get_tracer(SCOPE, __version__).start_span("first").end()
        self._outage = _Outage()
        self.add_span_processor(BatchSpanProcessor(_Exporter(self._outage)))

    def install(self) -> None:
        """Makes it the process' own."""
        # Its warnings come again and again while the collector is away, and quote headers that
        # producers have written.
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)
        exporter_logger = logging.getLogger(OTLPSpanExporter.__module__)
        exporter_logger.setLevel(logging.WARNING)
        exporter_logger.addFilter(self._outage)
        trace.set_tracer_provider(self)

    @property
    def collector_is_away(self) -> bool:
        return self._outage.lasts


class _Outage(logging.Filter):
    """Stands in for the exporter's log, which has a line or more for every batch: logs once that
    the collector is away, and once that it is back."""

    lasts = False

    def filter(self, record: logging.LogRecord) -> bool:
        if not self.lasts:
            self.lasts = True
            logger.warning("the collector takes no traces, will retry: %s", record.getMessage())
        return False

    def over(self) -> None:
        if self.lasts:
            self.lasts = False
            logger.info("the collector takes traces again")


class _Exporter(OTLPSpanExporter):
    def __init__(self, outage: _Outage) -> None:
        super().__init__()
        self._outage = outage

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._outage.over()
        return result
