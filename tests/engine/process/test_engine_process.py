"""An engine in a process of its own does what one in the caller's does, and its death is told."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from llorch_worker.contract import (
    Cancelled,
    ContextLengthExceeded,
    Event,
    Failed,
    Finished,
    GenerationRequest,
    InternalError,
    InvalidRequest,
    ModelLoadFailed,
    ModelNotServed,
    Tokens,
    read_journal,
)
from llorch_worker.engine import Engine
from llorch_worker.engine.interface import Death, EngineDied
from llorch_worker.engine.process.engine_process import INTAKE_THREADS, EngineProcess
from llorch_worker.engine.process.messages import Step, ToKeeper
from llorch_worker.engine.told import TokensTold
from llorch_worker.intake.process import IntakeProcess
from llorch_worker.processes.frames import FrameTooLarge
from tests.engine.process import faulty_engine as faults
from tests.engine.structured import AS_RECORD, asking
from tests.waiting import wait_until, wait_until_freed

PROMPT = "Once upon a time there was a little girl named Lily who loved to play outside"
TIMEOUT_S = 60
REFUSING = "tests.engine.process.faulty_engine:RefusingEngine"
CHECKS_WAIT = "tests.engine.process.faulty_engine:WaitingChecks"
GRAMMARS_WAIT = "tests.engine.process.faulty_engine:WaitingGrammars"
FAULTY = "tests.engine.process.faulty_engine:FaultyEngine"
SLOW = "tests.faults.slow_engine:Engine"
SIZES: dict[str, Any] = {"device": "cpu", "max_sequences": 4}


@pytest.fixture(scope="module")
def path(trained_model: Path) -> Path:
    return trained_model / "f32.gguf"


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[EngineProcess]:
    """Shared by the tests that leave it as it was. The thread that loaded it has ended, which kills
    no engine."""
    with ThreadPoolExecutor(1) as loading:
        engine = loading.submit(partial(EngineProcess.load, path, **SIZES)).result()
    with engine:
        engine.warm_up()
        yield engine


@pytest.fixture(scope="module")
def beside(path: Path) -> Iterator[Engine]:
    """The same in this process."""
    with Engine.load(path, **SIZES) as engine:
        yield engine


@pytest.fixture
def faulty(path: Path, forks: None) -> Iterator[EngineProcess]:
    """One that a test may end."""
    with EngineProcess.load(path, engine_class=FAULTY, **SIZES) as engine:
        yield engine


def requests() -> list[GenerationRequest]:
    return [
        GenerationRequest(prompt=PROMPT, max_tokens=40, temperature=0, metadata={"n": 10**30}),
        GenerationRequest(prompt=PROMPT, max_tokens=30, seed=7, n=3, logprobs=2, stop=["the"]),
        GenerationRequest(prompt=PROMPT, max_tokens=1, prompt_logprobs=1, seed=1),
        GenerationRequest(prompt=PROMPT, max_tokens=None, seed=3, logit_bias={65: -5.0}),
        asking(seed=5, **AS_RECORD),
    ]


def test_its_results_and_events_are_those_of_an_engine_in_this_process(
    engine: EngineProcess, beside: Engine
) -> None:
    for request in requests():
        seen: list[Event] = []
        theirs = engine.submit(request, job_id="a", on_event=seen.append)
        ours = beside.submit(request, job_id="a")
        result, expected = theirs.result(TIMEOUT_S), ours.result(TIMEOUT_S)
        assert (
            result.model_copy(update={"timings": expected.timings, "usage": expected.usage})
            == expected
        )
        assert result.usage.completion == expected.usage.completion
        # Draws of company may split the tokens of a choice into other events.
        assert read_journal(seen).choices == read_journal(ours.events()).choices
        with pytest.raises(RuntimeError, match="go to on_event"):
            theirs.events()
    wait_until(lambda: not engine._accepting)


def test_it_continues_where_a_journal_ends(engine: EngineProcess, beside: Engine) -> None:
    request = GenerationRequest(prompt=PROMPT, max_tokens=30, seed=11, logprobs=1)
    whole = beside.submit(request, job_id="b")
    whole.result(TIMEOUT_S)
    events = list(whole.events())
    journal = read_journal(events[:12])
    resumed = engine.submit(request, job_id="b", journal=journal, attempt=2)
    assert resumed.result(TIMEOUT_S).choices == whole.result().choices


def test_its_refusals_are_those_of_an_engine_in_this_process(
    engine: EngineProcess, beside: Engine
) -> None:
    refused: list[tuple[GenerationRequest, type[Exception]]] = [
        (GenerationRequest(prompt="x", model="another"), ModelNotServed),
        (GenerationRequest(prompt_token_ids=[10**6]), InvalidRequest),
        (GenerationRequest(prompt="x", max_tokens=10**6), ContextLengthExceeded),
        (GenerationRequest(prompt="x", structured_outputs={"regex": "("}), InvalidRequest),
    ]
    for request, kind in refused:
        with pytest.raises(kind) as theirs:
            engine.submit(request).result(TIMEOUT_S)
        with pytest.raises(kind) as ours:
            beside.submit(request)
        assert type(theirs.value) is type(ours.value)
        assert theirs.value.args == ours.value.args
    assert not engine._accepting


def test_a_cancel_takes_effect_and_leaves_the_others(engine: EngineProcess) -> None:
    long = GenerationRequest(prompt=PROMPT, max_tokens=200, ignore_eos=True, temperature=0)
    kept = engine.submit(long)
    cancelled = engine.submit(long)
    next(iter(cancelled.events()))
    cancelled.cancel()
    with pytest.raises(Cancelled) as error:
        cancelled.result(TIMEOUT_S)
    assert error.value.spent is not None
    assert error.value.spent[0].completion < 200
    assert kept.result(TIMEOUT_S).usage.completion == 200
    assert engine.stats().running == 0


def test_its_figures_facts_and_logits_cross(engine: EngineProcess, beside: Engine) -> None:
    facts = beside.facts
    assert engine.facts == facts
    assert engine.stats().bytes == beside.stats().bytes
    before = engine.step_figures()
    request = GenerationRequest(prompt=PROMPT, max_tokens=9, ignore_eos=True)
    engine.submit(request).result(TIMEOUT_S)
    after = engine.step_figures()
    assert after.generated_tokens - before.generated_tokens == 9
    assert after.token_gaps.count - before.token_gaps.count == 8
    assert engine.misplaced_tensors() == ()
    logits = engine.logits([1, 2, 3])
    assert logits.tolist() == beside.logits([1, 2, 3]).tolist()
    with pytest.raises(InvalidRequest, match="must be 1 to"):
        engine.logits([])


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[Step]:
    """The messages with what generations told."""
    steps: list[Step] = []
    take = EngineProcess._take

    def note(engine: EngineProcess, message: ToKeeper) -> None:
        if isinstance(message, Step):
            steps.append(message)
        take(engine, message)

    monkeypatch.setattr(EngineProcess, "_take", note)
    return steps


def tokens_of(step: Step, handle: int = 1) -> int:
    told = (each for each in step.told if isinstance(each, TokensTold))
    return sum(len(each.ids) for each in told if each.handle == handle)


@pytest.mark.usefixtures("forks")
def test_tokens_wait_for_each_other_except_the_first_and_those_of_a_second_attempt(
    path: Path, steps: list[Step]
) -> None:
    request = GenerationRequest(prompt=PROMPT, max_tokens=20, temperature=0, ignore_eos=True)
    # Each step gives one token.
    with EngineProcess.load(path, told_every_s=3600.0, drafter="off", **SIZES) as engine:
        engine.submit(request).result(TIMEOUT_S)
        assert [tokens_of(step) for step in steps] == [1, 19]
        steps.clear()
        engine.submit(request, attempt=2).result(TIMEOUT_S)
        assert [tokens_of(step, handle=2) for step in steps] == [1] * 20


@pytest.mark.usefixtures("forks")
def test_tokens_wait_for_each_other_while_nobody_reads_any(
    path: Path, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llorch_worker.engine.process.engine_process.GATHER_S", 3600.0)
    request = GenerationRequest(prompt=PROMPT, max_tokens=20, temperature=0, ignore_eos=True)

    def frames(**callbacks: Any) -> list[int]:
        steps.clear()
        engine.submit(request, **callbacks).result(TIMEOUT_S)
        (handle,) = {each.handle for step in steps for each in step.told}
        return [tokens_of(step, handle) for step in steps]

    with EngineProcess.load(path, drafter="off", **SIZES) as engine:
        for _ in range(2):
            assert frames(on_event=lambda _: None, on_tokens=lambda _: None) == [1, 19]
            assert frames(on_event=lambda _: None) == [1] * 20


@pytest.mark.usefixtures("forks")
def test_who_begins_to_read_gets_the_gathered_tokens_and_then_each_until_it_stops(
    path: Path, steps: list[Step], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llorch_worker.engine.process.engine_process.GATHER_S", 3600.0)
    # Two seconds: the engine hears of the reader long before its last token.
    monkeypatch.setenv("SLOW_STEP_MS", "5")
    request = GenerationRequest(prompt=PROMPT, max_tokens=400, temperature=0, ignore_eos=True)
    submitted = threading.Event()

    def take(told: TokensTold) -> None:
        assert submitted.wait(TIMEOUT_S)
        if told.index == 0 or (told.index >= 100 and generation.is_read):
            generation.note_read(told.index == 0)

    with EngineProcess.load(path, drafter="off", engine_class=SLOW, **SIZES) as engine:
        generation = engine.submit(request, on_event=lambda _: None, on_tokens=take)
        submitted.set()
        generation.result(TIMEOUT_S)
    first, *_, last = frames = [tokens_of(step) for step in steps]
    assert first == 1
    assert frames.count(1) > 10
    assert last > 100


@pytest.mark.usefixtures("forks")
def test_no_token_waits_for_a_step_that_computes_a_prompt(path: Path, steps: list[Step]) -> None:
    long = GenerationRequest(prompt=PROMPT, max_tokens=400, temperature=0, ignore_eos=True)
    with EngineProcess.load(path, told_every_s=3600.0, drafter="off", **SIZES) as engine:
        running = engine.submit(long)
        next(running.events())
        engine.submit(GenerationRequest(prompt="Tom", max_tokens=1)).result(TIMEOUT_S)
        running.cancel()
    began = next(step for step in steps if any(each.handle == 2 for each in step.told))
    assert tokens_of(began) <= 1


@pytest.mark.usefixtures("forks")
def test_a_quick_request_that_the_engine_refuses_fails_without_an_answer_to_wait_for(
    path: Path,
) -> None:
    # An intake refuses whatever is wrong; its engine still checks.
    with (
        IntakeProcess(path) as intake,
        EngineProcess.load(path, intake=intake, engine_class=REFUSING, **SIZES) as engine,
    ):
        seen: list[Event] = []
        generation = engine.submit(prompt_of(faults.REFUSED), on_event=seen.append)
        with pytest.raises(InternalError):
            generation.result(TIMEOUT_S)
        assert isinstance(seen[-1], Failed)
        most = GenerationRequest(prompt=PROMPT, max_tokens=10**6, cut_max_tokens=True)
        assert engine.submit(most).result(TIMEOUT_S)
        wait_until(lambda: not engine._accepting)
        # It hangs while it rests, and nobody waits for an answer.
        wait_until(lambda: not engine._generations)
        os.kill(engine.pid, signal.SIGSTOP)
        engine.submit(GenerationRequest(prompt=PROMPT, max_tokens=1))
        wait_until(lambda: engine.stalled_for_s() > 0.3)
        engine.kill("stalled", "stalled")


def test_no_result_waits_for_one_that_is_checked(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    request = asking(structured_outputs={"json": {"const": [1, 1], "uniqueItems": True}}, n=2)
    ends: list[Event] = []
    with EngineProcess.load(path, engine_class=CHECKS_WAIT, **SIZES) as engine:
        checked = [engine.submit(request, on_event=ends.append) for _ in range(5)]
        wait_until(lambda: sum(isinstance(each, Finished) for each in ends) == len(checked))
        assert engine.submit(requests()[0]).result(TIMEOUT_S)
        assert not any(each.done for each in checked)
        gate.touch()
        for each in checked:
            choices = each.result(TIMEOUT_S).choices
            assert [choice.unmet for choice in choices] == 2 * [(": uniqueItems",)]


def test_neither_a_request_without_a_grammar_nor_a_submitter_waits_for_one_that_compiles(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = tmp_path / "gate"
    monkeypatch.setenv("GATE", str(gate))
    request = asking(seed=5, **AS_RECORD)
    with EngineProcess.load(path, engine_class=GRAMMARS_WAIT, **SIZES) as engine:
        cancelled, *compiled = (engine.submit(request) for _ in range(2 * INTAKE_THREADS))
        wait_until(lambda: len([*tmp_path.glob("gate.waits-*")]) == INTAKE_THREADS)
        cancelled.cancel()
        assert engine.submit(requests()[0]).result(TIMEOUT_S)
        assert not any(each.done for each in (cancelled, *compiled))
        assert len(engine._accepting) >= len(compiled), "a hang among them would be seen"
        gate.touch()
        assert all(each.result(TIMEOUT_S) for each in compiled)
        with pytest.raises(Cancelled):
            cancelled.result(TIMEOUT_S)
        wait_until(lambda: not engine._accepting)


def test_a_callback_that_raises_cancels_its_own_generation(engine: EngineProcess) -> None:
    def fail(_: Event) -> None:
        raise ValueError

    request = GenerationRequest(prompt=PROMPT, max_tokens=200, ignore_eos=True)
    with pytest.raises(Cancelled):
        engine.submit(request, on_event=fail).result(TIMEOUT_S)


def test_steps_wait_for_a_keeper_that_reads_nothing_and_no_watchdog_minds(
    engine: EngineProcess,
) -> None:
    reads, stalls = threading.Event(), threading.Event()

    told: list[Tokens] = []

    def stall(event: Event) -> None:
        if isinstance(event, Tokens):
            told.append(event)
        stalls.set()
        assert reads.wait(TIMEOUT_S)

    request = GenerationRequest(
        prompt=PROMPT, max_tokens=400, n=4, ignore_eos=True, logprobs=20, seed=1
    )
    generation = engine.submit(request, on_event=stall)
    try:
        assert stalls.wait(TIMEOUT_S)
        wait_until(lambda: _rests(engine), what="the engine's steps to wait")
        assert engine.stalled_for_s() == 0
        assert engine._board.in_hand() == (generation._handle,)
    finally:
        reads.set()
    result = generation.result(TIMEOUT_S)
    for choice in result.choices:
        ids = [id for event in told if event.choice == choice.index for id in event.ids]
        assert tuple(ids) == choice.token_ids
    assert result.usage.completion == 1600


def _rests(engine: EngineProcess) -> bool:
    """Whether the process computes nothing for a while."""
    before = _ticks(engine.pid)
    threading.Event().wait(0.2)
    return _ticks(engine.pid) == before


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_it_holds_nothing_of_the_keepers_and_passes_nothing_on(path: Path, tmp_path: Path) -> None:
    with (tmp_path / "kept").open("w") as kept, (tmp_path / "own").open("w") as own:
        os.set_inheritable(own.fileno(), True)
        with EngineProcess.load(path, kept=[kept.fileno()], **SIZES) as engine:
            folder = Path(f"/proc/{engine.pid}/fd")
            held = [
                os.readlink(each) for each in sorted(folder.iterdir(), key=lambda p: int(p.name))
            ]
            assert held[0] == "/dev/null"
            assert held[1] == held[2] == os.readlink("/proc/self/fd/2")
            others = sorted(name.split(":")[0] for name in held[3:])
            assert others == sorted([kept.name, "/memfd", "/memfd", "socket"])
            flags = Path(f"/proc/{engine.pid}/fdinfo")
            numbers = [each.name for each in folder.iterdir() if int(each.name) > 2]
            # O_CLOEXEC: a compiler that it starts gets none of them.
            assert all(
                int((flags / n).read_text().split("flags:")[1].split()[0], 8) & 0o2000000
                for n in numbers
            )


@pytest.mark.usefixtures("forks")
def test_a_model_that_cannot_be_loaded_is_refused_as_in_this_process(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadFailed) as ours:
        Engine.load(tmp_path / "none.gguf")
    with pytest.raises(ModelLoadFailed) as theirs:
        EngineProcess.load(tmp_path / "none.gguf")
    assert theirs.value.args == ours.value.args
    assert type(theirs.value) is type(ours.value)


@pytest.mark.usefixtures("forks")
def test_a_death_while_loading_is_explained_whatever_was_unread(path: Path) -> None:
    dying = "tests.engine.process.faulty_engine:DyingEngine"
    with IntakeProcess(path) as intake, pytest.raises(EngineDied, match="signal SIGKILL"):
        EngineProcess.load(path, engine_class=dying, intake=intake, **SIZES)


@pytest.mark.usefixtures("forks")
def test_what_the_keeper_holds_of_it_goes_with_its_last_name(path: Path) -> None:
    def closed() -> EngineProcess:
        engine = EngineProcess.load(path, **SIZES)
        engine.on_death(partial(print, engine))
        engine.submit(GenerationRequest(prompt="a", max_tokens=2)).result()
        assert engine.stats().running == 0
        engine.close()
        return engine

    wait_until_freed(closed)


def prompt_of(fault: int) -> GenerationRequest:
    return GenerationRequest(prompt_token_ids=[1, fault], max_tokens=5)


def endless() -> GenerationRequest:
    return GenerationRequest(prompt=PROMPT, max_tokens=400, ignore_eos=True)


@pytest.mark.parametrize(
    ("fault", "label", "reason"),
    [
        (faults.SEGFAULT, "segfault", "signal SIGSEGV"),
        (faults.RAISE, "device", "CUDA error: an illegal memory access was encountered"),
        (faults.NOISE, "protocol", "no message came from it"),
    ],
)
def test_a_death_in_a_step_is_explained_and_names_the_jobs_of_the_step(
    faulty: EngineProcess, fault: int, label: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    deaths: list[Death] = []
    faulty.on_death(deaths.append)
    ended = faulty.submit(GenerationRequest(prompt=PROMPT, max_tokens=3), job_id="ended")
    ended.result(TIMEOUT_S)
    running = faulty.submit(endless(), job_id="beside")
    next(iter(running.events()))
    with pytest.raises(EngineDied) as poisoned:
        # It may die before it has told that it took the job in.
        faulty.submit(prompt_of(fault), job_id="poison").result(TIMEOUT_S)
    with pytest.raises(EngineDied) as error:
        running.result(TIMEOUT_S)
    assert error.value.retriable
    assert error.value.death == poisoned.value.death == deaths[0]
    assert isinstance(list(running.events())[-1], Failed)
    (death,) = deaths
    assert (death.label, {*death.suspects}) == (label, {"beside", "poison"})
    assert death.reason.startswith(reason)
    traces = [str(record.exc_text) for record in caplog.records if "when it died" in record.msg]
    assert len(traces) == (label == "segfault")
    assert all("faulty_engine.py" in trace and PROMPT not in trace for trace in traces)
    assert not faulty.healthy
    assert faulty.stalled_for_s() == 0
    with pytest.raises(EngineDied):
        faulty.submit(endless())
    # The last figures stay.
    assert faulty.stats().max_sequences == 4


def test_an_idle_engine_that_is_killed_has_no_suspects(faulty: EngineProcess) -> None:
    deaths: list[Death] = []
    faulty.on_death(deaths.append)
    faulty.submit(GenerationRequest(prompt=PROMPT, max_tokens=2)).result(TIMEOUT_S)
    wait_until(lambda: not faulty._board.in_hand())
    os.kill(faulty.pid, signal.SIGKILL)
    wait_until(lambda: deaths)
    assert deaths == [Death("killed", "signal SIGKILL", (), -signal.SIGKILL)]
    late: list[Death] = []
    faulty.on_death(late.append)
    assert late == deaths


def test_a_hang_is_seen_from_outside_and_can_be_ended(faulty: EngineProcess) -> None:
    deaths: list[Death] = []
    faulty.on_death(deaths.append)
    hanging = faulty.submit(prompt_of(faults.HANG), job_id="hanging")
    wait_until(lambda: faulty.stalled_for_s() > 0.3)
    # What it is asked meanwhile has an answer.
    assert faulty.stats().running <= 1
    os.kill(faulty.pid, signal.SIGSTOP)
    large = GenerationRequest(prompt="a" * 1_000_000, max_tokens=1)
    # It reads nothing, and the socket is full: whoever submits or cancels does not wait for that.
    submitted = faulty.submit(large)
    for _ in range(100):
        hanging.cancel()
    assert faulty.stats().max_sequences == 4
    with pytest.raises(TimeoutError):
        faulty.misplaced_tensors()
    faulty.kill("stalled", "stalled 60 s")
    for ended in (hanging, submitted):
        with pytest.raises(EngineDied, match="stalled 60 s"):
            ended.result(TIMEOUT_S)
    assert "hanging" in deaths[0].suspects


def test_signals_of_a_service_manager_are_the_keepers_to_obey(engine: EngineProcess) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(engine.pid, number)
    request = GenerationRequest(prompt=PROMPT, max_tokens=2)
    assert engine.submit(request).result(TIMEOUT_S).usage.completion == 2


KEEPER = """
import sys, time
from llorch_worker.engine.process.engine_process import EngineProcess
from llorch_worker.contract import GenerationRequest
engine = EngineProcess.load(sys.argv[1], device="cpu", progress=lambda *_: print(flush=True))
engine.submit(GenerationRequest(prompt="Once", max_tokens=400, ignore_eos=True))
print(engine.pid, flush=True)
time.sleep(600)
"""


def test_no_engine_outlives_its_keeper(path: Path) -> None:
    keeper = subprocess.Popen(
        [sys.executable, "-c", KEEPER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert keeper.stdout is not None
    pid = next(int(line) for line in keeper.stdout if line.strip())
    keeper.kill()
    keeper.wait()
    keeper.stdout.close()
    wait_until(lambda: not _runs(pid), timeout_s=1.0, what="the engine to end")


def _runs(pid: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.mark.usefixtures("forks")
def test_a_close_cancels_what_runs(path: Path) -> None:
    deaths: list[Death] = []
    engine = EngineProcess.load(path, **SIZES)
    engine.on_death(deaths.append)
    running = engine.submit(endless())
    engine.close()
    engine.close()
    with pytest.raises(Cancelled, match="closed"):
        running.result(TIMEOUT_S)
    with pytest.raises(InternalError, match="the engine is closed"):
        engine.submit(endless())
    assert not deaths


@pytest.fixture
def small_frames(monkeypatch: pytest.MonkeyPatch) -> Callable[[EngineProcess], None]:
    return lambda engine: monkeypatch.setattr(engine._child._frames, "_most_bytes", 1000)


def test_a_request_too_large_for_a_message_is_refused_by_name(
    engine: EngineProcess, small_frames: Callable[[EngineProcess], None]
) -> None:
    small_frames(engine)
    with pytest.raises(InvalidRequest, match="request: must fit into a message to the engine"):
        engine.submit(GenerationRequest(prompt="a" * 1000))
    assert engine.submit(GenerationRequest(prompt="a", max_tokens=1)).result(TIMEOUT_S)
    with pytest.raises(FrameTooLarge):
        engine.logits(range(1000))
    assert not engine._answers


TOY: dict[str, Any] = {
    "engine_class": "tests.toy_engine:ToyEngine",
    "device": "toy",
    "max_sequences": 2,
}


def test_a_process_ends_if_no_thread_can_read_what_it_sends(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start
    began: list[int] = []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "llorch-engine":
            began.extend(each.pid for each in psutil.Process().children())
            raise RuntimeError("can't start new thread")
        start(thread)

    before = {each.pid for each in psutil.Process().children()}
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            EngineProcess.load(path, **TOY)
    (pid,) = {*began} - before
    assert not psutil.pid_exists(pid)


def test_an_engine_that_ended_leaves_no_memory_of_its_board(path: Path) -> None:
    before = _boards()
    engines = [EngineProcess.load(path, **TOY) for _ in range(2)]
    assert _boards() == before + 2
    os.kill(engines[0].pid, signal.SIGKILL)
    wait_until(lambda: not engines[0].healthy)
    for engine in engines:
        engine.close()
    assert _boards() == before
    assert [engine.stalled_for_s() for engine in engines] == [0, 0]


def _boards() -> int:
    return Path("/proc/self/maps").read_text().count("llorch-board")
