"""OpenTelemetry's API in a process of ours, whatever ``OTEL_*`` says."""

from __future__ import annotations

import os
from typing import Any

from llorch_worker.telemetry.traces.faults import Refused, checking, refuse

_PROPAGATORS = "OTEL_PROPAGATORS"


def load() -> None:
    """Imports it before others do: its import raises for a propagator that is not installed.

    What it refuses, ``start_tracing`` logs, because there may be no log yet.
    """
    try:
        with checking():
            from opentelemetry import propagate, trace

            trace.get_tracer_provider()
    except ModuleNotFoundError:
        return
    except Refused as error:
        refuse(str(error), log=False)
        asked = os.environ.pop(_PROPAGATORS, None)
        try:
            from opentelemetry import propagate
        finally:
            if asked is not None:
                os.environ[_PROPAGATORS] = asked
    if not propagate.get_global_textmap().fields:
        propagate.set_global_textmap(_carrying_nothing())


def _carrying_nothing() -> Any:
    """What ``OTEL_PROPAGATORS=none`` means. OpenTelemetry's own returns None for a context, which
    nobody expects."""
    from opentelemetry.context import get_current
    from opentelemetry.propagators.composite import CompositePropagator

    class Nothing(CompositePropagator):
        def extract(self, carrier: Any, context: Any = None, getter: Any = None) -> Any:  # noqa: ARG002
            return get_current() if context is None else context

    return Nothing([])
