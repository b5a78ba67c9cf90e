"""Commands whose standard streams are closed, full or narrow, and names that would control them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from tests.cli.command import COMMAND_TIMEOUT_S, environment, run
from tests.forks import Fork
from tests.messages import envelope
from tests.services import RedisServer, free_port, own_redis
from tests.store import add_letter
from tests.waiting import wait_until

NOBODY = "redis://127.0.0.1:1/0"
EVIL = "demo\nforged: line \u202e\x1b[31m\x9b世é🙂"
"""A name that would be a line of its own, turn what follows round and colour it."""


def shell(redirection: str, *arguments: str) -> list[str]:
    """The command, with a redirection as a shell has it."""
    command = [sys.executable, "-P", "-m", "llorch_worker.cli", *arguments]
    return ["sh", "-c", f'exec "$@" {redirection}', "sh", *command]


@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_result_that_cannot_be_printed_is_one_error(
    redis_server: RedisServer, options: tuple[str, ...]
) -> None:
    ran = subprocess.run(
        shell(">&-", "top", "--redis", redis_server.url, *options),
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (
        1, "error: stdout is closed, so the result cannot be printed\n",
    )  # fmt: skip


@pytest.mark.parametrize("redirection", [">&- 2>&- <&-", "2>/dev/full", "2>&9"])
def test_a_gateway_runs_although_its_banner_cannot_be_printed(
    redis_server: RedisServer, redirection: str
) -> None:
    port = free_port()
    command = shell(redirection, "gateway", "--redis", redis_server.url, "--port", str(port))
    unread, pipe = os.pipe()
    os.close(unread)
    as_9: Callable[[], Any] = lambda: os.dup2(pipe, 9)  # noqa: E731
    with subprocess.Popen(
        command, env=environment(), preexec_fn=as_9, pass_fds=(9,), stdout=subprocess.DEVNULL
    ) as gateway:
        os.close(pipe)

        def answers() -> bool:
            assert gateway.poll() is None
            try:
                return httpx.get(f"http://127.0.0.1:{port}/health").status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(answers, timeout_s=COMMAND_TIMEOUT_S, what="the gateway to listen")
        finally:
            gateway.terminate()


@pytest.mark.parametrize(
    "command",
    [
        "--help", "--version", "batch --help", "gateway-key alice", "models --json",
        "inspect demo", "inspect demo --json", "generate x --model demo --max-tokens 1",
        "generate x --model demo --max-tokens 1 --json", "status", "status --json", "usage --json",
        "dead list", "dead list --json", "doctor", "doctor --json", "top", "top --json",
        "exporter --json --port 0",
    ],
)  # fmt: skip
def test_a_full_disk_is_one_error(redis_server: RedisServer, tmp_path: Path, command: str) -> None:
    said = tmp_path / "said"
    variables = environment(LLORCH_REDIS_URL=redis_server.url)
    full = Path("/dev/full")
    process = Fork("llorch_worker.cli", *command.split(), environment=variables, out=full, err=said)
    assert process.wait(COMMAND_TIMEOUT_S) == 1
    *_, last = said.read_text().splitlines()
    assert last == "error: stdout: No space left on device, so the result cannot be printed"
    assert "Traceback" not in said.read_text()


def test_an_error_that_cannot_be_printed_as_a_document_is_a_sentence(tmp_path: Path) -> None:
    said = tmp_path / "said"
    arguments = ("status", "--json", "--redis", NOBODY)
    process = Fork(
        "llorch_worker.cli", *arguments, environment=environment(), out=Path("/dev/full"), err=said
    )
    assert process.wait(COMMAND_TIMEOUT_S) == 1
    assert said.read_text().startswith("error: No Redis at ")


@pytest.fixture(scope="module")
def evil_redis() -> Iterator[RedisServer]:
    """A queue, a worker, a model and a dead letter of that name."""
    with own_redis() as server, connect(server.url) as store:
        _fill(store)
        yield server


def _fill(store: redis.Redis) -> None:
    registry.announce(
        store,
        WorkerCard(
            hostname=f"w@{EVIL}", pid=1, model=EVIL, max_context=8, max_sequences=1, device=EVIL,
            started_at=time.time(), last_seen=time.time(), engine={"weakens": [EVIL]},
        ),
    )  # fmt: skip
    store.lpush(f"llorch.{EVIL}2", json.dumps(envelope([[], {}, {}])))
    letter = {"id": EVIL, "reason": EVIL, "list": f"llorch.{EVIL}", "message": "{}"}
    figures = {"attempts": 1, "history": f"{EVIL} 1", "at_ms": 0}
    add_letter(store, json.dumps(letter | figures))


@pytest.mark.parametrize("command", ["status", "dead list", "doctor", "cancel", "watch"])
def test_names_forge_no_line_and_control_no_terminal(evil_redis: RedisServer, command: str) -> None:
    words = command.split() + ([EVIL] if command in ("cancel", "watch") else [])
    plain = run(*words, "--redis", evil_redis.url)
    document = run(*words, "--redis", evil_redis.url, "--json")
    for printed in (plain.out, plain.err, document.out, document.err):
        assert "\nforged" not in printed
        assert not {"\u202e", "\x1b", "\x9b"} & {*printed}, printed
    assert "forged" in plain.out + plain.err, "it is shown"
    assert "forged" in document.out


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_narrow_encoding_escapes_what_it_lacks(evil_redis: RedisServer, encoding: str) -> None:
    narrow = {"fresh": True, "PYTHONIOENCODING": encoding, "LLORCH_REDIS_URL": evil_redis.url}
    document = run("status", "--json", **narrow)  # type: ignore[arg-type]
    assert document.code == 0
    assert EVIL in {load["name"] for load in document.json["models"]}
    refused = run("watch", "世é🙂", "--json", **narrow)  # type: ignore[arg-type]
    assert (refused.code, refused.err) == (1, "")
    assert "世é🙂" in refused.json["error"]["message"]


def test_a_narrow_encoding_gets_other_marks(evil_redis: RedisServer) -> None:
    narrow = {"fresh": True, "PYTHONIOENCODING": "ascii", "LLORCH_REDIS_URL": evil_redis.url}
    table = run("status", **narrow)  # type: ignore[arg-type]
    # On a busy machine the worker of the names was announced too long ago.
    assert table.code == 0
    assert table.err in ("", f"This is {evil_redis.url}.\n")
    assert r"\u4e16" in table.out
    assert run("doctor", **narrow).out.startswith("+ ")  # type: ignore[arg-type]


@pytest.mark.parametrize("command", ["status", "status --json", "--help"])
def test_a_reader_that_has_enough_is_no_error(redis_server: RedisServer, command: str) -> None:
    unread, pipe = os.pipe()
    os.close(unread)
    ran = subprocess.run(
        shell("", *command.split()),
        stdout=pipe,
        stderr=subprocess.PIPE,
        env=environment(LLORCH_REDIS_URL=redis_server.url),
        timeout=COMMAND_TIMEOUT_S,
        check=False,
    )
    os.close(pipe)
    assert (ran.returncode, ran.stderr) == (0, b"")
