"""A JSON log has one document a line, and one line a job."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from tests.gateways import running_gateway
from tests.services import RedisServer, WorkerProcess, wait_until

QUEUE = "llorch.toy"
GET_S = 60
TRACE = "0af7651916cd43dd8448eb211c80319c"


def lines(text: str) -> list[dict[str, Any]]:
    """The documents of a log; fails if a line is none. The last may still be written."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def about(worker: WorkerProcess, job_id: str) -> list[dict[str, Any]]:
    """The lines about one job, above DEBUG."""

    def ended() -> list[dict[str, Any]]:
        # Before, the same file has the banner that Celery prints.
        log = worker.text().partition(' ready."')[2].partition("\n")[2]
        found = [line for line in lines(log) if job_id in str(line)]
        found = [line for line in found if line["level"] != "DEBUG"]
        return found if any("outcome" in line for line in found) else []

    return wait_until(ended, what=f"the line of job {job_id}")


def test_a_job_has_one_line(stock: Celery, traced_worker: WorkerProcess) -> None:
    sent = stock.send_task(
        TASK_NAME,
        kwargs={"prompt": "x", "max_tokens": 3},
        queue=QUEUE,
        headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"},
    )
    result = sent.get(timeout=GET_S)
    (line,) = about(traced_worker, sent.id)
    timings = {name: line[name] for name in ("queue_ms", "prefill_ms", "first_token_ms")}
    assert all(value >= 0 for value in timings.values())
    assert line["time"].endswith("Z")
    wanted = {
        "level": "INFO",
        "message": "job ended: length",
        "job_id": sent.id,
        "trace_id": TRACE,
        "model": "toy",
        "worker": traced_worker.hostname,
        "attempt": 1,
        "outcome": "length",
        "prompt_tokens": result["usage"]["prompt"],
        "cached_tokens": 0,
        "completion_tokens": 3,
        "process": traced_worker.process.pid,
    }
    assert line | wanted == line


def test_a_refused_job_has_one_line_with_its_code(
    stock: Celery, traced_worker: WorkerProcess
) -> None:
    sent = stock.send_task(TASK_NAME, kwargs={"prompt": "x", "max_tokens": 0}, queue=QUEUE)
    with pytest.raises(Exception, match="max_tokens"):
        sent.get(timeout=GET_S)
    (line,) = about(traced_worker, sent.id)
    assert line["outcome"] == "failed"
    assert line["error"] == "INVALID_REQUEST"
    assert "prompt_tokens" not in line


def test_a_job_with_another_name_has_one_line_without_it(
    stock: Celery, traced_worker: WorkerProcess
) -> None:
    sent = stock.send_task(
        TASK_NAME, kwargs={"prompt": "x", "max_tokens": 1}, queue=QUEUE, shadow="another name"
    )
    sent.get(timeout=GET_S)
    (line,) = about(traced_worker, sent.id)
    assert line["outcome"] == "length"
    assert "another name" not in traced_worker.text()


def test_a_defect_is_one_document_with_its_traceback(
    client: Client, traced_worker: WorkerProcess
) -> None:
    job = client.submit(prompt="raise ValueError", max_tokens=1)
    with pytest.raises(Exception, match="ValueError"):
        job.result(GET_S)
    defect, line = about(traced_worker, job.id)
    assert "Traceback" in defect["exception"]
    assert defect["job_id"] == line["job_id"] == job.id
    assert defect["trace_id"] == line["trace_id"]
    assert line["error"] == "INTERNAL"


def test_names_control_no_terminal(client: Client, traced_worker: WorkerProcess) -> None:
    evil = "\x1b[2J\n\u202e forged"
    client.redis.lpush(QUEUE, json.dumps({"headers": {"task": evil, "id": evil}, "body": evil}))
    job = client.submit(prompt="x", max_tokens=1)
    job.result(GET_S)
    about(traced_worker, job.id)
    assert "\x1b" not in traced_worker.text()
    assert "\u202e" not in traced_worker.text()


def test_a_gateways_lines_are_documents_without_queries(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLORCH_LOG_FORMAT", "json")
        with running_gateway(redis_server.url, tmp_path_factory.mktemp("gateway")) as gateway:
            assert httpx.get(f"{gateway.url}/v1/models?q=secret").status_code == 200
            wait_until(lambda: "/v1/models" in gateway.log.read_text())
            told = [line["message"] for line in lines(gateway.log.read_text())]
    assert any("GET /v1/models HTTP" in message for message in told)
    assert not any("secret" in message for message in told)
