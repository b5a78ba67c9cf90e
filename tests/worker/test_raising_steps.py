"""Whatever a step between the queue and the task raises ends one job, and no worker."""

from __future__ import annotations

import builtins
import decimal
import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery.exceptions import BackendError
from redis.exceptions import ResponseError

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, AttemptsExhausted, InvalidRequest
from tests.messages import GOOD_BODY, QUEUE, envelope
from tests.raising import make
from tests.services import RedisServer, WorkerProcess, running_worker, wait_until
from tests.store import clear_letters, held_ids, letters_in

GET_S = 60
EXITS = (SystemExit, KeyboardInterrupt)


def _kinds() -> Iterator[str]:
    for module in (builtins, decimal):
        for kind in vars(module).values():
            is_error = isinstance(kind, type) and issubclass(kind, BaseException)
            if is_error and not issubclass(kind, EXITS):
                yield f"{module.__name__}.{kind.__name__}"
    yield from ("tests.raising.NoException", "binascii.Error", "zlib.error", "lzma.LZMAError")
    yield from ("asyncio.CancelledError", "pickle.UnpicklingError", "json.JSONDecodeError")
    yield from ("celery.exceptions.BackendStoreError", "ssl.SSLError")
    yield from (f"redis.exceptions.{kind}" for kind in ("DataError", "OutOfMemoryError"))


KINDS = sorted(set(_kinds()))
NO_CONNECTION_ERRORS = [kind for kind in KINDS if not isinstance(make(kind), ConnectionError)]
OUTAGES = [
    kind
    for kind in NO_CONNECTION_ERRORS
    if isinstance(make(kind), OSError | MemoryError | BackendError | ResponseError)
]


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("raising")
    with running_worker(
        redis_server.url,
        folder,
        app="tests.raising_app",
        model_name="toy",
        max_sequences=4,
        LLORCH_MAX_ATTEMPTS=1,
        LLORCH_SWEEP_S=0.2,
    ) as worker:
        yield worker


def message(job_id: str, step: str, kind: str) -> str:
    headers: dict[str, Any] = {"task": TASK_NAME, "id": job_id, "raises": f"{step} {kind}"}
    if step == "reread":
        # Only Python reads such an id.
        headers |= {"id": f"ü{job_id}"}
        return json.dumps(envelope(GOOD_BODY, headers=headers), ensure_ascii=False)
    if step == "decompress":
        return json.dumps(
            envelope(headers["raises"].encode(), headers=headers | {"compression": "gzip"})
        )
    if step.startswith("typed"):
        value = {"__type__": "raising", "__value__": kind}
        fields = {"prompt": "x", "max_tokens": 1}
        if step == "typed header":
            headers["x"] = value
        found = envelope(
            [[], fields | ({"metadata": value} if "body" in step else {}), {}], headers=headers
        )
        if step == "typed property":
            found["properties"]["x"] = value
        return json.dumps(found)
    return json.dumps(envelope(GOOD_BODY, headers=headers))


STEPS = ("envelope", "decompress", "fault", "strategy", "request", "arguments")


@pytest.mark.parametrize("step", STEPS)
def test_whatever_a_step_raises_is_a_refusal(
    worker: WorkerProcess, client: Client, step: str
) -> None:
    # Celery answers the connection errors with a new connection, as if Redis were away.
    others = [kind for kind in NO_CONNECTION_ERRORS if kind not in OUTAGES]
    kinds = KINDS if step in ("envelope", "decompress", "arguments") else others
    clear_letters(client.redis)
    client.redis.lpush(QUEUE, *(message(f"{step}-{kind}", step, kind) for kind in kinds))
    for kind in kinds:
        with pytest.raises(InvalidRequest) as caught:
            client.job(f"{step}-{kind}").result(GET_S)
        assert kind.rpartition(".")[2] not in caught.value.message
    if step != "arguments":
        assert len(letters_in(client.redis)) == len(kinds)
    _serves_on(worker, client)


@pytest.mark.parametrize("step", ["fault", "strategy", "request"])
def test_what_says_nothing_of_a_message_is_one_of_its_attempts(
    worker: WorkerProcess, client: Client, step: str
) -> None:
    clear_letters(client.redis)
    client.redis.lpush(QUEUE, *(message(f"{step}-{kind}", step, kind) for kind in OUTAGES))
    for kind in OUTAGES:
        with pytest.raises(AttemptsExhausted):
            client.job(f"{step}-{kind}").result(GET_S)
    assert len(letters_in(client.redis)) == len(OUTAGES)
    _serves_on(worker, client)


def test_an_entry_that_cannot_be_read_for_its_id_is_a_dead_letter(
    worker: WorkerProcess, client: Client
) -> None:
    clear_letters(client.redis)
    # A worker reads few such entries a second.
    kinds = KINDS[::6]
    client.redis.lpush(QUEUE, *(message(kind, "reread", kind) for kind in kinds))
    wait_until(lambda: len(letters_in(client.redis)) == len(kinds), timeout_s=GET_S)
    _serves_on(worker, client)


@pytest.mark.parametrize("step", ["typed header", "typed property", "typed body"])
def test_a_value_whose_decoder_raises_stays_an_object(
    worker: WorkerProcess, client: Client, step: str
) -> None:
    client.redis.lpush(QUEUE, *(message(f"{step}-{kind}", step, kind) for kind in KINDS))
    for kind in KINDS:
        metadata = client.job(f"{step}-{kind}").result(GET_S).metadata
        wanted = {"__type__": "raising", "__value__": kind} if step == "typed body" else None
        assert metadata == wanted
    _serves_on(worker, client)


@pytest.mark.parametrize("kind", ["builtins.TypeError", "decimal.InvalidOperation"])
def test_a_job_whose_report_raises_has_its_attempts_counted(
    worker: WorkerProcess, client: Client, kind: str
) -> None:
    client.redis.lpush(QUEUE, message(f"report-{kind}", "report", kind))
    with pytest.raises(AttemptsExhausted):
        client.job(f"report-{kind}").result(GET_S)
    _serves_on(worker, client)


def _serves_on(worker: WorkerProcess, client: Client) -> None:
    assert client.submit(prompt="still there?", max_tokens=1).result(GET_S).text == "w0 "
    wait_until(lambda: not held_ids(client.redis), what="every claim to be settled")
    assert worker.process.poll() is None
    assert worker.text().count("Connected to redis") == 1, "it never reconnected"
