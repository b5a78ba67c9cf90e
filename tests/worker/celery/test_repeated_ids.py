"""An id that has run once runs no more, and whoever watches learns of it."""

from __future__ import annotations

import pytest
from celery import Celery
from celery.result import AsyncResult

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.cli.command import run
from tests.messages import QUEUE
from tests.monitor import Monitor
from tests.services import WorkerProcess, wait_until

GET_S = 60


@pytest.mark.parametrize("forgets", [False, True])
def test_a_job_under_the_id_of_an_ended_one_is_reported(
    stock: Celery, toy_worker: WorkerProcess, client: Client, forgets: bool
) -> None:
    job_id = f"again {forgets}"

    def send(max_tokens: int) -> AsyncResult:
        fields = {"prompt": "secret words", "max_tokens": max_tokens}
        return stock.send_task(TASK_NAME, kwargs=fields, queue=QUEUE, task_id=job_id)

    first = send(2)
    assert first.get(timeout=GET_S)["text"] == "w0 w1 "
    if forgets:
        first.forget()
        asked = run("status", job_id, "--redis", client.settings.redis_url)
        assert asked.code == 1
        assert f"job '{job_id}' has ended, and its result was deleted" in asked.err
    assert client.job(job_id).status().forgotten == forgets
    with Monitor(stock) as monitor:
        send(5)
        wait_until(lambda: monitor.saw("task-rejected", job_id))
    said = f"job {job_id} has ended before: its first result stands"
    wait_until(lambda: said in toy_worker.text())
    assert "secret words" not in toy_worker.text()
