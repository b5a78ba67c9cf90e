"""Which jobs are here, and what becomes of a cancel that comes early."""

from __future__ import annotations

import pytest

from llorch_worker.worker.active_jobs import ActiveJobs


class Generation:
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


@pytest.mark.parametrize("hand_back", [False, True])
def test_a_stop_between_accept_and_entry_is_kept(hand_back: bool) -> None:
    jobs = ActiveJobs()
    jobs.expect("a")
    (jobs.hand_back if hand_back else jobs.cancel)("a")
    job, new = jobs.enter("a")
    assert new
    assert (job.stopped, job.handed_back) == (True, hand_back)
    generation = Generation()
    job.attach(generation)
    assert generation.cancelled


def test_a_job_enters_once() -> None:
    jobs = ActiveJobs()
    jobs.expect("a")
    first, new = jobs.enter("a")
    assert new
    assert jobs.enter("a") == (first, False)
    jobs.leave(first)
    assert jobs.ids() == []


def test_a_job_that_never_entered_is_forgotten_and_one_that_did_is_not() -> None:
    jobs = ActiveJobs()
    jobs.expect("never")
    jobs.expect("here")
    jobs.enter("here")
    jobs.forget("never")
    jobs.forget("here")
    assert jobs.ids() == ["here"]


def test_a_cancel_of_a_job_that_is_elsewhere_does_nothing() -> None:
    jobs = ActiveJobs()
    jobs.cancel("elsewhere")
    assert not jobs.enter("elsewhere")[0].stopped


def test_the_first_of_a_cancel_and_a_hand_back_wins() -> None:
    jobs = ActiveJobs()
    cancelled, _ = jobs.enter("cancelled")
    jobs.cancel("cancelled")
    jobs.hand_back("cancelled")
    assert not cancelled.handed_back
    returned, _ = jobs.enter("returned")
    jobs.hand_back("returned")
    jobs.cancel("returned")
    assert returned.handed_back
