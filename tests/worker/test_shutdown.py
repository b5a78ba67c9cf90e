"""How a worker ends: what runs is finished, what waits stays, and the exit code tells."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import Client, Job
from llorch_worker.contract import Tokens
from tests.latch import Latch
from tests.services import REAL_APP, RedisServer, WorkerProcess, begun, running_worker, wait_until
from tests.store import held_ids, jobs_that_wait

QUEUE = "llorch.toy"
GET_S = 60
TOKENS = 100


def busy_worker(client: Client, latch: Latch) -> tuple[list[Job], list[Job]]:
    """Two jobs that run until ``latch`` is open, eight that wait in Redis."""
    running = [begun(client.submit(prompt=latch.prompt(), max_tokens=TOKENS)) for _ in range(2)]
    return running, [client.submit(prompt="x", max_tokens=TOKENS) for _ in range(8)]


def test_jobs_for_a_busy_worker_wait_in_redis_and_not_in_its_memory(
    own_worker: WorkerProcess, own_client: Client, latch: Latch
) -> None:
    running, waiting = busy_worker(own_client, latch)
    held = {len(held_ids(own_client.redis))}
    assert (held, jobs_that_wait(own_client.redis)) == ({2}, 8)
    latch.open()
    while not all(job.status().ended for job in running):
        held.add(len(held_ids(own_client.redis)))
    assert max(held) == 2
    for job in waiting:
        job.result(GET_S)


def stop_by(how: str, worker: WorkerProcess) -> None:
    """Asks the worker to stop, and waits until it knows."""
    match how:
        case "SIGTERM":
            worker.process.send_signal(signal.SIGTERM)
        case "SIGINT":
            worker.process.send_signal(signal.SIGINT)
        case "control shutdown":
            with Celery("stock", broker=worker.redis_url, set_as_current=False) as app:
                app.control.shutdown(destination=[worker.hostname])
    said = "shutdown from remote" if how == "control shutdown" else "Warm shutdown"
    wait_until(lambda: said in worker.text())


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "control shutdown"])
def test_a_worker_that_is_asked_to_stop_finishes_running_jobs_and_exits_0(
    own_worker: WorkerProcess, own_client: Client, latch: Latch, how: str
) -> None:
    running, waiting = busy_worker(own_client, latch)
    stop_by(how, own_worker)
    latch.open()
    assert own_worker.wait_exit() == 0
    for job in running:
        result = job.result(timeout=120)
        assert len(result.choices[0].token_ids) == TOKENS
        assert [entry.event for entry in job.stream(timeout=120)][-1].type == "finished"
    assert jobs_that_wait(own_client.redis) == len(waiting), "none was taken along, none was lost"
    assert not held_ids(own_client.redis)
    assert [job.status().state for job in waiting] == ["queued"] * 8
    assert own_client.workers() == [], "its card is gone"


def test_finished_jobs_are_acknowledged_while_others_still_drain(
    own_worker: WorkerProcess, own_client: Client, make_latch: Callable[[str], Latch]
) -> None:
    soon, late = make_latch("soon"), make_latch("late")
    long = begun(own_client.submit(prompt=late.prompt(), max_tokens=100))
    short = begun(own_client.submit(prompt=soon.prompt(), max_tokens=100))
    own_worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in own_worker.text())
    soon.open()
    short.result(GET_S)
    wait_until(lambda: short.id not in held_ids(own_client.redis))
    assert long.status().state == "running"
    assert held_ids(own_client.redis) == {long.id}
    late.open()
    long.result(GET_S)
    assert own_worker.wait_exit() == 0


def test_a_draining_worker_still_obeys_a_cancel(
    own_worker: WorkerProcess, own_client: Client
) -> None:
    job = begun(own_client.submit(prompt="x", max_tokens=4000))
    own_worker.process.send_signal(signal.SIGTERM)
    wait_until(lambda: "Warm shutdown" in own_worker.text())
    job.cancel()
    assert own_worker.wait_exit() == 0
    assert job.status().state == "cancelled"


def assert_whole(job: Job) -> None:
    """Every token is in the stream once, in order, and the result has them all."""
    ids = [i for e in job.stream() if isinstance(e.event, Tokens) for i in e.event.ids]
    assert ids == list(job.result(0).choices[0].token_ids) == list(range(len(ids)))


@pytest.mark.parametrize("asked", ["once", "twice"])
def test_a_cold_shutdown_hands_running_jobs_back_for_another_worker(
    own_worker: WorkerProcess,
    own_client: Client,
    latch: Latch,
    tmp_path: Path,
    own_server: RedisServer,
    asked: str,
) -> None:
    prompt = latch.prompt(after=299)
    jobs = [begun(own_client.submit(prompt=prompt, max_tokens=300)) for _ in range(2)]
    if asked == "once":
        own_worker.process.send_signal(signal.SIGQUIT)
    else:
        own_worker.process.send_signal(signal.SIGINT)
        wait_until(lambda: "Warm shutdown" in own_worker.text())
        own_worker.process.send_signal(signal.SIGINT)
    own_worker.wait_exit()
    latch.open()
    assert own_worker.text().count("the job continues here or elsewhere") == 2
    assert "Traceback" not in own_worker.text()
    assert "event loop broke" not in own_worker.text()
    assert not held_ids(own_client.redis)
    assert jobs_that_wait(own_client.redis) == 2
    assert not any(job.status().ended for job in jobs)
    with running_worker(own_server.url, tmp_path, name="w2", model_name="toy"):
        for job in jobs:
            assert job.result(GET_S).attempts == 1, "a drain is not counted"
            assert_whole(job)


def test_inspect_tells_whether_a_job_ran_before(
    own_worker: WorkerProcess,
    own_client: Client,
    latch: Latch,
    tmp_path: Path,
    own_server: RedisServer,
) -> None:
    app = Celery("stock", broker=own_server.url, set_as_current=False)

    def redelivered(hostname: str) -> list[bool]:
        active = app.control.inspect(destination=[hostname]).active() or {}
        return [job["delivery_info"]["redelivered"] for job in active.get(hostname, [])]

    job = begun(own_client.submit(prompt=latch.prompt(), max_tokens=TOKENS))
    assert redelivered(own_worker.hostname) == [False]
    own_worker.process.send_signal(signal.SIGQUIT)
    own_worker.wait_exit()
    with running_worker(own_server.url, tmp_path, name="w2", model_name="toy") as other:
        wait_until(lambda: redelivered(other.hostname) == [True])
        latch.open()
        job.result(GET_S)
    app.close()


def test_sigterm_ends_a_load(redis_server: RedisServer, tmp_path: Path) -> None:
    worker = WorkerProcess(redis_server.url, tmp_path / "w.log", model_name="toy", TOY_LOAD_S=300)
    wait_until(lambda: "loading" in worker.text())
    worker.process.send_signal(signal.SIGTERM)
    assert worker.wait_exit() == 0


def test_sigterm_ends_the_load_of_another_engine(redis_server: RedisServer, tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    options = {"model_name": "toy", "TOY_LOADS_SLOWLY_FROM": slow}
    with running_worker(redis_server.url, tmp_path, **options) as worker:
        slow.touch()
        os.kill(worker.engine_pid(), signal.SIGKILL)
        wait_until(lambda: worker.text().count("loading") == 2)
        worker.process.send_signal(signal.SIGTERM)
        assert worker.wait_exit() == 0


def test_a_second_sigterm_while_the_first_is_handled_stops_nothing(
    own_server: RedisServer, tmp_path: Path
) -> None:
    options = {"model_name": "toy", "app": "tests.worker.twice_app"}
    with running_worker(own_server.url, tmp_path, **options) as worker:
        worker.process.terminate()
        assert worker.wait_exit() == 0


def cut(path: Path, tmp_path: Path) -> Path:
    shorter = tmp_path / "cut.gguf"
    shorter.write_bytes(path.read_bytes()[:100_000])
    return shorter


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (lambda _demo, folder: folder / "missing.gguf", "missing.gguf"),
        (cut, "cut.gguf"),
        (lambda _demo, folder: folder, ""),
    ],
    ids=["missing", "truncated", "no model in it"],
)
def test_a_model_that_cannot_be_loaded_is_one_sentence_and_exit_code_1(
    redis_server: RedisServer,
    tmp_path: Path,
    demo_model: Path,
    model: Callable[[Path, Path], Path],
    words: str,
) -> None:
    path = model(demo_model, tmp_path)
    log = tmp_path / "worker.log"
    worker = WorkerProcess(redis_server.url, log, app=REAL_APP, model=path, loglevel="WARNING")
    assert worker.wait_exit() == 1
    (line,) = [line for line in worker.text().splitlines() if "CRITICAL" in line]
    assert "cannot start" in line
    assert words in line
    assert "Traceback" not in worker.text()


def test_nothing_of_a_stopped_worker_stays_connected(
    own_worker: WorkerProcess, own_client: Client, own_server: RedisServer
) -> None:
    own_client.submit(prompt="x", max_tokens=2).result(GET_S)
    own_worker.stop()
    with connect(own_server.url) as look:
        wait_until(lambda: "brpop" not in {entry["cmd"] for entry in look.client_list()})
