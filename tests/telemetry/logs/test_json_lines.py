"""A JSON log has one document a line, and one line a job."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from celery import Celery

from llorch_worker.client import Client
from llorch_worker.contract import TASK_NAME
from llorch_worker.gateway.keys import new_key
from tests.cli.command import Started, run
from tests.gateways import running_gateway
from tests.services import REAL_APP, RedisServer, WorkerProcess, running_worker, wait_until

QUEUE = "llorch.toy"
GET_S = 60
TRACE = "0af7651916cd43dd8448eb211c80319c"


def lines(text: str) -> list[dict[str, Any]]:
    """The documents of a log; fails if a line is none. The last may still be written."""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def about(worker: WorkerProcess, job_id: str) -> list[dict[str, Any]]:
    """The lines about one job, above DEBUG."""

    def ended() -> list[dict[str, Any]]:
        found = [line for line in lines(worker.text()) if job_id in str(line)]
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


def test_a_gateways_line_has_the_key_the_time_and_the_job(
    redis_server: RedisServer, traced_worker: WorkerProcess, tmp_path: Path
) -> None:
    key, entry = new_key("alice")
    (tmp_path / "keys.toml").write_text(entry)
    headers = {"Authorization": f"Bearer {key}"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLORCH_LOG_FORMAT", "json")
        with (
            running_gateway(redis_server.url, tmp_path, keys=tmp_path / "keys.toml") as gateway,
            httpx.Client(base_url=gateway.url, timeout=GET_S, headers=headers) as http,
        ):
            job_id = http.post("/v1/jobs?q=secret", json={"prompt": "x", "max_tokens": 1}).json()[
                "id"
            ]
            streamed = {"model": "toy", "prompt": "x", "max_tokens": 1, "stream": True}
            assert http.post("/v1/completions", json=streamed).status_code == 200
            http.get(f"/v1/jobs/{job_id}")
            # A console that opens reads a dozen files, and then asks again and again.
            assert http.get("/console/main.js").status_code == 200
            assert http.get("/console/api/session").status_code == 200
            assert http.get("/console/api/fleet").status_code == 403
            http.get("/v1/jobs", headers={"Authorization": "no"})
            told = wait_until(lambda: access_lines(gateway.log.read_text(), 5))
        assert "secret" not in gateway.log.read_text()
    submitted, completed, asked, _, refused = told
    assert submitted["message"].endswith('"POST /v1/jobs HTTP/1.1" 202')
    assert [line["path"] for line in told] == [
        "/v1/jobs", "/v1/completions", f"/v1/jobs/{job_id}", "/console/api/fleet", "/v1/jobs",
    ]  # fmt: skip
    assert [line["key"] for line in told] == ["alice", "alice", "alice", "alice", None]
    assert [line["status"] for line in told] == [202, 200, 200, 403, refused["status"]]
    assert submitted["job_id"] == asked["job_id"] == job_id
    assert completed["job_id"] not in (None, job_id)
    assert refused["job_id"] is None
    assert all(line["duration_ms"] > 0 for line in told)


def access_lines(text: str, count: int) -> list[dict[str, Any]]:
    found = [line for line in lines(text) if "duration_ms" in line]
    return found if len(found) >= count else []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGQUIT, signal.SIGUSR1])
def test_all_that_a_celery_worker_prints_is_documents(
    redis_server: RedisServer, tmp_path: Path, number: int
) -> None:
    with running_worker(
        redis_server.url, tmp_path, model_name="toy", log_format="json", name="all"
    ) as worker:
        worker.process.send_signal(number)
        if number == signal.SIGUSR1:
            wait_until(lambda: "worker.celery.stacks" in worker.text())
            worker.process.terminate()
        worker.wait_exit()
    told = lines(worker.text())
    assert len(told) == len(worker.text().splitlines())
    assert any("shutdown" in line["message"] for line in told)
    if os.geteuid() == 0:
        assert any("superuser" in line["message"] for line in told), "Celery's warning"


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("worker --model demo --redis redis://127.0.0.1:1/0", 1),
        ("worker --model /nowhere --redis REDIS", 1),
        ("worker --lease x", 2),
        ("gateway --port x", 2),
        ("gateway --host 0.0.0.0", 2),
        ("exporter --port -1", 2),
        ("up --workers 0", 2),
    ],
)
def test_a_service_that_cannot_start_says_why_in_documents(
    redis_server: RedisServer, command: str, code: int
) -> None:
    words = command.replace("REDIS", redis_server.url).split()
    ran = run(*words, LLORCH_LOG_FORMAT="json")
    assert (ran.code, ran.out) == (code, "")
    *_, last = lines(ran.err)
    assert last["level"] == "ERROR"
    assert last["message"]


def test_a_celery_worker_with_wrong_settings_says_so_in_a_document(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    settings = {"app": REAL_APP, "log_format": "json", "lease_s": "x"}
    worker = WorkerProcess(redis_server.url, tmp_path / "log", **settings)  # type: ignore[arg-type]
    assert worker.wait_exit() == 2
    (line,) = lines(worker.text())
    assert "LLORCH_LEASE_S" in line["message"]


def test_all_that_up_and_its_children_print_is_documents(own_server: RedisServer) -> None:
    services = ("--no-flower", "--no-gateway", "--redis", own_server.url)
    up = Started("up", "--model", "demo", *services, LLORCH_LOG_FORMAT="json")
    up.wait_for("Ready.")
    up.signal(signal.SIGINT)
    assert up.ended() == 0
    told = lines("".join(f"{line}\n" for line in up.lines))
    assert {"worker", None} <= {line.get("program") for line in told}
    assert any("Drained" in line["message"] for line in told)


def test_warnings_and_unexpected_errors_are_documents(tmp_path: Path) -> None:
    source = """
import sys, threading, warnings
from llorch_worker.telemetry.logs.streams import print_documents
print_documents()
warnings.warn("in\\nlines")
print("half", end="", file=sys.stderr)
print(" a line", file=sys.stderr)
threading.Thread(target=lambda: 1 / 0).start()
for thread in threading.enumerate()[1:]:
    thread.join()
print("no end", end="", file=sys.stderr)
raise ValueError("in\\nlines")
"""
    ran = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 1
    warned, half, in_thread, rest, error = lines(ran.stderr)
    assert (warned["level"], half["message"]) == ("WARNING", "half a line")
    assert "ZeroDivisionError" in in_thread["exception"]
    assert (rest["message"], error["level"]) == ("no end", "CRITICAL")
    assert "ValueError" in error["exception"]
