"""Chords, chains and errbacks of jobs that end without a worker or together with it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from celery import Celery

from llorch_worker.broker.jobs.cancellation import cancel
from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, CancelledEvent
from tests.broker.steps import SETTINGS
from tests.faults.conftest import StartWorker
from tests.faults.proxy import FaultProxy
from tests.services import begun, run_python, wait_until
from tests.store import follow_ups_in, stored_result

SEND = """
import json, os
from datetime import timedelta
from celery import Celery, chain, chord, signature

URL = os.environ["LLORCH_REDIS_URL"]
app = Celery("stock", broker=URL, backend=URL)
app.conf.task_protocol = int(os.environ["PROTOCOL"])


def generate(**fields):
    kwargs = {"prompt": "x", "max_tokens": 2} | fields
    return signature(os.environ["TASK"], kwargs=kwargs, queue="llorch.toy", app=app)


result = eval(os.environ["CANVAS"]).apply_async()
parts = getattr(result.parent, "results", [result.parent])
print(json.dumps([result.id, [part.id for part in parts]]))
"""
BODY = 'signature(os.environ["TASK"], kwargs={"prompt": "x"}, queue="llorch.toy", app=app)'
"""The body of a chord. Our task refuses the results that it gets, which shows that it ran."""


def send(client: Client, canvas: str, protocol: int = 2) -> tuple[str, list[str]]:
    """Sends it from a process that has only Celery: the ids of its result and of its parts."""
    url = client.settings.redis_url
    sent = run_python(SEND, url, CANVAS=canvas, TASK=TASK_NAME, PROTOCOL=protocol)
    assert isinstance(sent, list)
    return sent[0], sent[1]


def stored(client: Client, job_id: str) -> dict[str, object]:
    document = stored_result(client.redis, job_id)
    return {"status": "PENDING"} if document is None else json.loads(str(document))


def state(client: Client, job_id: str) -> str:
    return str(stored(client, job_id)["status"])


def wait_for_end(client: Client, job_id: str) -> str:
    wait_until(lambda: state(client, job_id) not in ("PENDING", "STARTED"))
    return state(client, job_id)


def revoke(client: Client, job_id: str) -> None:
    with Celery("operator", broker=client.settings.redis_url, set_as_current=False) as app:
        app.control.revoke(job_id)


def run_workers(start_worker: StartWorker, done: Callable[[], object]) -> None:
    """Starts a worker, and another one whenever it dies, until ``done``."""
    for number in itertools.count():
        worker = start_worker(f"w{number}", ready=False)
        wait_until(lambda worker=worker: done() or worker.process.poll() is not None)
        if done():
            return


def test_a_chord_whose_part_is_cancelled_while_it_waits_fails(
    client: Client, start_worker: StartWorker
) -> None:
    chords = [
        send(client, f"chord([generate(), generate().set({options})], {BODY})", protocol)
        for options, protocol in (("", 2), ('compression="gzip"', 2), ("", 1))
    ]
    for _, parts in chords:
        # As a worker does that hears of a revoke before it has seen the message.
        assert cancel(client.redis, parts[1], SETTINGS, heard_by="toy")
        assert state(client, parts[1]) == "REVOKED"
    start_worker()
    assert [wait_for_end(client, result) for result, _ in chords] == ["FAILURE"] * 3
    wait_until(lambda: not follow_ups_in(client.redis))


def test_a_chord_whose_part_is_revoked_while_it_waits_fails(
    client: Client, start_worker: StartWorker
) -> None:
    start_worker()
    result, parts = send(client, f"chord([generate(), generate().set(countdown=3600)], {BODY})")
    wait_for_end(client, parts[0])
    revoke(client, parts[1])
    assert wait_for_end(client, parts[1]) == "REVOKED"
    assert wait_for_end(client, result) == "FAILURE"
    assert "ChordError" in json.dumps(stored(client, result))


REFUSED = 'signature("llorch.generat", queue="llorch.toy", app=app)'


@pytest.mark.parametrize(
    "canvas",
    [
        f"chain({REFUSED}, generate())",
        f"chain({REFUSED}, generate().set(eta=app.now()))",
        f"chord([generate(), {REFUSED}], {BODY})",
        f"chord([generate(), {REFUSED}], {BODY}.set(expires=app.now() + timedelta(1)))",
    ],
)
def test_what_follows_a_message_that_becomes_no_task_fails_with_it(
    client: Client, start_worker: StartWorker, canvas: str
) -> None:
    start_worker()
    result, _ = send(client, canvas)
    assert wait_for_end(client, result) == "FAILURE"
    wait_until(lambda: not follow_ups_in(client.redis))


def test_a_chord_goes_on_of_which_a_part_was_stored_and_not_counted(
    client: Client, start_worker: StartWorker
) -> None:
    canvas = f"chord([generate(), chain({REFUSED}, generate())], {BODY})"
    result, parts = send(client, canvas)
    # As a worker leaves it that Redis or its death cuts off in the middle of what follows.
    url = client.settings.redis_url
    with Celery("stock", broker=url, backend=url, set_as_current=False) as stock:
        stock.backend.store_result(parts[1], ValueError("x"), "FAILURE")
    start_worker()
    assert wait_for_end(client, result) == "FAILURE"


def test_a_revoke_that_only_a_worker_of_another_application_heard_holds(
    client: Client, start_worker: StartWorker
) -> None:
    """Celery's workers store a revoke of any task, also of one that they do not serve."""
    start_worker("other", app="tests.other_app", options=("-P", "solo", "-Q", "other"))
    result, parts = send(client, f"chord([generate(), generate()], {BODY})")
    revoke(client, parts[1])
    assert wait_for_end(client, parts[1]) == "REVOKED"
    before = stored(client, parts[1])
    start_worker()
    assert wait_for_end(client, result) == "FAILURE"
    assert "ChordError" in json.dumps(stored(client, result))
    assert stored(client, parts[1]) == before
    (entry,) = client.job(parts[1]).stream()
    assert isinstance(entry.event, CancelledEvent)


def test_a_chord_whose_part_has_no_attempts_left_fails(
    client: Client, start_worker: StartWorker
) -> None:
    result, _ = send(client, f'chord([generate(), generate(prompt="die")], {BODY})')
    run_workers(start_worker, lambda: state(client, result) != "PENDING")
    assert state(client, result) == "FAILURE"


def test_an_errback_and_a_chain_learn_of_a_job_without_attempts_left(
    client: Client, start_worker: StartWorker
) -> None:
    errback = 'signature("app.on_error", queue="errors", app=app)'
    first = f'generate(prompt="die").on_error({errback})'
    result, (first_id,) = send(client, f"chain({first}, generate())")
    run_workers(start_worker, lambda: client.redis.llen("errors"))
    assert state(client, first_id) == state(client, result) == "FAILURE"
    assert client.redis.llen("errors") == 1


@pytest.mark.parametrize("part", [1, 2, 0], ids=["first part", "last part", "body"])
def test_a_part_whose_worker_died_after_its_result_is_counted_once(
    client: Client, start_worker: StartWorker, part: int
) -> None:
    doomed = start_worker("doomed", app="tests.faults.dying_app", DIE_AT_PART=part)
    result, parts = send(client, f"chord([generate(), generate()], {BODY})")
    doomed.process.wait()
    assert "SUCCESS" in {state(client, job_id) for job_id in parts}
    start_worker()
    # The body ran.
    assert wait_for_end(client, result) == "FAILURE"
    assert "args" in json.dumps(stored(client, result)["result"])
    assert {state(client, job_id) for job_id in parts} == {"SUCCESS"}
    wait_until(lambda: not follow_ups_in(client.redis))


def test_a_job_succeeds_although_its_chain_could_not_go_on_while_redis_was_away(
    client: Client, start_worker: StartWorker, proxy: FaultProxy, tmp_path: Path
) -> None:
    # A worker whose lease had lapsed by the job's end would drop the job and try nothing.
    worker = start_worker(url=proxy.url, app="tests.faults.resigned_app", lease_s=30)
    latch = tmp_path / "latch"
    next_task = 'signature("app.next", queue="next", app=app)'
    result, (first,) = send(client, f'chain(generate(prompt="wait 1 {latch}"), {next_task})')
    begun(client.job(first))
    proxy.isolate()
    latch.touch()
    wait_until(lambda: "Giving up refused callback publish" in worker.text())
    proxy.heal()
    assert wait_for_end(client, first) == "SUCCESS"
    assert state(client, result) == "PENDING"
    assert client.redis.llen("next") == 1
