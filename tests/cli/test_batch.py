"""``llorch batch run``: every line answered once, whatever interrupts it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from llorch_worker.broker.connections.connection import connect
from llorch_worker.cli.batch_output import written_to
from tests.cli.command import Ran, Started, run
from tests.latch import Latch
from tests.services import (
    RedisServer,
    WorkerProcess,
    own_redis,
    run_python,
    running_worker,
    wait_until,
)
from tests.store import job_ids, jobs_that_wait, record_of

FULL_SIZE = bool(os.environ.get("LLORCH_FULL_SIZE"))
LINES = 2_000 if FULL_SIZE else 200


@pytest.fixture(autouse=True)
def _redis(redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLORCH_REDIS_URL", redis_server.url)


@pytest.fixture(scope="module", autouse=True)
def _worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("worker")
    with running_worker(
        redis_server.url, folder, model_name="toy", max_sequences=8, TOY_STEP_MS=1
    ) as worker:
        yield worker


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def batch(path: Path, output: Path, *options: str, fresh: bool = False) -> Ran:
    return run("batch", "run", path, "-o", output, *options, fresh=fresh)


def test_bare_requests_and_openai_lines_are_answered_in_order(tmp_path: Path) -> None:
    def openai(custom_id: str, url: str, **body: Any) -> dict[str, Any]:
        return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}

    chat = [{"role": "user", "content": "x"}]
    path = written(
        tmp_path / "in.jsonl",
        {"prompt": "x", "max_tokens": 2},
        openai("a", "/v1/completions", model="toy", prompt=["x", "y"], max_tokens=1),
        "",
        openai("b", "/v1/chat/completions", model="toy", messages=chat, max_tokens=3),
        {"prompt": "x"},
    )
    output = tmp_path / "out.jsonl"
    ran = batch(path, output, "--max-tokens", "4", fresh=True)
    assert ran.code == 0, ran
    assert "4 lines: 4 done, 0 failed, " in ran.err
    first, completion, chatted, last = answers(output)
    assert (first["line"], first["result"]["text"]) == (1, "w0 w1 ")
    assert (last["line"], last["result"]["usage"]["completion"]) == (5, 4)
    assert (completion["custom_id"], completion["response"]["status_code"]) == ("a", 200)
    assert [c["text"] for c in completion["response"]["body"]["choices"]] == ["w0 ", "w0 "]
    assert chatted["response"]["body"]["choices"][0]["message"]["content"] == "w0 w1 w2 "
    assert not output.with_name("out.jsonl.batch").exists()


def test_a_wrong_line_is_answered_by_its_error_and_the_others_go_on(tmp_path: Path) -> None:
    path = written(
        tmp_path / "in.jsonl",
        {"prompt": "x", "max_tokens": 1},
        "not json",
        {"prompt": "x", "top_p": 7},
        {"promt": "x"},
        '{"metadata": ' + "[" * 10_000,
        {"prompt": "x", "max_tokens": 10**6},
        {"prompt": "raise ValueError"},
        {"custom_id": "a", "method": "POST", "url": "/v1/nothing", "body": {}},
        {"prompt": "x", "max_tokens": 1},
    )
    ran = batch(path, tmp_path / "out.jsonl", "--json")
    assert (ran.code, ran.json["lines"], ran.json["failed"]) == (1, 9, 7), ran
    good, *bad, good_too = answers(tmp_path / "out.jsonl")
    assert "result" in good
    assert "result" in good_too
    assert bad[0]["error"]["message"].startswith("line 2: must be JSON")
    assert bad[1]["error"]["faults"][0]["field"] == "top_p"
    assert "promt: unknown field" in bad[2]["error"]["message"]
    assert bad[3]["error"]["message"].startswith("line 5: must be JSON")
    codes = [each["error"]["code"] for each in bad[4:6]]
    assert codes == ["CONTEXT_LENGTH_EXCEEDED", "INTERNAL"]
    assert bad[6]["response"]["status_code"] == 400
    assert bad[6]["response"]["body"]["error"]["param"] == "url"


@pytest.mark.parametrize("line", [b"\xff\xfe", b'{"prompt": "\xe9"}'], ids=["utf16", "latin1"])
def test_a_line_that_is_not_utf_8_is_an_error_without_its_text(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(line + b'\n{"prompt": "x", "max_tokens": 1}\n')
    assert batch(path, tmp_path / "out").code == 1
    wrong, good = answers(tmp_path / "out")
    assert wrong["error"]["message"].startswith("line 1: must be JSON in UTF-8")
    assert "result" in good


def test_only_newlines_separate_json_lines(tmp_path: Path) -> None:
    # These end a line for Python, but may stand in a JSON string as they are.
    path = tmp_path / "in.jsonl"
    text = '\ufeff{"prompt": "a\u2028b\u0085c\u2029", "max_tokens": 1}\r\n{"prompt": "x"}\r\n'
    path.write_text(text, encoding="utf-8", newline="")
    assert batch(path, tmp_path / "out", "--max-tokens", "1").code == 0
    assert len((tmp_path / "out").read_bytes().split(b"\n")) == 3


def test_an_output_is_never_overwritten_nor_mixed_with_another(tmp_path: Path) -> None:
    path, output = written(tmp_path / "in", {"prompt": "x", "max_tokens": 1}), tmp_path / "out"
    assert batch(path, output).code == 0
    ran = batch(path, output)
    assert ran.code == 2
    assert "is complete" in ran.err
    empty = written(tmp_path / "empty", "", " ")
    assert "has no requests" in batch(empty, tmp_path / "other").err


@pytest.mark.parametrize(
    "content",
    [
        '{"prompt": "x", "max_tokens": 1}\n',
        '{"prompt": "x", "max_tokens": 1}\n{"prompt": "y"}\n',
        "#!/bin/sh\nsrun llorch worker\n",
        '{"run": "nightly", "input": "data"}',
        '{"run": "' + "x" * 2000,
        json.dumps({"run": "-" * 36, "input": "0" * 64}),
        "\0" * 2000 + "x",
    ],
)
def test_a_file_that_only_has_the_name_of_a_runs_state_is_left_alone(
    tmp_path: Path, content: str
) -> None:
    path, other = written(tmp_path / "in", {"prompt": "x"}), tmp_path / "job.batch"
    other.write_text(content)
    for read in (path, other):
        ran = batch(read, tmp_path / "job")
        assert (ran.code, other.read_text()) == (2, content)
        if read == path:
            assert f"{other} exists and is not the state file" in ran.err
    assert not (tmp_path / "job").exists()


@pytest.mark.parametrize("length", [0, 130])
def test_a_state_that_a_crash_of_the_machine_left_empty_is_begun(
    tmp_path: Path, length: int
) -> None:
    state = tmp_path / "job.batch"
    state.write_bytes(bytes(length))
    with pytest.raises(InterruptedError), written_to(tmp_path / "job", "0" * 64) as output:
        raise InterruptedError
    assert json.loads(state.read_bytes())["run"] == str(output.run_id)


def test_ctrl_c_stops_and_the_same_command_goes_on(tmp_path: Path, latch: Latch) -> None:
    path = written(
        tmp_path / "in",
        *({"prompt": "x", "max_tokens": 1} for _ in range(5)),
        {"prompt": latch.prompt(), "max_tokens": 2},
        *({"prompt": "x", "max_tokens": 1} for _ in range(5)),
    )
    output = tmp_path / "out"
    command = Started("batch", "run", path, "-o", output)
    wait_until(lambda: output.exists() and len(answers(output)) == 5)
    other = batch(path, output)
    assert other.code == 1
    assert "another process writes" in other.err
    command.signal(signal.SIGINT)
    assert command.ended() == 130
    assert "stopped after 5 of 11 lines" in "\n".join(command.lines)
    changed = batch(path, output, "--max-tokens", "9")
    assert changed.code == 2
    assert "not those with which this output began" in changed.err
    latch.open()
    ran = batch(path, output)
    assert ran.code == 0, ran
    assert "going on after 5 lines" in ran.err
    assert [each["line"] for each in answers(output)] == list(range(1, 12))


def test_kills_cost_no_line_and_repeat_none(redis_server: RedisServer, tmp_path: Path) -> None:
    path = written(
        tmp_path / "in", *({"prompt": "x", "max_tokens": 2, "seed": n} for n in range(LINES))
    )
    output = tmp_path / "out"
    with connect(redis_server.url) as client:
        before = job_ids(client)
        for share in (0.2, 0.5, 0.8):
            command = Started("batch", "run", path, "-o", output, "--window", "20")
            least = int(share * LINES)
            wait_until(lambda least=least: count(output) > least)
            command.signal(signal.SIGKILL)
            command.child.wait(60)
        # Killed within a write.
        whole = output.read_bytes()
        output.write_bytes(whole[: whole.rindex(b"\n") - 20])
        ran = batch(path, output, "--window", "20")
        assert ran.code == 0, ran
        results = [each["result"] for each in answers(output)]
        assert [result["seed"] for result in results] == list(range(LINES))
        assert {result["text"] for result in results} == {"w0 w1 "}
        # Each line ran as one job.
        assert job_ids(client) - before == {result["id"] for result in results}
        assert {record_of(client, result["id"]).get("attempts") for result in results} == {"1"}


def count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_the_queue_holds_one_window_at_most(
    redis_server: RedisServer, tmp_path: Path, latch: Latch
) -> None:
    held = {"prompt": latch.prompt(), "max_tokens": 2}
    path, output = written(tmp_path / "in", *[held] * 100), tmp_path / "out"
    command = Started("batch", "run", path, "-o", output, "--window", "20")
    with connect(redis_server.url) as client:
        # The worker holds eight.
        wait_until(lambda: jobs_that_wait(client) == 12)
        latch.open()
        assert command.ended() == 0
    assert len(answers(output)) == 100


def test_without_a_worker_it_names_the_models_that_it_waits_for(tmp_path: Path) -> None:
    with own_redis() as server:
        with running_worker(server.url, tmp_path, model_name="toy"):
            pass
        lines = written(tmp_path / "in.jsonl", {"prompt": "a", "max_tokens": 1})
        command = Started(
            *("batch", "run", lines, "-o", tmp_path / "out"), LLORCH_REDIS_URL=server.url
        )
        try:
            command.wait_for("no worker is running: the jobs wait until one of toy starts")
        finally:
            command.child.kill()


def test_it_needs_no_fastapi(redis_server: RedisServer) -> None:
    loaded = run_python(
        "import json, sys; import llorch_worker.cli.batch_run; "
        "print(json.dumps([m for m in ('fastapi', 'fsspec', 'torch') if m in sys.modules]))",
        redis_server.url,
    )
    assert loaded == []
