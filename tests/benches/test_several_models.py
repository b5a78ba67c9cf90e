"""Workers that change their models lose no job and double none, as the bench of several models sees
it."""

from __future__ import annotations

import random

from benches.several_models import through_workers
from tests.worker.fleet_of_models import zipf_arrivals

JOBS = 12


def test_no_job_is_lost_or_doubled_while_the_favourite_changes() -> None:
    trace = zipf_arrivals(random.Random(1), "abc", JOBS, load=4.0, favourite_s=0.1, mean_work_s=0.1)
    ran = through_workers(trace, trace[-1].came_s + 0.1, ["abc", "abc"], 0.1, min_resident_s=0)
    assert ran.faults == []
    assert len(ran.waits_s) == JOBS
