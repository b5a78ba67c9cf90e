"""Percentiles of many workers' jobs, from counts that add up."""

from __future__ import annotations

from random import Random
from statistics import quantiles

import pytest

from llorch_worker.broker.fleet.recent_jobs import RecentJobs, by_bucket, percentile_ms, total


@pytest.mark.parametrize("seed", range(5))
def test_a_percentile_of_several_workers_is_within_10_percent_of_the_true_one(seed: int) -> None:
    random = Random(seed)
    workers = [[random.lognormvariate(6, 1.5) for _ in range(300)] for _ in range(4)]
    found = total(RecentJobs(e2e_ms=by_bucket(durations)) for durations in workers)
    cuts = quantiles([one for durations in workers for one in durations], n=100)
    for share in (0.5, 0.95):
        true_ms = cuts[round(100 * share) - 1]
        assert percentile_ms(found.e2e_ms, share) == pytest.approx(true_ms, rel=0.1)


def test_there_are_no_percentiles_without_jobs() -> None:
    assert percentile_ms({}, 0.5) is None
    document = RecentJobs().document()
    assert document["first_token_ms"] == {"p50": None, "p95": None}
    assert document["ended"] == 0


def test_the_shortest_durations_have_a_bucket() -> None:
    assert sum(by_bucket([0.0, -1.0, 1e9]).values()) == 3


def test_the_counts_survive_json() -> None:
    recent = RecentJobs(ended=1, queue_ms={-3: 1}, first_token_ms={12: 1})
    assert RecentJobs.model_validate_json(recent.model_dump_json()) == recent
