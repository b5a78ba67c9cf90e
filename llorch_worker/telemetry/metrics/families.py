"""Families of metrics that are read when Prometheus asks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

Values = Iterable[tuple[Sequence[str], float]]
"""The labels of each series, and its value."""


def gauge(name: str, help: str, labels: Sequence[str], values: Values) -> Metric:
    return _filled(GaugeMetricFamily(f"llorch_{name}", help, labels=labels), values)


def counter(name: str, help: str, labels: Sequence[str], values: Values) -> Metric:
    return _filled(CounterMetricFamily(f"llorch_{name}", help, labels=labels), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for labels, value in values:
        family.add_metric(labels, value)
    return family
