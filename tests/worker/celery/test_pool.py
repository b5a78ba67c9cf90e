"""The pool alone, with kombu's real event loop."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery.exceptions import BackendStoreError, Reject
from celery.worker import state
from kombu.asynchronous import Hub
from redis.exceptions import ConnectionError as RedisConnectionError

from llorch_worker.contract import InternalError, InvalidRequest, OutOfMemory
from llorch_worker.worker.celery.pool import EnginePool
from tests.broker.steps import claim_on
from tests.services import wait_until


class Caller:
    """Celery's side of a job: notes what was called back, and on which thread."""

    def __init__(self) -> None:
        self.pid: int | None = None
        self.returned: list[Any] = []
        self.failed: list[BaseException] = []
        self.threads: list[int] = []

    def accept(self, pid: int, _time_s: float) -> None:
        self.pid = pid

    def success(self, value: Any) -> None:
        self.threads.append(threading.get_ident())
        self.returned.append(value)

    def failure(self, info: Any) -> None:
        self.threads.append(threading.get_ident())
        error = info.exception
        self.failed.append(getattr(error, "exc", error))

    @property
    def ended(self) -> bool:
        return bool(self.returned or self.failed)


LIMIT = 2


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    pool = EnginePool(limit=LIMIT)
    pool.start()
    yield pool
    pool.close()
    pool.stop()


@pytest.fixture
def hub(pool: EnginePool) -> Iterator[Hub]:
    hub = Hub()
    pool.register_with_event_loop(hub)
    yield hub
    pool.close()
    pool.drain()
    hub.close()


def apply(
    pool: EnginePool, target: Callable[..., Any], task_id: str = "job", args: tuple[Any, ...] = ()
) -> Caller:
    caller = Caller()
    pool.apply_async(
        target,
        args,
        accept_callback=caller.accept,
        callback=caller.success,
        error_callback=caller.failure,
        correlation_id=task_id,
    )
    return caller


def run_until(hub: Hub, condition: Callable[[], bool]) -> None:
    def turned() -> bool:
        hub.run_once()
        return condition()

    wait_until(turned)


def test_a_task_is_called_back_on_the_thread_of_the_event_loop(pool: EnginePool, hub: Hub) -> None:
    caller = apply(pool, threading.get_ident)
    run_until(hub, lambda: caller.ended)
    assert caller.threads == [threading.get_ident()]
    assert caller.returned != [threading.get_ident()]


def raiser(error: BaseException) -> Callable[..., None]:
    def target(*_: Any) -> None:
        raise error

    return target


@pytest.mark.parametrize(
    ("raised", "reported"),
    [
        (ValueError("secret"), InternalError),
        (MemoryError(), OutOfMemory),
        (SystemExit(3), InternalError),
        (KeyboardInterrupt(), InternalError),
        (GeneratorExit(), InternalError),
        (InvalidRequest("known"), InvalidRequest),
        (RedisConnectionError("away"), Reject),
        (BackendStoreError("away"), Reject),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else type(value).__name__,
)
def test_any_error_of_a_target_is_called_back(
    pool: EnginePool, hub: Hub, raised: BaseException, reported: type[Exception]
) -> None:
    caller = apply(pool, raiser(raised))
    run_until(hub, lambda: caller.ended)
    assert type(caller.failed[0]) is reported
    assert getattr(caller.failed[0], "requeue", None) in (None, True), "it goes back to its queue"
    assert "secret" not in str(caller.failed[0])


def test_a_callback_that_fails_is_followed_by_a_failure(pool: EnginePool, hub: Hub) -> None:
    caller = Caller()
    pool.apply_async(
        int,
        accept_callback=caller.accept,
        callback=raiser(MemoryError()),
        error_callback=caller.failure,
        correlation_id="job",
    )
    run_until(hub, lambda: caller.ended)
    assert isinstance(caller.failed[0], InternalError)


def test_each_task_has_its_own_pid_and_terminate_reaches_that_task_only(
    pool: EnginePool, hub: Hub
) -> None:
    go = threading.Event()
    first, second = apply(pool, go.wait, "first"), apply(pool, go.wait, "second")
    assert first.pid is not None
    assert second.pid is not None
    assert first.pid != second.pid
    pool.terminate_job(second.pid, 15)
    stopped = {name: pool.active_jobs.enter(claim_on(name)).stopped for name in ("first", "second")}
    assert stopped == {"first": False, "second": True}
    go.set()
    run_until(hub, lambda: first.ended and second.ended)


def test_all_that_is_claimed_begins_at_once_beyond_the_limit_too(
    pool: EnginePool, hub: Hub
) -> None:
    meeting = threading.Barrier(LIMIT + 2)
    callers = [apply(pool, meeting.wait, f"{number}") for number in range(LIMIT + 2)]
    run_until(hub, lambda: all(caller.returned for caller in callers))


def test_a_job_that_is_handed_back_waits_for_no_other(pool: EnginePool, hub: Hub) -> None:
    slow, quick = threading.Event(), threading.Event()
    last, first = apply(pool, slow.wait, "last"), apply(pool, quick.wait, "first")
    pool.hand_back_running()
    assert pool.active_jobs.enter(claim_on("last")).handed_back
    assert pool.active_jobs.enter(claim_on("first")).handed_back
    quick.set()
    try:
        run_until(hub, lambda: first.ended)
        assert not last.ended
    finally:
        slow.set()
    run_until(hub, lambda: last.ended)


def test_a_drain_finishes_running_work_although_nobody_runs_the_loop(
    pool: EnginePool, hub: Hub
) -> None:
    go = threading.Event()
    caller = apply(pool, go.wait)
    threading.Timer(0.05, go.set).start()
    pool.close()
    pool.drain()
    assert caller.returned == [True]


def test_a_closing_pool_gives_back_what_has_not_begun(pool: EnginePool, hub: Hub) -> None:
    go = threading.Event()
    running = [apply(pool, go.wait) for _ in range(LIMIT)]
    pool.close()
    late = apply(pool, go.wait)
    go.set()
    assert late.pid is None
    assert isinstance(late.failed[0], Reject)
    assert late.failed[0].requeue
    pool.drain()
    assert all(caller.returned == [True] for caller in running)


def test_a_pool_has_as_many_threads_as_jobs_ran_at_once_and_a_stopped_one_none() -> None:
    before = threading.active_count()
    pool = EnginePool(limit=300)
    pool.start()
    assert threading.active_count() == before
    for _ in range(2):
        go = threading.Event()
        callers = [apply(pool, go.wait) for _ in range(3)]
        assert threading.active_count() == before + 3
        go.set()
        pool.drain()
        assert all(caller.returned for caller in callers)
    pool.close()
    pool.stop()
    assert threading.active_count() == before


def test_a_job_for_which_no_thread_can_be_started_takes_the_next_free_one_or_goes_back(
    pool: EnginePool, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = threading.Event()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", raiser(RuntimeError("can't start new thread")))
        refused = apply(pool, int)
    assert refused.pid is None
    assert isinstance(refused.failed[0], Reject)
    running = apply(pool, go.wait)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", raiser(RuntimeError("can't start new thread")))
        waiting = apply(pool, int)
    assert waiting.pid is not None
    go.set()
    run_until(hub, lambda: running.ended and waiting.ended)
    assert waiting.returned


def test_a_task_whose_acceptance_fails_goes_back_and_leaves_its_thread_free(
    pool: EnginePool, hub: Hub
) -> None:
    refused = Caller()
    for _ in range(3):
        pool.apply_async(
            int,
            accept_callback=raiser(ValueError("secret")),
            callback=refused.success,
            error_callback=refused.failure,
            correlation_id="job",
        )
    assert [type(error) for error in refused.failed] == [Reject] * 3
    assert pool.active_jobs.ids() == []
    later = apply(pool, int)
    run_until(hub, lambda: later.ended)
    assert later.returned == [0]


def test_a_cold_shutdown_while_an_outcome_is_reported_returns_the_other_jobs(
    pool: EnginePool, hub: Hub
) -> None:
    gate = threading.Event()
    reported, running = apply(pool, str, "reported"), apply(pool, gate.wait, "running")

    class Interrupted(dict[int, Any]):
        """Celery's signal handler cancels all its requests when the first one leaves."""

        def __delitem__(self, pid: int) -> None:
            for caller in (reported, running):
                pool.hand_back_job(caller.pid)
            super().__delitem__(pid)

    pool._running = Interrupted(pool._running)
    run_until(hub, lambda: reported.ended)
    gate.set()
    run_until(hub, lambda: running.ended)


def test_a_cold_shutdown_during_an_acceptance_waits_for_nothing_inside_its_signal_handler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "should_terminate", None)
    pool = EnginePool(limit=1)
    pool.start()
    caller = Caller()

    def shut_down(*_: object) -> None:
        # What Celery's handler does at last.
        state.should_terminate = True
        pool.stop()

    def accept(pid: int, _time_s: float) -> None:
        caller.pid = pid
        signal.raise_signal(signal.SIGUSR2)

    before = signal.signal(signal.SIGUSR2, shut_down)
    try:
        pool.apply_async(
            str,
            accept_callback=accept,
            callback=caller.success,
            error_callback=caller.failure,
            correlation_id="job",
        )
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not caller.ended, "only the handler has run"
    late = apply(pool, str, "late")
    assert isinstance(late.failed[0], Reject), "it begins no more work"
    pool.terminate()
    assert caller.ended
