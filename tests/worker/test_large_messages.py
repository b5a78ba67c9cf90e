"""A message that is, or inflates to, too much is refused with its size before it is read."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME, InvalidRequest
from tests.messages import QUEUE, envelope
from tests.services import RedisServer, WorkerProcess, running_worker, wait_until
from tests.store import clear_letters, held_ids, letters_in

GET_S = 60
MOST = 2**20


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    folder: Path = tmp_path_factory.mktemp("small")
    with running_worker(
        redis_server.url,
        folder,
        model_name="toy",
        max_sequences=2,
        LLORCH_MAX_MESSAGE_BYTES="1MiB",
        LLORCH_DEAD_LETTERS_BYTES="4MiB",
    ) as worker:
        yield worker


@pytest.fixture(autouse=True)
def _serves_on(worker: WorkerProcess, client: Client) -> Iterator[None]:
    clear_letters(client.redis)
    yield
    assert client.submit(prompt="still there?", max_tokens=1).result(GET_S).text == "w0 "
    wait_until(lambda: not held_ids(client.redis), what="every claim to be settled")
    assert worker.process.poll() is None


def refusal(client: Client, job_id: str, body: Any, **headers: str) -> str:
    named = {"task": TASK_NAME, "id": job_id} | headers
    client.redis.lpush(QUEUE, json.dumps(envelope(body, headers=named)))
    with pytest.raises(InvalidRequest) as caught:
        client.job(job_id).result(GET_S)
    (fault,) = caught.value.faults
    assert fault.field == "message"
    return fault.rule


def peak_kib(worker: WorkerProcess) -> int:
    status = Path(f"/proc/{worker.process.pid}/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def test_a_body_that_inflates_to_too_much_is_refused_and_never_made(
    worker: WorkerProcess, client: Client
) -> None:
    before = peak_kib(worker)
    bomb = zlib.compress(bytes(256 * MOST))
    rule = refusal(client, "bomb", bomb, compression="gzip")
    assert f"its body of {len(bomb)} bytes inflates to more; at most {MOST} are allowed" in rule
    assert peak_kib(worker) - before < 16 * 2**10
    (letter,) = map(json.loads, letters_in(client.redis))
    assert (letter["id"], letter["reason"]) == ("bomb", rule)
    assert letter["message_bytes"] > len(bomb)


@pytest.mark.parametrize("chars", [MOST + 2**16, 3 * MOST])
def test_a_larger_message_is_refused_with_its_size_and_not_kept(client: Client, chars: int) -> None:
    rule = refusal(client, f"large {chars}", [[], {"prompt": "x" * chars}, {}])
    assert rule.endswith(f" bytes; at most {MOST} are allowed (LLORCH_MAX_MESSAGE_BYTES)")
    (letter,) = map(json.loads, letters_in(client.redis))
    assert letter["message_bytes"] > chars
    assert len(letter["message"]) in (0, letter["message_bytes"])


def test_a_larger_entry_that_names_no_job_is_a_dead_letter_of_its_size(client: Client) -> None:
    client.redis.lpush(QUEUE, b"x" * 3 * MOST)
    wait_until(lambda: len(letters_in(client.redis)) == 1)
    (letter,) = map(json.loads, letters_in(client.redis))
    assert (letter["reason"], letter["message"], letter["message_bytes"]) == (
        "malformed", "", 3 * MOST,
    )  # fmt: skip


def test_headers_of_too_many_values_are_refused(client: Client) -> None:
    named = {"task": TASK_NAME, "id": "headers", "x": [[]] * 150_000}
    client.redis.lpush(QUEUE, json.dumps(envelope([[], {"prompt": "x"}, {}], headers=named)))
    with pytest.raises(InvalidRequest, match="must hold at most 100000 objects and lists"):
        client.job("headers").result(GET_S)


def test_a_stock_producers_compressed_message_runs(stock: Celery, client: Client) -> None:
    for name in ("gzip", "bzip2", "lzma"):
        kwargs = {"prompt": "x" * 500_000, "max_tokens": 1}
        sent = stock.send_task(TASK_NAME, kwargs=kwargs, queue=QUEUE, compression=name)
        assert client.job(sent.id).result(GET_S).text == "w0 "
