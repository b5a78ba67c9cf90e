"""What Celery's inspection commands and revokes answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.worker.control import Panel

from llorch_worker.client import Client
from llorch_worker.contract import REQUESTS, TASK_NAME, Cancelled
from llorch_worker.settings import Settings
from llorch_worker.worker.celery import control
from llorch_worker.worker.celery.app import build_app
from tests.services import (
    WorkerProcess,
    begun,
    own_redis,
    running_worker,
    wait_until,
)
from tests.worker.celery.remote import told

GET_S = 60
QUEUE = "llorch.toy"
PASSWORD = "swordfish"


@pytest.fixture
def handlers() -> Iterator[dict[str, object]]:
    """This process' control commands, as a worker answers them."""
    before = dict(Panel.data)
    control.install()
    yield Panel.data
    Panel.data.clear()
    Panel.data.update(before)


def test_no_inspection_shows_a_password(tmp_path: Path) -> None:
    with own_redis(options=("--requirepass", PASSWORD)) as server:
        url = server.url.replace("redis://", f"redis://:{PASSWORD}@")
        with (
            running_worker(url, tmp_path, model_name="toy") as worker,
            Celery("stock", broker=url, set_as_current=False) as stock,
        ):
            shown = [told(stock, worker, name) for name in ("conf", "report", "stats")]
            assert PASSWORD not in json.dumps(shown) + worker.text()


@pytest.mark.parametrize(
    "url",
    [
        f"sentinel://localhost:1/0?master_name=jobs&sentinel_password={PASSWORD}",
        f"sentinel://:{PASSWORD}@localhost:1;sentinel://localhost:2/0?master_name=jobs",
    ],
)
def test_the_stats_are_sent_without_the_passwords_of_those_who_know_the_master(
    handlers: dict[str, object], url: str
) -> None:
    app = build_app(Settings(redis_url=url, model=Path("toy.gguf")))
    stats = {"broker": app.connection_for_read().info()}
    controller = SimpleNamespace(stats=lambda: stats)
    state = SimpleNamespace(consumer=SimpleNamespace(controller=controller))
    assert PASSWORD in str(stats)
    shown = handlers["stats"](state)  # type: ignore[operator]
    assert PASSWORD not in json.dumps(shown)
    assert len(shown["broker"]["alternates"]) == len(stats["broker"]["alternates"])
    assert shown["broker"]["transport_options"]["master_name"] == "jobs"


def test_jobs_are_revoked_by_id_and_by_stamp_whether_they_run_or_wait(
    stock: Celery, client: Client, toy_worker: WorkerProcess
) -> None:
    def send(**options: object) -> str:
        kwargs = {"prompt": "x", "max_tokens": 4000}
        return str(stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE, **options).id)

    running = [begun(client.job(send(stamped_headers=["who"], who=f"{n}"))) for n in range(4)]
    waiting, stamped = send(), send(stamped_headers=["who"], who="later")
    told(stock, toy_worker, "revoke", task_id=waiting)
    told(stock, toy_worker, "revoke_by_stamped_headers", headers={"who": ["later"]})
    # A plain revoke stops no running job, as in Celery.
    told(stock, toy_worker, "revoke", task_id=running[0].id)
    active = [each["id"] for each in told(stock, toy_worker, "active")]
    assert sorted(active) == sorted(job.id for job in running)
    state, _ = told(stock, toy_worker, "query_task", ids=[running[0].id])[running[0].id]
    assert state == "active"
    told(stock, toy_worker, "revoke", task_id=[running[0].id, running[1].id], terminate=True)
    told(stock, toy_worker, "terminate", task_id=running[2].id, signal="SIGKILL")
    told(stock, toy_worker, "revoke_by_stamped_headers", headers={"who": ["3"]}, terminate=True)
    for job in (*running, client.job(waiting), client.job(stamped)):
        with pytest.raises(Cancelled):
            job.result(GET_S)
    assert waiting in told(stock, toy_worker, "revoked")
    wait_until(lambda: told(stock, toy_worker, "active") == [])
    assert told(stock, toy_worker, "registered") == sorted(REQUESTS)
