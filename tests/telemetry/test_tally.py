"""A tally counts as Prometheus' own histogram does."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from llorch_worker.engine.interface import STEP_TOKENS
from llorch_worker.engine.stats import TallyCounts
from llorch_worker.telemetry.metrics.buckets import FIRST_TOKEN_S, REQUEST_S
from llorch_worker.telemetry.metrics.worker_metrics import buckets

# Bounds among them: a bucket holds the values up to its bound, the bound included.
VALUES = st.one_of(
    st.floats(0, 1e5), st.sampled_from([*FIRST_TOKEN_S, *REQUEST_S, *map(float, STEP_TOKENS)])
)


@given(st.lists(st.tuples(VALUES, st.integers(1, 5))))
def test_a_tally_and_a_histogram_agree(values: list[tuple[float, int]]) -> None:
    for bounds in (FIRST_TOKEN_S, STEP_TOKENS):
        registry = CollectorRegistry()
        histogram = Histogram("h", "h", registry=registry, buckets=bounds)
        counts = TallyCounts(bounds)
        for value, times in values:
            counts.add(value, times)
            for _ in range(times):
                histogram.observe(value)
        tally = counts.read()
        assert tally.count == registry.get_sample_value("h_count")
        for bound, count in buckets(tally, bounds):
            assert count == registry.get_sample_value("h_bucket", {"le": bound}), bound
