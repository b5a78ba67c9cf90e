"""Jobs through the queue from the command line, against a real worker."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

import pytest

from llorch_worker.broker import keys, registry
from llorch_worker.broker.connection import connect
from llorch_worker.broker.queues import worker_queue
from llorch_worker.client import Client
from tests.cli.command import Served, Started, run
from tests.services import wait_until

LONG = ("--max-tokens", "450", "--ignore-eos")


@pytest.fixture(autouse=True)
def _redis(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLORCH_REDIS_URL", served.redis_url)


def test_submit_prints_the_id_and_watch_all_the_tokens() -> None:
    submitted = run("submit", "Once upon a time", "--max-tokens", "20", "-t", "0", fresh=True)
    assert submitted.code == 0, submitted
    job = submitted.out.strip()
    watched = run("watch", job, fresh=True)
    assert watched.code == 0, watched
    result = run("watch", job, "--json").json
    assert result["id"] == job
    assert watched.out == result["text"] + "\n"
    assert "20 tokens" in watched.err


def test_wait_and_stream_print_the_same_text() -> None:
    options = ("Lily", "--max-tokens", "24", "--seed", "5")
    waited, streamed = run("submit", *options, "--wait"), run("submit", *options, "--stream")
    assert waited.code == streamed.code == 0, (waited, streamed)
    assert waited.out == streamed.out != ""


def test_every_choice_is_printed() -> None:
    ran = run("submit", "The king", "-n", "3", "--max-tokens", "5", "--stream")
    assert [line for line in ran.out.splitlines() if "of 3" in line] == [
        "── 1 of 3 ──",
        "── 2 of 3 ──",
        "── 3 of 3 ──",
    ]


def test_json_is_one_document_with_the_result() -> None:
    ran = run("submit", "--json", "--wait", "--max-tokens", "3", "--", "-t is a prompt here")
    assert ran.code == 0, ran
    assert ran.json["usage"]["completion"] == 3
    assert set(run("submit", "x", "--max-tokens", "1", "--json").json) == {"id"}


def test_a_cancelled_job_ends_as_cancelled_also_for_its_watcher(served: Served) -> None:
    # Behind what keeps the worker busy for minutes: it cannot have ended before the cancel comes.
    lines = '{"prompt": "hold", "n": 16}\n' * 20
    held = run("submit", "--file", "-", *LONG, stdin=lines).out.split()
    job = run("submit", "Every night", *LONG).out.strip()
    assert run("status", job, "--json").json["state"] == "queued"
    cancelled = run("cancel", job, "--json", fresh=True)
    assert (cancelled.code, cancelled.json["cancelling"]) == (0, True), cancelled
    with Client(served.redis_url) as client:
        for other in held:
            client.job(other).cancel()
    watched = run("watch", job)
    assert watched.code == 1, watched
    assert watched.err.splitlines()[-1] == "error: the job was cancelled"
    assert run("status", job, "--json").json["state"] == "cancelled"
    assert "had already ended" in run("cancel", job).out


def test_ctrl_c_while_waiting_cancels_the_job(served: Served) -> None:
    with Client(served.redis_url) as client:
        before = _known_jobs(client)
        command = Started("submit", "One day", *LONG, "-n", "16", "--stream")
        command.wait_for("── 1 of 16")
        command.signal(signal.SIGINT)
        assert command.ended() == 130
        (job,) = _known_jobs(client) - before
        wait_until(lambda: client.job(job).status().ended)
        assert client.job(job).status().state == "cancelled"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_second_ctrl_c_leaves_no_job_of_a_file_behind(
    served: Served, tmp_path: Path, at_once: bool
) -> None:
    lines, output = tmp_path / "jobs.jsonl", tmp_path / "results.jsonl"
    short = {"prompt": "One day", "max_tokens": 1}
    fields = {"prompt": "One day", "max_tokens": 450, "ignore_eos": True, "n": 16}
    lines.write_text("".join(f"{json.dumps(each)}\n" for each in [short] + [fields] * 8))
    with Client(served.redis_url) as client:
        before = _known_jobs(client)
        command = Started("submit", "--file", lines, "--wait", "--output", output)
        wait_until(lambda: len(_known_jobs(client) - before) == 9)
        jobs = [client.job(job_id) for job_id in _known_jobs(client) - before]
        # What has ended is written at once, and kept.
        wait_until(lambda: "\n" in output.read_text())
        command.signal(signal.SIGINT)
        if not at_once:
            command.wait_for("cancelling the jobs that have not ended")
        command.signal(signal.SIGINT)
        assert command.ended() == 130
        states = [job.status().state for job in jobs]
        assert not {"queued", "running"} & set(states), states
        assert "cancelled" in states
        wait_until(lambda: all(job.status().ended for job in jobs))
    kept, *_ = output.read_text().splitlines()
    assert json.loads(kept)["result"]["usage"]["completion"] == 1


def test_ctrl_c_while_enqueueing_a_file_prints_the_ids_so_far(
    served: Served, tmp_path: Path
) -> None:
    lines = tmp_path / "jobs.jsonl"
    lines.write_text('{"prompt": "One day", "max_tokens": 1}\n' * 5000)
    with Client(served.redis_url) as client:
        before = _known_jobs(client)
        command = Started("submit", "--file", lines)
        wait_until(lambda: _known_jobs(client) - before)
        command.signal(signal.SIGINT)
        assert command.ended() == 130
        known = _known_jobs(client) - before
        assert known == {line for line in command.lines if re.fullmatch(r"[0-9a-f-]{36}", line)}
        for job_id in known:
            client.job(job_id).cancel()


def _known_jobs(client: Client) -> set[str]:
    return {key.split(":")[2] for key in client.redis.scan_iter(keys.job("*"))}


def test_a_file_of_jobs_is_run_and_reported_line_by_line(tmp_path: Path) -> None:
    requests = [{"prompt": f"Story {n}", "max_tokens": n} for n in range(1, 6)]
    requests.append({"prompt": "too long", "max_tokens": 511})
    path, output = tmp_path / "jobs.jsonl", tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, requests)))
    ran = run("submit", "--file", path, "--wait", "--output", output, "--ignore-eos")
    assert ran.code == 1, ran
    assert "6 jobs: 5 done, 1 failed, 15 tokens" in ran.err
    results = [json.loads(line) for line in output.read_text().splitlines()]
    assert [result["job"] for result in results] == [1, 2, 3, 4, 5, 6]
    assert [r["result"]["usage"]["completion"] for r in results[:5]] == [1, 2, 3, 4, 5]
    assert results[5]["error"]["code"] == "CONTEXT_LENGTH_EXCEEDED"


@pytest.mark.parametrize("options", [(), ("--wait",)])
def test_a_file_with_a_refused_job_leaves_none_in_the_queue(
    served: Served, options: tuple[str, ...]
) -> None:
    fits = {"prompt": "a", "max_tokens": 450, "ignore_eos": True, "n": 16}
    too_long = fits | {"max_tokens": 9999}
    lines = "\n".join(map(json.dumps, [fits, fits, too_long, fits]))
    with Client(served.redis_url) as client:
        before = _known_jobs(client)
        ran = run("submit", "--file", "-", *options, stdin=lines)
        assert (ran.code, ran.out) == (2, "")
        assert "job 3 of the file: prompt + max_tokens: must not exceed" in ran.err
        assert ran.err.rstrip().endswith("cancelled 2 jobs before it")
        jobs = [client.job(job_id) for job_id in _known_jobs(client) - before]
        assert len(jobs) == 2
        wait_until(lambda: all(job.status().ended for job in jobs))
        assert "cancelled" in {job.status().state for job in jobs}


def test_status_shows_workers_models_and_queues(served: Served) -> None:
    document = run("status", "--json", fresh=True).json
    # Redis may know of more, from other tests.
    assert served.model in {model["name"] for model in document["models"]}
    (worker,) = (each for each in document["workers"] if each["model"] == served.model)
    assert worker["engine"]["kv_blocks_total"] > 0
    shown = run("status").out
    assert f"llorch.{served.model}" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_status_shows_since_when_a_worker_is_silent_and_cuts_no_name_in_a_pipe(
    served: Served,
) -> None:
    name = f"gpu0@{'a-long-name.' * 12}example"
    with connect(served.redis_url) as client:
        (alive,) = (card for card in registry.workers(client) if card.model == served.model)
        assert "last seen" not in run("status").out.partition("queue")[0]
        dead = alive.model_copy(update={"hostname": name, "last_seen": time.time() - 12})
        try:
            registry.announce(client, dead)
            shown = run("status", COLUMNS="").out
        finally:
            registry.withdraw(client, name)
            client.zrem(keys.WORKER_QUEUES, worker_queue(served.model, name))
    (line,) = (line for line in shown.splitlines() if name in line)
    assert re.search(r"1\d s ago$", line.rstrip())


def test_status_shows_a_queue_that_no_worker_serves(served: Served) -> None:
    with connect(served.redis_url) as client:
        client.lpush("llorch.tyo", "a job", "another", "and one more")
        document = run("status", "--json").json
        shown = run("status").out
        client.delete("llorch.tyo")
    assert document["unserved_queues"]["llorch.tyo"] == 3
    assert "llorch.tyo: 3 jobs wait, no worker serves it" in shown
    assert "llorch.tyo" not in run("status").out


def test_a_job_that_the_worker_refuses_is_an_error() -> None:
    ran = run("submit", "x", "--max-tokens", "100000", "--wait", "--json")
    assert ran.code == 2, ran
    assert ran.json["error"]["code"] == "CONTEXT_LENGTH_EXCEEDED"
