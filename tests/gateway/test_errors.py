"""Every refusal has its status and OpenAI's shape; bad clients harm nobody; no log has a prompt."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from fastapi import FastAPI, HTTPException
from fastapi.testclient import TestClient

from llorch_worker.client import Client
from llorch_worker.contract import (
    AttemptsExhausted,
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    IdempotencyKeyReused,
    InternalError,
    InvalidRequest,
    LlorchError,
    ModelLoadFailed,
    ModelNotServed,
    OutOfMemory,
    QueueFull,
)
from llorch_worker.gateway import errors
from llorch_worker.gateway.errors import TooManyJobs
from llorch_worker.gateway.files.store import storage_errors
from llorch_worker.openai_api.errors import NoWorker, body_of, status_of
from tests.gateway import sse
from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, WorkerProcess, running_worker

MAX_BODY = 1_000
GIGABYTE = 10**9
ALLOWED_GROWTH = 64 * 2**20
MARKER = "zyzzyva"
DEADLINE_S = 0.2


@pytest.fixture(scope="module")
def strict(
    redis_server: RedisServer,
    toy_worker: WorkerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[GatewayProcess]:
    """A gateway that allows small bodies and no pauses."""
    folder = tmp_path_factory.mktemp("strict")
    with running_gateway(
        redis_server.url, folder, max_body_bytes=MAX_BODY, body_timeout_s=0.5
    ) as gateway:
        yield gateway


def connect(gateway: GatewayProcess) -> socket.socket:
    host, port = gateway.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=30)


def answer_of(raw: socket.socket) -> tuple[int, dict[str, Any]]:
    response = b""
    while part := raw.recv(65536):
        response += part
    head, _, body = response.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def head(*more: str, path: str = "/v1/jobs") -> bytes:
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: localhost",
        "Content-Type: application/json",
        *more,
        "",
        "",
    ]
    return "\r\n".join(lines).encode()


def test_two_lengths_of_one_body_are_refused_and_the_connection_closed(
    strict: GatewayProcess,
) -> None:
    with connect(strict) as raw:
        raw.sendall(
            head("Content-Length: 2", "Transfer-Encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n"
        )
        status, body = answer_of(raw)
    assert (status, body["error"]["llorch_code"]) == (400, "INVALID_REQUEST")


@pytest.mark.parametrize("encoding", ["gzip", "br", "zstd", "gzip, identity"])
def test_a_compressed_body_is_a_415(strict: GatewayProcess, encoding: str) -> None:
    for path in ("/v1/jobs", "/v1/files"):
        answer = httpx.post(
            f"{strict.url}{path}", content=b"x", headers={"Content-Encoding": encoding}
        )
        assert answer.status_code == 415
        assert answer.json()["error"]["llorch_code"] == "UNSUPPORTED_MEDIA_TYPE"
    same = httpx.post(f"{strict.url}/v1/jobs", json={}, headers={"Content-Encoding": "identity"})
    assert same.status_code == 400


@pytest.mark.parametrize(
    ("content", "charset"),
    [
        ('{"prompt": "é"}'.encode("latin-1"), ""),
        ('{"prompt": "é"}'.encode("latin-1"), "; charset=latin-1"),
        ('{"prompt": "é"}'.encode(), '; charset="ISO-8859-1"'),
        ('{"prompt": "é"}'.encode("utf-16"), "; charset=utf-16"),
        ('{"prompt": "x"}'.encode("utf-16-be"), ""),
    ],
)
def test_a_body_in_another_encoding_hears_of_utf_8(
    strict: GatewayProcess, content: bytes, charset: str
) -> None:
    headers = {"Content-Type": f"application/json{charset}"}
    answer = httpx.post(f"{strict.url}/v1/completions", content=content, headers=headers)
    assert answer.status_code == 400
    assert "UTF-8" in answer.json()["error"]["message"]


def test_a_body_that_drips_is_a_408(strict: GatewayProcess) -> None:
    with connect(strict) as raw:
        raw.sendall(head("Content-Length: 900"))
        raw.settimeout(0.1)
        answer = b""
        while not answer:
            raw.sendall(b" ")
            with suppress(TimeoutError):
                answer = raw.recv(65536)
    assert b"408" in answer.splitlines()[0]


@pytest.mark.parametrize("of_the_form", [True, False])
def test_a_full_disk_is_named(of_the_form: bool) -> None:
    app = FastAPI()
    errors.install(app)

    @app.post("/")
    def upload() -> None:
        full = OSError(errno.ENOSPC, "No space left on device")
        if of_the_form:
            raise HTTPException(400, "There was an error parsing the body") from full
        with storage_errors():
            raise full

    answer = TestClient(app).post("/")
    assert (answer.status_code, answer.json()["error"]["llorch_code"]) == (507, "NO_SPACE")


@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest, 400, "invalid_request"),
        (ContextLengthExceeded, 400, "context_length_exceeded"),
        (ModelNotServed, 404, "model_not_found"),
        (NoWorker, 503, "model_not_found"),
        (QueueFull, 429, "rate_limit_exceeded"),
        (TooManyJobs, 429, "rate_limit_exceeded"),
        (DeadlineExceeded, 504, "deadline_exceeded"),
        (Cancelled, 409, "cancelled"),
        (IdempotencyKeyReused, 409, "invalid_request"),
        (OutOfMemory, 503, "out_of_memory"),
        (ModelLoadFailed, 503, "model_load_failed"),
        (AttemptsExhausted, 500, "attempts_exhausted"),
        (InternalError, 500, "internal"),
    ],
)
def test_each_error_of_the_contract_has_a_status(
    error: type[LlorchError], status: int, code: str
) -> None:
    body = body_of(error("why")).error
    assert (status_of(error("why")), body.code, body.message) == (status, code, "why")
    assert (body.llorch_code, body.retriable) == (error.code, error.retriable)


def test_all_faults_of_a_request_come_at_once(strict: GatewayProcess) -> None:
    body = {"max_tokens": -1, "temperature": 9, "nonsense": 1, "callback_url": 5, "top_p": MARKER}
    refused = httpx.post(f"{strict.url}/v1/jobs", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["type"]) == (400, "invalid_request_error")
    assert {fault["field"] for fault in error["faults"]} == {
        "prompt | prompt_token_ids | messages",
        *body,
    }
    assert MARKER not in refused.text


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"1",
        b"[" * 900,
        b'{"prompt": NaN}',
        b'{"prompt": "\xff"}',
        b'{"prompt": "x", "seed": ' + b"9" * 800 + b"}",
        b'{"prompt": "x", "\\ud800": 1}',
    ],
)
def test_bodies_that_are_no_request_are_a_400(strict: GatewayProcess, body: bytes) -> None:
    headers = {"Content-Type": "application/json"}
    for path in ("/v1/jobs", "/v1/chat/completions"):
        refused = httpx.post(f"{strict.url}{path}", content=body, headers=headers)
        assert (refused.status_code, refused.json()["error"]["llorch_code"]) == (
            400,
            "INVALID_REQUEST",
        )


def test_a_declared_length_above_the_limit_is_refused_unread(strict: GatewayProcess) -> None:
    with connect(strict) as raw:
        raw.sendall(head(f"Content-Length: {GIGABYTE}"))
        status, body = answer_of(raw)
    assert (status, body["error"]["llorch_code"]) == (413, "TOO_LARGE")


def test_chunks_above_the_limit_are_refused_and_not_kept(strict: GatewayProcess) -> None:
    process = psutil.Process(strict.process.pid)
    workers = [process, *process.children(recursive=True)]

    def resident() -> int:
        return sum(each.memory_info().rss for each in workers)

    before = most = resident()
    chunk = b"%x\r\n%b\r\n" % (2**20, b"x" * 2**20)
    with connect(strict) as raw:
        raw.sendall(head("Transfer-Encoding: chunked"))
        sent = 0
        try:
            while sent < GIGABYTE:
                raw.sendall(chunk)
                sent += len(chunk)
                most = max(most, resident())
        except OSError:
            pass
    assert most - before < ALLOWED_GROWTH
    assert sent < GIGABYTE / 10
    # One who stops in time hears why.
    with connect(strict) as raw:
        raw.sendall(head("Transfer-Encoding: chunked") + b"7d0\r\n" + b"x" * 2000 + b"\r\n")
        status, body = answer_of(raw)
    assert (status, body["error"]["llorch_code"]) == (413, "TOO_LARGE")


def test_a_header_without_end_is_refused_and_not_kept(strict: GatewayProcess) -> None:
    process = psutil.Process(strict.process.pid)
    before, sent = process.memory_info().rss, 0
    with connect(strict) as raw:
        raw.sendall(b"GET /v1/models HTTP/1.1\r\nX: ")
        with suppress(OSError):
            while sent < GIGABYTE:
                raw.sendall(b"x" * 2**20)
                sent += 2**20
    assert sent < GIGABYTE / 10
    assert process.memory_info().rss - before < ALLOWED_GROWTH


def test_a_body_that_does_not_come_is_a_408(strict: GatewayProcess) -> None:
    with connect(strict) as raw:
        raw.sendall(head("Content-Length: 100") + b'{"prompt"')
        status, body = answer_of(raw)
    assert (status, body["error"]["llorch_code"]) == (408, "REQUEST_TIMEOUT")


def test_half_open_connections_harm_nobody(strict: GatewayProcess) -> None:
    with ExitStack() as open_connections:
        for number in range(300):
            raw = open_connections.enter_context(connect(strict))
            raw.sendall(b"" if number % 2 else b"POST /v1/jobs HTTP/1.1\r\nHo")
        assert httpx.get(f"{strict.url}/v1/models").status_code == 200


def test_a_reader_that_does_not_read_holds_up_nobody_else(strict: GatewayProcess) -> None:
    job = {"prompt": "x", "max_tokens": 500}
    job_id = httpx.post(f"{strict.url}/v1/jobs", json=job).json()["id"]
    with connect(strict) as slow:
        slow.sendall(f"GET /v1/jobs/{job_id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert len(sse.token_ids(sse.read(strict.url, job_id))) == 500


@pytest.fixture
def short_queue(own_server: RedisServer, tmp_path: Path) -> Iterator[WorkerProcess]:
    with running_worker(
        own_server.url, tmp_path, model_name="toy", max_sequences=1, queue_limit=1
    ) as worker:
        yield worker


def test_a_full_queue_is_a_429(
    own_server: RedisServer, short_queue: WorkerProcess, tmp_path: Path
) -> None:
    with running_gateway(own_server.url, tmp_path) as gateway, short_queue.paused():
        body = {"prompt": "x"}
        answers = [httpx.post(f"{gateway.url}/v1/jobs", json=body) for _ in range(3)]
    assert [answer.status_code for answer in answers].count(429) >= 1
    assert answers[-1].status_code == 429
    assert answers[-1].json()["error"]["llorch_code"] == "QUEUE_FULL"
    assert int(answers[-1].headers["retry-after"]) > 0


def test_no_prompt_is_in_any_log(
    strict: GatewayProcess, toy_worker: WorkerProcess, client: Client
) -> None:
    url = f"{strict.url}/v1/jobs"
    for body in (
        {"prompt": f"{MARKER} x", "max_tokens": 2},
        {"prompt": f"raise ValueError {MARKER}", "max_tokens": 2},
        {"prompt": MARKER, "max_tokens": 10**6},
        {"prompt": MARKER, "temperature": MARKER, MARKER: 1},
        {"messages": [{"role": MARKER, "content": MARKER}]},
    ):
        answer = httpx.post(url, json=body)
        if answer.status_code == 202:
            job_id = answer.json()["id"]
            sse.read(strict.url, job_id)
    malformed = httpx.post(
        url, content=f'{{"prompt": "{MARKER}', headers={"Content-Type": "application/json"}
    )
    assert malformed.status_code == 400
    assert MARKER not in strict.log.read_text()
    assert MARKER not in toy_worker.text()
    assert not [name for name in client.redis.scan_iter() if MARKER in name]
