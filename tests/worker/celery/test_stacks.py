"""SIGUSR1 shows what each thread does, and harms no job."""

from __future__ import annotations

import os
import signal

from llorch_worker.client import Client
from tests.forks import printed_by
from tests.latch import Latch
from tests.services import WorkerProcess, begun
from tests.waiting import wait_until

SIGNALS = 1000
SECRET = "zyzzyva"


def test_a_busy_worker_writes_its_stacks_and_goes_on(
    own_worker: WorkerProcess, own_client: Client, latch: Latch
) -> None:
    busy = begun(own_client.submit(prompt=SECRET, max_tokens=4000))
    held = begun(own_client.submit(prompt=latch.prompt(), max_tokens=5))
    for _ in range(SIGNALS):
        os.kill(own_worker.process.pid, signal.SIGUSR1)
        # Each signal meets the worker elsewhere.
        own_client.redis.ping()
    wait_until(lambda: "Thread MainThread:" in own_worker.text())
    wait_until(lambda: "/inbox_watcher.py" in own_worker.text())
    wait_until(lambda: "Thread of the engine MainThread:" in own_worker.text())
    wait_until(lambda: "/toy_engine.py" in own_worker.text())
    assert SECRET not in own_worker.text()
    latch.open()
    assert len(held.result(60).choices[0].token_ids) == 5
    assert busy.cancel()
    assert own_worker.process.poll() is None


ASKED_TWICE = """
import os, signal, threading
from llorch_worker.worker.celery.stacks import write_on_sigusr1
asked, again = [], threading.Event()
def ask():
    asked.append(1)
    if len(asked) == 1:
        raise LookupError
    again.set()
    return []
write_on_sigusr1(ask)
while not again.wait(0.1):
    os.kill(os.getpid(), signal.SIGUSR1)
print("asked again")
"""


def test_a_defect_of_what_is_asked_does_not_end_the_asking() -> None:
    assert printed_by(ASKED_TWICE) == "asked again\n"
