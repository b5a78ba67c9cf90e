"""``llorch demo`` does what it says and leaves nothing behind."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import jsonschema
import psutil
import pytest

from llorch_worker.cli.demo_scenes import CHARACTER, DRAGON, QUESTION
from tests.cli.command import COMMAND_TIMEOUT_S, Started, alive
from tests.services import REPOSITORY, wait_until


def test_all_jobs_are_done_and_measured_and_nothing_is_left(
    demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Teams that use Celery often have one.
    (tmp_path / "tasks.py").write_text("raise SystemExit('the wrong tasks')")
    monkeypatch.chdir(tmp_path)
    # And one of a worker of several models may be set.
    several = {"LLORCH_MODELS": "/nowhere/a.gguf,/nowhere/b.gguf", "LLORCH_RESIDENT": "2"}
    command = Started("demo", "--json", fresh=True, **several)
    family: set[int] = set()

    def ended() -> bool:
        with suppress(psutil.NoSuchProcess):
            family.update(command.family())
        return command.child.exit_code is not None

    wait_until(ended, timeout_s=COMMAND_TIMEOUT_S)
    assert command.ended() == 0, command.lines
    figures = json.loads("\n".join(command.lines))
    assert (figures["jobs"], figures["failed"], figures["errors"]) == (32, 0, [])
    assert figures["tokens"] > 32
    assert 0 < figures["first_token_p50_ms"] <= figures["first_token_p95_ms"]
    assert figures["flower"].startswith("http://localhost:")
    assert figures["gateway"].startswith("http://localhost:")
    assert len(family) >= 4, "Redis, worker, gateway, Flower"
    assert not {pid for pid in family if alive(pid)}


def test_it_streams_a_story_wraps_others_and_keeps_running_with_keep(demo_model: Path) -> None:
    command = Started("demo", "--keep", COLUMNS="")
    try:
        command.wait_for("Once upon a time")
        command.wait_for("first token p95")
        end = command.lines.index(command.wait_for("Everything keeps running until Ctrl-C"))
        stories = command.lines[command.lines.index("  Other stories:") + 1 : end]
        assert len(stories) > 3
        assert max(map(len, stories)) <= 80, "wrapped even though stdout is a pipe"
        family = command.family()
        assert len(family) >= 5, "Redis, worker, its engine, gateway, Flower"
        assert all(map(alive, family))
        curl = shlex.split(command.wait_for("curl ").strip())
        answer = subprocess.run([*curl, "--silent"], capture_output=True, timeout=60)
        assert json.loads(answer.stdout)["model"] == "demo", answer
        command.signal(signal.SIGINT)
        assert command.ended() == 0
    finally:
        command.child.kill()
    assert not {pid for pid in family if alive(pid)}


def test_a_chat_model_answers_writes_json_and_outlives_its_worker(smollm2: Path) -> None:
    command = Started("demo", PYTHONPATH=str(REPOSITORY))
    assert command.ended() == 0, command.lines
    shown = [line.strip() for line in command.lines]
    assert "Paris" in " ".join(shown[shown.index(f"› {QUESTION}") :][:3])
    jsonschema.validate(json.loads(shown[shown.index(f"› {CHARACTER}") + 1]), DRAGON)
    engine, worker = (line for line in shown if "is killed with SIGKILL" in line)
    first, second = (line for line in shown if " goes on, " in line)
    assert "the engine of worker-" in engine
    assert {worker.split()[1], second.split()[1]} == {"worker-0", "worker-1"}
    assert first.split()[1] in ("worker-0", "worker-1")
    assert shown.count("240 tokens; every one was sent once") == 2
    assert [line for line in shown if line.startswith("done") and "32/32" in line]


def test_ctrl_c_in_the_middle_ends_everything(demo_model: Path) -> None:
    command = Started("demo")
    try:
        # While the worker loads: once it is up, a quick demo may end before the signal comes.
        command.wait_for("redis://")
        family = command.family()
        command.signal(signal.SIGINT)
        assert command.ended() == 130
    finally:
        command.child.kill()
    assert not {pid for pid in family if alive(pid)}
