"""A Redis that accepts connections and never answers: one sentence from every command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.command import run
from tests.listeners import silent_port
from tests.services import LOCALHOST, STOP_TIMEOUT_S, environment, start_python, wait_until

SENTENCE = "it accepts connections and never answers"
LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"model": "toy", "prompt": "x"},
}


@pytest.mark.parametrize(
    "command",
    [
        ("status",),
        ("top",),
        ("submit", "x", "--model", "toy"),
        ("watch", "a"),
        ("cancel", "a"),
        ("dead", "list"),
        ("batch", "run", "in.jsonl", "--model", "toy", "-o", "out.jsonl"),
        ("worker", "--model", "demo"),
    ],
)
def test_a_command_ends_with_one_sentence(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(json.dumps(LINE))
    arguments = (tmp_path / word if word.endswith(".jsonl") else word for word in command)
    with silent_port() as (port, accepted):
        place = f"redis://{LOCALHOST}:{port}/0"
        ran = run(*arguments, LLORCH_REDIS_URL=f"{place}?socket_connect_timeout=0.3")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err == f"error: No Redis at {place}: {SENTENCE}; correct LLORCH_REDIS_URL\n"
    assert len(accepted()) == 2, "it is asked once, and then what it is"


def test_doctor_asks_it_once(demo_model: Path) -> None:
    with silent_port() as (port, accepted):
        url = f"redis://{LOCALHOST}:{port}/0?socket_connect_timeout=0.3"
        ran = run("doctor", "--redis", url, "--model", demo_model, "--json")
    (found,) = (check for check in ran.json["checks"] if check["subject"] == "redis")
    assert (found["verdict"], SENTENCE in found["finding"]) == ("fail", True)
    assert len(accepted()) == 2


@pytest.mark.parametrize("command", ["gateway", "exporter"])
def test_a_server_says_so_and_goes_on_until_sigterm(command: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    with silent_port() as (port, _):
        url = f"redis://{LOCALHOST}:{port}/0?socket_connect_timeout=0.3"
        server = start_python(
            "llorch_worker.cli", command, "--port", "0", variables=environment(url), log=log
        )
        try:
            wait_until(lambda: SENTENCE in log.read_text(), what="the sentence")
        finally:
            server.terminate()
            server.wait(STOP_TIMEOUT_S)
    assert "Traceback" not in log.read_text()
