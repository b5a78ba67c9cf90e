"""``llorch up`` starts everything, drains it and leaves nothing behind.

Restarts of dead workers are in ``test_cards.py``.
"""

from __future__ import annotations

import io
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest

from llorch_worker.broker.connections.connection import connect
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.cli.up import _Prefixer
from llorch_worker.client import Client
from llorch_worker.contract import Cancelled
from llorch_worker.contract.errors import BrokerUnavailable
from llorch_worker.processors import thread_count
from llorch_worker.stack import ports
from llorch_worker.stack.children import Child, Program, python
from tests.cli.command import Started, alive, run
from tests.servers.stand_in import MODEL, StandIn
from tests.services import free_port, wait_until

LASTING_S = 20
"""No command of a test has a port for so long."""


@pytest.fixture
def up(demo_model: Path, tmp_path: Path) -> Iterator[Started]:
    """``llorch up`` with a Redis of its own and without servers, ready."""
    with running_up(demo_model, tmp_path) as command:
        yield command


@contextmanager
def running_up(demo_model: Path, folder: Path, **options: bool) -> Iterator[Started]:
    # One that is killed cannot remove its Redis' folder.
    arguments = ("up", "--no-flower", "--no-gateway", "--model", demo_model)
    command = Started(*arguments, **options, TMPDIR=str(folder))
    try:
        command.wait_for("Ctrl-C drains and ends")
        yield command
    finally:
        command.child.kill()


def redis_url(command: Started) -> str:
    return command.wait_for("Redis  ").split()[1]


def test_jobs_run_on_the_worker_that_the_banner_names_and_sigterm_drains(up: Started) -> None:
    family = up.family()
    workers = up.wait_for("workers  ")
    up.wait_for("export LLORCH_REDIS_URL=")
    commands = up.lines[up.lines.index(up.wait_for("llorch chat")) :][:2]
    assert commands == ["llorch chat", 'llorch submit --stream "Once upon a time"']
    port = urlsplit(redis_url(up)).port
    assert port is not None
    assert 6379 <= port < 6400, "the first free one from 6379"
    with Client(redis_url(up)) as client:
        (card,) = client.workers()
        assert f"{card.hostname} on cpu" in workers
        job = client.submit(prompt="Lily", max_tokens=4)
        assert job.result(60).worker == card.hostname

        job = client.submit(prompt="Lily", max_tokens=450, ignore_eos=True)
        next(job.stream())  # it runs
        up.signal(signal.SIGTERM)
        up.wait_for("Draining")
        assert job.result(60).usage.completion == 450
        assert up.ended() == 0
    assert up.lines[-1] == "Drained."
    assert not {pid for pid in family if alive(pid)}


def test_a_second_ctrl_c_ends_it_at_once(up: Started) -> None:
    family = up.family()
    with Client(redis_url(up)) as client:
        job = client.submit(prompt="Lily", max_tokens=450, ignore_eos=True, n=16)
        next(job.stream())
        up.signal(signal.SIGINT)
        up.wait_for("Draining")
        up.signal(signal.SIGINT)
        assert up.ended() == 130
    assert not {pid for pid in family if alive(pid)}


def test_a_killed_redis_ends_it_with_one_sentence(up: Started) -> None:
    family = up.family()
    (redis,) = [pid for pid in family if "redis" in psutil.Process(pid).name()]
    os.kill(redis, signal.SIGKILL)
    assert up.ended() == 1
    assert up.lines[-1] == "error: Redis ended (killed by SIGKILL)"
    assert not {pid for pid in family if alive(pid)}


@pytest.mark.skipif(sys.platform != "linux", reason="the tether is Linux's prctl")
def test_nothing_survives_when_it_is_killed(demo_model: Path, tmp_path: Path) -> None:
    with running_up(demo_model, tmp_path, fresh=True) as up:
        family = up.family()
        assert len(family) >= 4, "Redis, the worker, its engine and its intake"
        psutil.Process(up.pid).kill()
        wait_until(lambda: not {pid for pid in family if alive(pid)})
        with pytest.raises(BrokerUnavailable), connect_to(redis_url(up)):
            pass


def connect_to(url: str) -> Client:
    client = Client(url)
    client.workers()
    return client


def flower_of(line: str) -> httpx.Client:
    """Flower, with the address, user and password from the banner."""
    found = re.search(r"(http://\S+)  \(user (\S+), password (\S+)\)", line)
    assert found is not None, line
    return httpx.Client(base_url=found[1], auth=(found[2], found[3]), timeout=60)


def test_two_workers_share_a_given_redis_and_flower_shows_them(
    redis_url: str, demo_model: Path
) -> None:
    command = Started(
        *("up", "--redis", redis_url, "--workers", "2", "--model", demo_model, "--name", "twins"),
        "--no-gateway",
    )
    try:
        command.wait_for("Ctrl-C drains and ends")
        with flower_of(command.wait_for("Flower  ")) as flower, Client(redis_url) as client:
            names = [card.hostname for card in client.workers() if card.model == "twins"]
            assert len(names) == 2
            bound = {
                frozenset(psutil.Process(pid).cpu_affinity() or ()) for pid in command.family()
            }
            if thread_count() >= 2:
                first, second = bound - {frozenset(os.sched_getaffinity(0))}
                assert not first & second, "workers on the CPU have cores of their own"
            wait_until(lambda: all(name in flower.get("/workers?json=1").text for name in names))
            job = client.submit(prompt="x", model="twins", max_tokens=400, ignore_eos=True, n=16)
            flower.post(f"/api/task/revoke/{job.id}?terminate=true").raise_for_status()
            with pytest.raises(Cancelled):
                job.result(120)
        command.signal(signal.SIGINT)
        assert command.ended() == 0
    finally:
        command.child.kill()
    with connect(redis_url) as client:
        assert client.ping(), "a Redis that is not ours stays up"


def test_each_model_gets_a_worker_and_the_json_document_has_the_servers(
    redis_url: str, demo_model: Path, tmp_path: Path
) -> None:
    port, flower_port = free_port(), free_port()
    models = [tmp_path / "first.gguf", tmp_path / "second.gguf"]
    for path in models:
        path.symlink_to(demo_model)
    chosen = [word for path in models for word in ("--model", path)]
    ports = ("--gateway-port", str(port), "--flower-port", str(flower_port))
    command = Started("up", "--redis", redis_url, *chosen, *ports, "--json")
    try:
        document = json.loads(command.wait_for('"workers"'))
        assert document["gateway"] == f"http://localhost:{port}"
        user, password = document["flower_login"].split(":")
        flower = httpx.get(f"http://localhost:{flower_port}/workers", auth=(user, password))
        assert flower.status_code == 200
        with httpx.Client(base_url=f"http://localhost:{port}", timeout=60) as http:
            assert {"first", "second"} <= {m["id"] for m in http.get("/v1/models").json()["data"]}
            for name in ("first", "second"):
                body = {"model": name, "prompt": "Lily", "max_tokens": 2}
                answer = http.post("/v1/completions", json=body).raise_for_status().json()
                assert answer["model"] == name
    finally:
        command.child.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "a/x.gguf", "--model", "b/x.gguf"), "2 --model would be served as x"),
        (("--model", "x", "--model", "y", "--name", "z"), "names one model"),
        (("--model", "x", "--model", "y", "--devices", "cpu"), "a place for 1"),
        (("--model", "x", "--model", "y", "--workers", "1"), "a place for 1"),
    ],
)
def test_models_that_no_worker_could_serve_are_refused(options: tuple[str, ...], said: str) -> None:
    answer = run("up", *options)
    assert answer.code == 2
    assert said in answer.err


def test_a_server_computes_for_the_workers_that_are_started(redis_url: str, tmp_path: Path) -> None:
    with StandIn("vLLM", key="secret-of-the-server").running() as server:
        command = Started(
            *("up", "--no-flower", "--no-gateway", "--workers", "2", "--redis", redis_url),
            *("--engine", server.url, "--model", MODEL),
            LLORCH_ENGINE_KEY="secret-of-the-server",
            TMPDIR=str(tmp_path),
        )
        try:
            assert server.url in command.wait_for("Starting")
            command.wait_for("Ctrl-C drains and ends")
            with Client(redis_url) as client:
                devices = [card.device for card in client.workers() if card.model == MODEL]
                assert devices == ["vLLM", "vLLM"]
                job = client.submit(model=MODEL, prompt="one", max_tokens=2)
                assert job.result(60).text == "w0 w1 "
            command.signal(signal.SIGTERM)
            assert command.ended() == 0
            assert "secret-of-the-server" not in "".join(command.lines)
        finally:
            command.child.kill()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--engine", "http://h:1", "--model", "m", "--gpus", "all"), "leave out --gpus"),
        (("--engine", "http://h:1"), "needs --model"),
        (("--engine", "h:1", "--model", "m"), "must be http://host:port/v1"),
        (("--engine", "http://user:pass@h:1", "--model", "m"), "without a user or a key"),
    ],
)
def test_what_makes_no_engine_of_a_server_is_refused(options: tuple[str, ...], said: str) -> None:
    done = run("up", *options)
    assert done.code == 2
    assert said in done.err
    assert "pass" not in done.err


def test_the_gateway_answers_the_command_of_the_help_and_is_restarted(
    demo_model: Path, redis_url: str
) -> None:
    arguments = ("up", "--redis", redis_url, "--no-flower", "--model", demo_model, "--name", "told")
    (line,) = [line for line in run("up", "--help").out.splitlines() if "curl GATEWAY" in line]
    command = Started(*arguments)
    try:
        url = command.wait_for("(API and console)").split()[1]
        curl = shlex.split(line.replace("GATEWAY", url).replace("MODEL", "told"))
        answer = subprocess.run([*curl, "--silent"], capture_output=True, timeout=60)
        assert json.loads(answer.stdout)["model"] == "told", answer
        gateway = next(pid for pid in command.family() if psutil.Process(pid).name() == "gateway")
        os.kill(gateway, signal.SIGKILL)
        command.wait_for("gateway ended (killed by SIGKILL); restarting now")
        assert wait_until(lambda: healthy(url)), "at the same address"
        command.signal(signal.SIGINT)
        assert command.ended() == 0
    finally:
        command.child.kill()


def test_taken_ports_are_said_at_the_start_and_at_the_end(demo_model: Path, tmp_path: Path) -> None:
    with ExitStack() as taken:
        for port in (ports.DEFAULT_REDIS_PORT, ports.DEFAULT_GATEWAY_PORT):
            # Another test's command may have it, and end before this one's command looks.
            with suppress(AssertionError):  # a program has it for good
                server = wait_until(lambda port=port: listening_on(port), timeout_s=LASTING_S)
                taken.enter_context(server)
        command = Started("up", "--no-flower", "--model", demo_model, TMPDIR=str(tmp_path))
        try:
            command.wait_for(
                "8080 is taken by another program; this command's gateway uses ", count=2
            )
            last = command.wait_for("6379 is ", count=2)
            ready = next(n for n, line in enumerate(command.lines) if line.startswith("Ready"))
            said = [n for n, line in enumerate(command.lines) if line.startswith("6379 is ")]
            assert said[0] < ready < said[1]
            port = urlsplit(redis_url(command)).port
            assert f"uses {port}" in last
        finally:
            command.child.kill()


def listening_on(port: int) -> socket.socket | None:
    with suppress(OSError):
        return socket.create_server((ports.LOCALHOST, port))
    return None


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("unread", ["full", "closed"])
def test_the_end_of_a_program_is_seen_although_its_lines_cannot_be_printed(
    monkeypatch: pytest.MonkeyPatch, unread: str
) -> None:
    reader, pipe = os.pipe()
    os.close(reader)
    disk = os.open("/dev/full", os.O_WRONLY)
    plan: Any = SimpleNamespace(workers=[("worker", "cpu")])
    exits: SimpleQueue[Child] = SimpleQueue()
    # Unbuffered, so that its closing writes nothing.
    with open(pipe, "wb", 0) as closed, open(disk, "wb", 0) as full:
        written = {"closed": closed, "full": full}[unread]
        stderr = io.TextIOWrapper(written, write_through=True)
        monkeypatch.setattr(sys, "stderr", stderr)
        program = Program("worker", python("-c", "print('one'); print('two')"))
        child = Child(program, _Prefixer(Screen(), plan), exits.put)
        assert exits.get(timeout=60) is child
        assert child.wait(60)
    assert (child.exit_code, [*child.tail]) == (0, ["one", "two"])


def test_a_worker_that_cannot_start_ends_it_with_the_reason(redis_url: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.gguf"
    path.write_text("no model")
    ran = run("up", "--no-flower", "--no-gateway", "--redis", redis_url, "--model", path)
    assert ran.code == 1, ran
    (line,) = [line for line in ran.err.splitlines() if "notes.gguf" in line]
    assert line.startswith("error: worker could not start: ")
