"""A worker's engine, and after its death the next one."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llorch_worker.contract import GenerationRequest, Journal
from llorch_worker.contract.journal import JournalledChoice
from llorch_worker.demo_model import STORY_MODEL
from llorch_worker.engine.interface import EngineDied
from llorch_worker.engine.process import engine_process
from llorch_worker.engine.process.engine_process import EngineProcess
from llorch_worker.worker.resident_engine import ResidentEngine
from tests.waiting import wait_until


def load(watchdog_s: float = 60) -> EngineProcess:
    engine = EngineProcess.load(
        STORY_MODEL,
        model_name="toy",
        engine_class="tests.toy_engine:ToyEngine",
        device="toy",
        max_sequences=2,
        watchdog_s=watchdog_s,
    )
    engine.warm_up()
    return engine


@contextmanager
def resident_of(
    first: EngineProcess, load: Callable[[], EngineProcess], watchdog_s: float = 60
) -> Iterator[ResidentEngine]:
    resident = ResidentEngine(
        first,
        load,
        watchdog_s=watchdog_s,
        on_death=lambda death: death.suspects,
        on_change=lambda: None,
    )
    resident.start()
    try:
        yield resident
    finally:
        resident.close()


def test_another_engine_starts_even_if_the_system_refuses_a_process_at_first() -> None:
    refusals = [OSError("no room for a process")]
    changes: list[bool] = []

    def load_again() -> EngineProcess:
        if refusals:
            raise refusals.pop()
        return load()

    first = load()
    resident = ResidentEngine(
        first,
        load_again,
        watchdog_s=60,
        on_death=lambda death: death.suspects,
        on_change=lambda: changes.append(resident.healthy),
    )
    resident.start()
    try:
        os.kill(first.pid, signal.SIGKILL)
        wait_until(lambda: "OSError: no room for a process" in (resident.away or ""))
        assert not resident.healthy
        assert resident.stats().running == 0
        wait_until(lambda: resident.healthy)
        assert resident.pid != first.pid
        assert resident.deaths == {
            (resident.facts.model_name, label): 1 for label in ("killed", "load")
        }
        wait_until(lambda: changes[-1:] == [True])
    finally:
        resident.close()


def test_an_engine_that_died_before_its_worker_looked_is_replaced_though_nobody_can_be_told() -> (
    None
):
    first = load()
    os.kill(first.pid, signal.SIGSEGV)
    wait_until(lambda: not first.healthy)
    seen: list[str] = []

    def refuse() -> None:
        raise RuntimeError("can't start new thread")

    resident = ResidentEngine(
        first,
        load,
        watchdog_s=60,
        on_death=lambda death: seen.append(death.label) or (),
        on_change=refuse,
    )
    resident.start()
    try:
        wait_until(lambda: resident.healthy)
        assert seen == ["segfault"]
        assert resident.last_death == "signal SIGSEGV"
    finally:
        resident.close()


@pytest.mark.parametrize("failure", ["stop", "warm up and stop"])
def test_an_engine_that_hangs_while_it_loads_is_replaced(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "failure"
    monkeypatch.setenv("TOY_FAILS_FROM", str(file))
    monkeypatch.setattr(engine_process, "LOOK_S", 0.05)
    with resident_of(load(), lambda: load(watchdog_s=0.2)) as resident:
        file.write_text(failure)
        os.kill(resident.pid, signal.SIGKILL)
        wait_until(lambda: "start: it did nothing for" in (resident.away or ""))
        file.unlink()
        wait_until(lambda: resident.healthy)


def test_an_engine_that_hangs_while_it_rests_is_replaced_once_a_job_comes() -> None:
    first = load()
    with resident_of(first, load, watchdog_s=1) as resident:
        os.kill(first.pid, signal.SIGSTOP)
        asked = resident.submit(GenerationRequest(prompt="a"))
        with pytest.raises(EngineDied, match="it finished no step for"):
            asked.result(60)
        wait_until(lambda: resident.healthy)
        assert resident.pid != first.pid


def test_a_watchdog_that_fails_once_looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    failures = [OSError("too many open files")]
    stalled_for_s = EngineProcess.stalled_for_s

    def fails_once(engine: EngineProcess) -> float:
        if failures:
            raise failures.pop()
        return stalled_for_s(engine)

    monkeypatch.setattr(EngineProcess, "stalled_for_s", fails_once)
    first = load()
    with resident_of(first, load, watchdog_s=1) as resident:
        wait_until(lambda: not failures)
        os.kill(first.pid, signal.SIGSTOP)
        asked = resident.submit(GenerationRequest(prompt="a"))
        with pytest.raises(EngineDied, match="it finished no step for"):
            asked.result(60)


def test_a_job_whose_tokens_are_of_weights_that_were_just_replaced_goes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = load()
    with resident_of(first, load) as resident:
        monkeypatch.setenv("TOY_FINGERPRINT", "b")
        second = load()
        assert resident.take(second, load, instead_of=first)
        assert not resident.take(load_and_close(), load, instead_of=first), "it is no more"
        begun = Journal({0: JournalledChoice((1,), "w0 ")}, fingerprint="w")
        with pytest.raises(EngineDied, match="other weights took its place"):
            resident.submit(GenerationRequest(prompt="x", max_tokens=2), job_id="a", journal=begun)
        fresh = resident.submit(GenerationRequest(prompt="x", max_tokens=2), job_id="b")
        assert fresh.result(60).text == "b0 b1 "
        assert not resident.jobs_of(first)
        resident.let_go()
        assert not first.healthy
        assert resident.healthy


def load_and_close() -> EngineProcess:
    engine = load()
    engine.close()
    return engine
