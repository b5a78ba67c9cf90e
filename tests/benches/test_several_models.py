"""Workers that change their models lose no job and double none, as the bench of several models sees
it."""

from __future__ import annotations

import random

from benches.several_models import KILLED, MODELS, running_fleet, through_workers
from tests.waiting import wait_until
from tests.worker.fleet_of_models import zipf_arrivals

JOBS = 12
TOKENS = 3


def test_no_job_is_lost_or_doubled_while_the_favourite_changes() -> None:
    trace = zipf_arrivals(
        random.Random(1), MODELS, JOBS, load=4.0, favourite_s=0.1, mean_work_s=0.1
    )
    last_s = trace[-1].came_s + 0.1
    ran = through_workers(trace, last_s, [MODELS] * 2, load_s=0.1, min_resident_s=0)
    assert ran.faults == []
    assert len(ran.waits_s) == JOBS
    assert ran.memory.most_engines == 1


def test_no_job_is_lost_or_doubled_by_kills_of_an_engine_a_keeper_and_redis_amid_changes() -> None:
    with running_fleet(
        [MODELS] * 2, durable=True, min_resident_s=0, lease_s=1, sweep_s=0.5, TOY_LOAD_S=1
    ) as fleet:

        def has_killed_each() -> bool:
            """Three models of two workers: one has to change, sooner or later."""
            if all(job.status().ended for job, _ in fleet.sent):
                for model in MODELS:
                    fleet.submit(model, TOKENS)
            fleet.kill_amid_a_change()
            return {*fleet.ran.kills} == {*KILLED}

        wait_until(has_killed_each, timeout_s=120)
        fleet.look_at_results()
        assert fleet.ran.faults == []
