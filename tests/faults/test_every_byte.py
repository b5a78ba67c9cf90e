"""Connections that break at any byte of a step: nothing is lost, doubled or half done.

Each case cuts the connection after so many bytes of one script's request, or of its reply, lets its
caller go on as it does, and looks at Redis. ``LLORCH_FULL_SIZE=1`` cuts after every byte.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator

import pytest

from llorch_worker.broker.connections.connection import RETRIES, connect
from tests.faults import user_steps, worker_steps
from tests.faults.proxy import LOCALHOST, FaultProxy
from tests.faults.stage import SCRIPTS, Stage
from tests.faults.steps import Step
from tests.services import RedisServer
from tests.sizes import sized

STEPS = [*user_steps.STEPS, *worker_steps.STEPS]
STRIDE_BYTES = sized(usual=199, full=1)
EDGE_BYTES = 5
"""At both ends of a message every byte counts."""


@pytest.fixture(scope="module")
def stage(redis_server: RedisServer) -> Iterator[tuple[Stage, FaultProxy]]:
    logging.disable(logging.ERROR)
    with (
        connect(redis_server.url) as store,
        FaultProxy(LOCALHOST, redis_server.port) as proxy,
        Stage(store, proxy) as stage,
    ):
        yield stage, proxy
    logging.disable(logging.NOTSET)


def cuts(size: int) -> Iterable[int]:
    """Numbers of bytes after which to cut a message of ``size`` bytes."""
    edges = {*range(EDGE_BYTES), *range(max(size - EDGE_BYTES, 0), size + 1)}
    return sorted(edges | {*range(0, size, STRIDE_BYTES)})


def break_once(
    step: Step,
    stage: Stage,
    proxy: FaultProxy,
    *,
    lost: str,
    after_bytes: int,
    tries: int = 1,
    forgotten: bool = False,
) -> int:
    """Plays the step while ``tries`` tries of its call break; returns the size of the message.

    ``forgotten``: Redis has forgotten the scripts, and what breaks is the call with the source.
    """
    stage.clear()
    play = step.play(stage)
    next(play)
    if forgotten:
        stage.store.script_flush()
    cut = proxy.cut_request if lost == "request" else proxy.cut_reply
    matches = step.has_source if forgotten else step.calls
    traps = [cut(matches, after_bytes) for _ in range(tries)]
    job_ids = next(play)
    for trap in traps:
        if not trap.sprung:
            proxy.disarm(trap)
    size = max(trap.size for trap in traps)
    assert size, "nothing was cut"
    assert job_ids is not None
    stage.assert_in_one_place(job_ids)
    assert next(play, "over") == "over"
    earlier = stage.ends()
    stage.settle()
    stage.assert_all_ended_once(job_ids, earlier)
    return size


@pytest.mark.parametrize("tries", [1, RETRIES + 1], ids=["once", "until it gives up"])
@pytest.mark.parametrize("lost", ["request", "reply"])
@pytest.mark.parametrize("step", STEPS, ids=str)
def test_a_step_cut_at_any_byte_breaks_no_promise(
    stage: tuple[Stage, FaultProxy], step: Step, lost: str, tries: int
) -> None:
    size = break_once(step, *stage, lost=lost, after_bytes=0, tries=tries)
    for after_bytes in cuts(size):
        break_once(step, *stage, lost=lost, after_bytes=after_bytes, tries=tries)


@pytest.mark.parametrize("step", [step for step in STEPS if step.script in SCRIPTS], ids=str)
def test_a_step_whose_script_redis_forgot_breaks_no_promise(
    stage: tuple[Stage, FaultProxy], step: Step
) -> None:
    for lost in ("request", "reply"):
        for after_bytes in (0, 1, 10**9):
            break_once(step, *stage, lost=lost, after_bytes=after_bytes, forgotten=True)


OF_NO_JOB = {
    "orphaned", "acquire", "announce", "drop_letter", "figures", "list_jobs",
    "misplaced", "purge",
}  # fmt: skip
"""No job's end depends on these; see tests/gateway, tests/broker and tests/worker."""


def test_every_script_is_a_step() -> None:
    assert set(SCRIPTS) > OF_NO_JOB
    assert {step.script for step in STEPS} >= set(SCRIPTS) - OF_NO_JOB
