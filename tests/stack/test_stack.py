"""The output of children that start reaches the user, once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from llorch_worker.contract.command_errors import CommandError
from llorch_worker.settings import Settings
from llorch_worker.stack import ports, programs
from llorch_worker.stack.children import Program, python
from llorch_worker.stack.plan import Plan
from llorch_worker.stack.stack import Stack
from tests.services import RedisServer, free_port

START_S = 60

FAILS = """
import pathlib, sys, time
said, others = map(pathlib.Path, sys.argv[1:3])
print("error: " + sys.argv[3], flush=True)
said.touch()
while not others.exists():
    time.sleep(0.01)
sys.exit(1)
"""
"""Exits once the other has printed its error too."""

TALKS = """
import runpy, sys
print("error: of no consequence", flush=True)
sys.argv = ["llorch", "worker"]
runpy.run_module("llorch_worker.cli", run_name="__main__")
"""


@pytest.fixture
def url(own_server: RedisServer) -> str:
    """A Redis of its own: the workers of other tests run on this host too."""
    return own_server.url


def plan(url: str, model: Path, *workers: str) -> Plan:
    return Plan(
        settings=Settings(redis_url=url, model=model, device="cpu"),
        workers=tuple((name, "cpu") for name in workers),
        redis_url=url,
        flower_port=None,
    )


def start(stack: Stack) -> None:
    stack.start()
    stack.wait_ready(START_S)


def fail_two(
    monkeypatch: pytest.MonkeyPatch, folder: Path, plan: Plan, sentences: dict[str, str]
) -> tuple[str, list[str]]:
    """The stack's error, and the lines before it."""
    here, there = sentences

    def worker(name: str, *_: object, **__: object) -> Program:
        other = there if name == here else here
        arguments = (str(folder / name), str(folder / other), sentences[name])
        return Program(name, python("-c", FAILS, *arguments))

    monkeypatch.setattr(programs, "worker", worker)
    lines: list[str] = []
    stack = Stack(plan, lambda _name, line: lines.append(line))
    with pytest.raises(CommandError) as caught, stack:
        start(stack)
    return caught.value.message, lines


def test_different_errors_of_two_workers_are_both_shown(
    url: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = {"gpu0": "this card is taken", "gpu1": "that card is broken"}
    error, lines = fail_two(monkeypatch, tmp_path, plan(url, demo_model, *sentences), sentences)
    first, second = sentences if error.startswith("gpu0") else reversed(sentences)
    assert error == f"{first} could not start: {sentences[first]}"
    assert lines == [f"error: {sentences[second]}"]


def test_the_same_error_of_two_workers_is_shown_once(
    url: str, demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentences = {"gpu0": "no such model", "gpu1": "no such model"}
    error, lines = fail_two(monkeypatch, tmp_path, plan(url, demo_model, *sentences), sentences)
    assert error.endswith(" could not start: no such model")
    assert lines == []


def test_an_error_line_of_a_worker_that_starts_anyway_is_shown(
    url: str, demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = programs.worker

    def talkative(name: str, settings: Settings, *, own_redis: bool) -> Program:
        program = worker(name, settings, own_redis=own_redis)
        return replace(program, command=python("-c", TALKS))

    monkeypatch.setattr(programs, "worker", talkative)
    lines: list[str] = []
    with Stack(plan(url, demo_model, "w"), lambda _name, line: lines.append(line)) as stack:
        start(stack)
        assert lines.count("error: of no consequence") == 1


def own_redis_plan(redis_port: int) -> Plan:
    return Plan(
        settings=Settings(), workers=(), redis_url=None, redis_port=redis_port, flower_port=None
    )


def test_a_redis_of_its_own_takes_the_planned_port_or_the_next_free_one() -> None:
    port = free_port()
    with Stack(own_redis_plan(port), print) as first, Stack(own_redis_plan(port), print) as second:
        first.start()
        assert first.redis_url == f"redis://127.0.0.1:{port}/0"
        second.start()
        assert second.redis_url != first.redis_url


def test_a_redis_that_took_the_port_meanwhile_is_not_mistaken_for_ones_own(
    own_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = free_port()
    chosen = iter((own_server.port, free))
    monkeypatch.setattr(ports, "next_free", lambda _first: next(chosen))
    with Stack(own_redis_plan(own_server.port), print) as stack:
        stack.start()
        assert stack.redis_url == f"redis://127.0.0.1:{free}/0"
