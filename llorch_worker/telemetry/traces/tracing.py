"""Whether this process is traced, and where to. Without ``OTEL_*``, no SDK is imported."""

from __future__ import annotations

import os
import sys
from threading import Thread
from typing import TYPE_CHECKING

from llorch_worker.contract import shown
from llorch_worker.contract.installing import install_command
from llorch_worker.telemetry.traces import api, faults

if TYPE_CHECKING:
    from llorch_worker.telemetry.traces.collector import Provider

FLUSH_S = 3.0
"""How long a process that ends waits for its last spans to leave."""
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")


class Tracing:
    """What a process that sends spans closes at its end."""

    def __init__(self, provider: Provider | None = None) -> None:
        self._provider = provider

    def close(self) -> None:
        """Sends what is left, for at most :data:`FLUSH_S`, unless the collector is away."""
        if self._provider is not None:
            flushing = Thread(target=self._provider.shutdown, name="llorch-spans", daemon=True)
            flushing.start()
            flushing.join(0 if self._provider.collector_is_away else FLUSH_S)


def start_tracing(service: str, instance: str) -> Tracing:
    """Sends the spans of this process to the collector that ``OTEL_*`` names.

    ``service`` and ``instance`` name the process, unless ``OTEL_SERVICE_NAME`` or
    ``OTEL_RESOURCE_ATTRIBUTES`` do. If something else has already set up OpenTelemetry here, as
    ``opentelemetry-instrument`` does, spans go where that sends them.
    """
    asked = _asked()
    if asked is not None:
        api.load()
    if (refusal := faults.refusal()) is not None:
        faults.refuse(refusal)
    elif asked is not None and not is_traced():
        try:
            return Tracing(_provider(service, instance))
        except ModuleNotFoundError:
            missing = f"{asked} is set, but the extra is missing: {install_command('otel')}"
            faults.refuse(missing)
        except faults.Refused as error:
            faults.refuse(str(error))
    return Tracing()


def _provider(service: str, instance: str) -> Provider:
    if (refusal := _refusal()) is not None:
        raise faults.Refused(refusal)
    faults.check_values()
    with faults.checking():
        from llorch_worker.telemetry.traces.collector import Provider

        provider = Provider(service, instance)
    provider.install()
    return provider


def is_traced() -> bool:
    """Whether spans of this process go anywhere."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None or faults.refusal() is not None:
        return False
    found: object = None
    with faults.guarded():
        found = trace.get_tracer_provider()
    return found is not None and not isinstance(found, trace.ProxyTracerProvider)


def _asked() -> str | None:
    """The variable that asks for traces; None if none does."""
    if _value("OTEL_SDK_DISABLED") == "true" or _value("OTEL_TRACES_EXPORTER") == "none":
        return None
    names = ("OTEL_TRACES_EXPORTER", *_ENDPOINTS)
    return next((name for name in names if _value(name)), None)


def _refusal() -> str | None:
    exporter = _value("OTEL_TRACES_EXPORTER") or "otlp"
    if exporter != "otlp":
        return f"OTEL_TRACES_EXPORTER={shown(exporter)} is not supported; allowed: otlp, none"
    name = next(filter(_value, _PROTOCOLS), None)
    if name is not None and _value(name) != "http/protobuf":
        return (
            f"{name}={shown(_value(name))} is not supported: give the collector's port for OTLP "
            "over HTTP, often 4318, and unset the variable"
        )
    return None


def _value(name: str) -> str:
    return os.environ.get(name, "").strip().lower()
