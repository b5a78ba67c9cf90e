"""What this worker cannot do of Celery's options, commands and message fields, it refuses in a
sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, InvalidRequest
from tests.services import RedisServer, WorkerProcess, environment, running_worker
from tests.worker.celery.remote import consumed, told

GET_S = 60
QUEUE = "llorch.toy"


REFUSED_OPTIONS = {
    "--time-limit 60": "--time-limit is refused: tasks have no time limits here; ",
    "--soft-time-limit 60": "--soft-time-limit is refused",
    "--max-tasks-per-child 100": "--max-tasks-per-child is refused",
    "--max-memory-per-child 100": "--max-memory-per-child is refused",
    "--pool-start-method spawn": "--pool-start-method is refused",
    "--autoscale 4,1": "--autoscale is refused",
    "--prefetch-multiplier 4": "--prefetch-multiplier is refused",
    "-B": "--beat is refused: run celery beat as a process of its own",
    "--purge": "--purge is refused",
    "-P solo": "start it without -P/--pool",
    "-Q llorch.toy,other": "does not serve the queue other; it serves llorch.toy:high, llorch.toy",
    "-X other": "does not serve the queue other",
}
START_ALL = """
import json, sys
from celery.bin.celery import celery
codes = []
for options in sys.argv[1:]:
    try:
        celery.main(["-A", "tests.toy_app", "worker", *options.split()], standalone_mode=False)
    except SystemExit as error:
        codes.append(error.code)
print(json.dumps(codes))
"""


def test_an_option_that_has_no_meaning_here_ends_the_start_with_one_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-c", START_ALL, *REFUSED_OPTIONS],
        # Nothing listens there: the refusal comes before the worker connects.
        env=environment("redis://localhost:1/0", model_name="toy"),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert json.loads(done.stdout) == [2] * len(REFUSED_OPTIONS)
    said = [line for line in done.stderr.splitlines() if "cannot start: " in line]
    for line, expected in zip(said, REFUSED_OPTIONS.values(), strict=True):
        assert expected in line


def test_a_worker_may_start_with_some_of_its_queues_and_without_helpers(
    redis_server: RedisServer, stock: Celery, tmp_path: Any
) -> None:
    options = ("-Q", "llorch.toy,llorch.toy:high", "-X", "llorch.toy:high", "-O", "fair", "-E")
    options += ("--disable-prefetch", "--without-heartbeat")
    with running_worker(
        redis_server.url, tmp_path, name="some", model_name="toy", options=options
    ) as worker:
        assert consumed(stock, worker) == [QUEUE]
        sent = stock.send_task(TASK_NAME, kwargs={"prompt": "x", "max_tokens": 1}, queue=QUEUE)
        assert sent.get(timeout=GET_S)["text"] == "w0 "


@pytest.mark.parametrize(
    ("command", "arguments", "reason"),
    [
        ("autoscale", {"max": 4, "min": 1}, "LLORCH_MAX_SEQUENCES"),
        ("pool_grow", {"n": 1}, "LLORCH_MAX_SEQUENCES"),
        ("pool_shrink", {"n": 1}, "LLORCH_MAX_SEQUENCES"),
        ("pool_restart", {}, "restart the worker itself"),
        ("time_limit", {"task_name": TASK_NAME, "hard": 9}, "deadline_s"),
    ],
)
def test_a_command_that_has_no_meaning_here_is_refused_in_the_reply(
    stock: Celery,
    toy_worker: WorkerProcess,
    command: str,
    arguments: dict[str, Any],
    reason: str,
) -> None:
    reply = told(stock, toy_worker, command, **arguments)
    assert list(reply) == ["error"]
    assert reason in reply["error"]
    assert "Traceback" not in toy_worker.text()


@pytest.mark.parametrize("limits", [{"time_limit": 5}, {"soft_time_limit": 0.5, "time_limit": 5}])
def test_a_job_with_a_time_limit_is_refused_with_what_to_use_instead(
    stock: Celery, client: Client, toy_worker: WorkerProcess, limits: dict[str, float]
) -> None:
    kwargs = {"prompt": "x", "max_tokens": 1}
    sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE, **limits)
    with pytest.raises(InvalidRequest, match="deadline_s") as caught:
        sent.get(timeout=GET_S)
    assert {fault.field for fault in caught.value.faults} == set(limits)
