from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from llorch_worker.contract import (
    Cancelled,
    ContextLengthExceeded,
    DeadlineExceeded,
    GenerationRequest,
    InternalError,
    InvalidRequest,
    ModelLoadFailed,
    OutOfMemory,
)
from llorch_worker.contract.token_questions import (
    DescribeTokenizer,
    Detokenize,
    TokenizeChat,
    TokenizeText,
)
from llorch_worker.intake import desk, process
from llorch_worker.intake.asking import Bounds
from llorch_worker.intake.desk import LONG_BYTES
from llorch_worker.intake.intake import Intake
from llorch_worker.intake.prepared import Limits, PreparedRequest
from llorch_worker.intake.process import IntakeProcess, Preparation
from llorch_worker.processes import child
from llorch_worker.text import Tokenizer, load_tokenizer, tokenizers_codec
from llorch_worker.text.control_tokens import AroundTurns
from llorch_worker.text.questions import answer
from llorch_worker.text.vocabulary_file import open_vocabulary
from tests.memory_groups import memory_group
from tests.waiting import wait_until

SMALL = Bounds(cpu_s=0.3)
TEMPLATE = """\
{% set said = messages[-1].content -%}
{% if said == 'compute' %}{{ (messages | length + 6) ** (7 ** 9) }}
{% elif said == 'grow' %}{{ said * 10 ** 10 }}
{% elif said == 'take' %}{{ (said * 10 ** 8) | length }}
{% elif said == 'wait' %}{% for a in range(99) %}{% for b in range(2999) %}{% endfor %}{% endfor %}
{% endif %}{% for m in messages %}<{{ m.role }}> {{ m.content }}
{% endfor %}<assistant>"""
SCHEMA = {"properties": {f"p{i}": {"type": "string", "pattern": "a*b+c"} for i in range(3000)}}


def chat(said: str) -> GenerationRequest:
    return GenerationRequest(messages=[{"role": "user", "content": said}], max_tokens=8)


@pytest.fixture(scope="module")
def folder(trained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary with a chat template that computes for one word, and grows for another."""
    folder = tmp_path_factory.mktemp("intake")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained_model / "hf" / name, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(open_vocabulary(folder))


@pytest.fixture(scope="module")
def limits(tokenizer: Tokenizer) -> Limits:
    return Limits(vocab_size=tokenizer.vocab_size, max_context=4096, pool_tokens=4096)


@pytest.fixture(scope="module")
def intake(folder: Path) -> Iterator[IntakeProcess]:
    with IntakeProcess(folder, SMALL) as intake:
        yield intake


@pytest.fixture(scope="module")
def patient(folder: Path) -> Iterator[IntakeProcess]:
    """It leaves a request more time than the test takes."""
    with IntakeProcess(folder, Bounds(cpu_s=10)) as intake:
        yield intake


@pytest.fixture(scope="module")
def begin(patient: IntakeProcess, limits: Limits) -> Callable[[str], Future[PreparedRequest]]:
    """Asks in a thread of its own, which ends with the intake at the latest."""
    threads = ThreadPoolExecutor()
    return lambda said: threads.submit(patient.prepare, chat(said), limits)


def forks(intake: IntakeProcess) -> list[psutil.Process]:
    return psutil.Process(intake.pid).children()


def giving_way(intake: IntakeProcess) -> psutil.Process | None:
    """A fork that has prepared a request for long."""
    for fork in forks(intake):
        with suppress(psutil.NoSuchProcess):
            if fork.nice() > 0 and fork.status() != psutil.STATUS_ZOMBIE:
                return fork
    return None


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": "Once upon a time", "prediction": "there was"},
        {"messages": [{"role": "user", "content": "Hi"}], "n": 2},
        {"prompt": "Once", "structured_outputs": {"regex": "[a-z]+"}},
    ],
    ids=lambda fields: ", ".join(fields),
)
def test_it_prepares_as_an_intake_in_this_process(
    intake: IntakeProcess, tokenizer: Tokenizer, limits: Limits, fields: dict[str, Any]
) -> None:
    request = GenerationRequest(**fields, max_tokens=8)
    here = Intake(tokenizer, limits).prepare(request).document()
    assert json.loads(intake.prepare_document(request, limits)) == json.loads(json.dumps(here))


@pytest.mark.parametrize(
    "question",
    [
        TokenizeText(prompt="Once upon", strings=True),
        TokenizeChat.of(chat("Hi")),
        Detokenize(tokens=(5, 6, 7)),
        DescribeTokenizer(),
    ],
    ids=lambda question: question.ask,
)
def test_it_answers_questions_as_a_tokenizer_here(
    intake: IntakeProcess, tokenizer: Tokenizer, question: Any
) -> None:
    assert intake.answer(question) == answer(tokenizer, question)


@pytest.mark.parametrize(
    ("said", "rule"),
    [
        ("compute", "chat template or tokenizer takes more than 0.3 s of processor time for it"),
        ("grow", "chat template takes more memory than there is for it"),
    ],
)
def test_only_the_request_that_a_template_computes_for_fails(
    intake: IntakeProcess, limits: Limits, said: str, rule: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        intake.prepare(chat(said), limits)
    (fault,) = caught.value.faults
    assert (fault.field, fault.rule) == ("messages", f"the model's {rule}")
    with pytest.raises(InvalidRequest, match="the model's chat template"):
        intake.answer(TokenizeChat.of(chat(said)))
    assert intake.prepare(chat("Hi"), limits).prompt_ids


def test_forks_share_what_all_grammars_need(patient: IntakeProcess, limits: Limits) -> None:
    """In a large vocabulary it takes a second, and no fork that took so long gets another job."""
    request = GenerationRequest(prompt="a", structured_outputs={"regex": "[a-z]+"})
    patient.prepare(request, limits)
    # The fork that was there before lacks it.
    assert len(forks(patient)) == 1
    (fork,) = forks(patient)
    patient.prepare(request, limits)
    assert forks(patient) == [fork]
    # So the process has one thread still, and may fork.
    assert psutil.Process(patient.pid).num_threads() == 1


def test_forks_share_what_all_texts_need(
    folder: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each counts the vocabulary's bytes again."""
    prepared: list[Tokenizer] = []
    keeper = SimpleNamespace(send=lambda _: None)
    fresh = load_tokenizer(open_vocabulary(folder))
    monkeypatch.setattr(desk, "load_tokenizer", lambda *_: fresh)
    monkeypatch.setattr(desk, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None))
    monkeypatch.setattr(desk, "Forwarding", lambda _: logging.NullHandler())
    monkeypatch.setattr(
        desk, "_Desk", lambda *given: SimpleNamespace(run=lambda: prepared.append(given[2]))
    )
    desk.serve(keeper, -1, {"path": str(folder), "bounds": {}, "log_level": logging.NOTSET})
    monkeypatch.setattr(tokenizers_codec, "LeastTokens", None)
    assert prepared[0].encode("Once upon", at_most=100) == tokenizer.encode("Once upon")


def test_a_grammar_that_takes_too_long_is_refused_by_its_field(
    intake: IntakeProcess, limits: Limits
) -> None:
    request = GenerationRequest(prompt="a", structured_outputs={"json": SCHEMA})
    with pytest.raises(InvalidRequest) as caught:
        intake.prepare(request, limits)
    (fault,) = caught.value.faults
    assert fault.field == "structured_outputs.json"
    assert fault.rule.startswith("must compile: its compiler takes more than ")


def test_no_request_waits_for_one_that_takes_long(
    patient: IntakeProcess, begin: Callable[[str], Future[PreparedRequest]]
) -> None:
    computes = begin("compute")
    busy = wait_until(lambda: giving_way(patient))
    for _ in range(3):
        assert begin("Hi").result(120).prompt_ids
    assert not computes.done()
    # As the kernel does for memory, perhaps of others: so it is tried again.
    busy.kill()
    busy.wait(30)
    again = wait_until(lambda: giving_way(patient))
    assert not computes.done()
    again.kill()
    # None of a request's limits kills.
    with pytest.raises(InternalError, match="what prepared the request was killed twice"):
        computes.result(120)


@pytest.fixture
def small_group() -> Iterator[Path]:
    with memory_group(60 * 2**20) as folder:
        yield folder


def test_a_request_for_which_memory_is_short_is_not_at_fault(
    patient: IntakeProcess, limits: Limits, small_group: Path
) -> None:
    patient.around()
    (small_group / "cgroup.procs").write_text(str(patient.pid))
    for fork in forks(patient):  # the next one is of the group
        fork.kill()
    with pytest.raises(OutOfMemory) as caught:
        patient.prepare(chat("take"), limits)
    assert caught.value.retriable
    assert patient.prepare(chat("Hi"), limits).prompt_ids


def test_it_says_where_it_is_and_what_its_forks_do(
    patient: IntakeProcess, begin: Callable[[str], Future[PreparedRequest]]
) -> None:
    waits = begin("wait")
    busy = wait_until(lambda: giving_way(patient))
    found = patient.stacks()
    assert "Thread of the intake MainThread:" in found
    assert f"Fork {busy.pid}: ENCODES for " in found
    assert waits.result(60).prompt_ids


def test_one_that_hangs_is_replaced_and_what_it_was_asked_is_prepared(
    folder: Path, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    with IntakeProcess(folder, idle_s=2) as intake:
        intake.around()
        hung = intake.pid
        os.kill(hung, signal.SIGSTOP)
        assert intake.prepare(chat("Hi"), limits).prompt_ids
        assert intake.pid != hung
        assert "the intake died: it did nothing for " in caplog.text


def test_one_that_hangs_while_it_loads_keeps_nobody_waiting(folder: Path) -> None:
    with IntakeProcess(folder, idle_s=2) as intake:
        os.kill(intake.pid, signal.SIGSTOP)
        with pytest.raises(InternalError, match="died while it loaded: it did nothing for "):
            intake.around()
        assert isinstance(intake.around(), AroundTurns)


def test_a_request_that_fills_the_socket_of_one_that_hangs_ends_at_its_deadline(
    folder: Path, limits: Limits
) -> None:
    with IntakeProcess(folder) as intake:
        intake.around()
        os.kill(intake.pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            intake.prepare_document(chat("a" * 1_000_000), limits, within_s=0.01)


def test_a_request_that_is_withdrawn_gives_its_place_to_others(
    folder: Path, limits: Limits
) -> None:
    with (
        IntakeProcess(folder, Bounds(cpu_s=600)) as intake,
        ThreadPoolExecutor() as threads,
    ):
        withdrawn: list[Preparation] = []
        waits = [
            threads.submit(
                intake.prepare_document, chat("compute"), limits, on_asked=withdrawn.append
            )
            # More than are prepared at once.
            for _ in range(6)
        ]
        wait_until(lambda: sum(fork.nice() > 0 for fork in forks(intake)) == 4)
        for each in withdrawn:
            each.cancel()
        for wait in waits:
            with pytest.raises(Cancelled):
                wait.result(120)
        assert intake.prepare(chat("Hi"), limits).prompt_ids
        # At most the one that prepared it.
        wait_until(lambda: len(forks(intake)) <= 1)


def test_a_request_too_large_for_a_message_is_refused(
    patient: IntakeProcess, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.around()
    monkeypatch.setattr(patient._child._frames, "_most_bytes", 1000)
    with pytest.raises(InvalidRequest, match="request: must fit into a message to the intake"):
        patient.prepare(chat("a" * 1000), limits)
    assert patient.prepare(chat("Hi"), limits).prompt_ids


def test_a_long_request_gives_way_from_its_beginning(intake: IntakeProcess, limits: Limits) -> None:
    intake.prepare(chat("Hi"), limits)
    (before,) = forks(intake)
    # It takes no time: nothing is to be encoded.
    long = GenerationRequest(prompt_token_ids=[5] * LONG_BYTES, max_tokens=1)
    with pytest.raises(ContextLengthExceeded):
        intake.prepare(long, limits)
    # What has given way takes no other request.
    wait_until(lambda: before not in forks(intake))


def test_a_fork_that_waited_for_a_processor_takes_the_next_request(
    patient: IntakeProcess, limits: Limits, begin: Callable[[str], Future[PreparedRequest]]
) -> None:
    """A new one would take longer still, on a busy machine one after the other."""
    fork = wait_until(lambda: _idle_fork(patient, limits))
    fork.suspend()
    waits = begin("Hi")
    wait_until(lambda: re.search(f"Fork {fork.pid}: .* for ([1-9]|0.[2-9])", patient.stacks()))
    fork.resume()
    assert waits.result(60).prompt_ids
    patient.prepare(chat("Hi"), limits)
    assert forks(patient) == [fork]


def _idle_fork(intake: IntakeProcess, limits: Limits) -> psutil.Process | None:
    """The fork that gets the next request; one that was slow on a busy machine gets none."""
    intake.prepare(chat("Hi"), limits)
    found = [fork for fork in forks(intake) if fork.status() != psutil.STATUS_ZOMBIE]
    return found[0] if [fork.nice() for fork in found] == [0] else None


def test_an_answer_that_comes_together_with_a_line_of_the_log_is_heard(
    patient: IntakeProcess, limits: Limits, caplog: pytest.LogCaptureFixture
) -> None:
    fork = wait_until(lambda: _idle_fork(patient, limits))
    desk = psutil.Process(patient.pid)
    fork.suspend()
    with ThreadPoolExecutor() as threads:
        # Limits that are none: a defect, of which the fork logs the place.
        asked = {"ask": "prepare", "task": "llorch.generate", "limits": [], "generated": 0}
        body = chat("Hi").model_dump_json(exclude_defaults=True).encode()
        answer = threads.submit(patient._ask, asked, body)
        wait_until(lambda: f"Fork {fork.pid}: " in patient.stacks())
        desk.suspend()
        fork.resume()
        wait_until(lambda: fork.status() == psutil.STATUS_SLEEPING)
        desk.resume()
        try:
            with pytest.raises(InternalError, match="a defect of the intake: TypeError"):
                answer.result(120)
        finally:
            if not answer.done():
                desk.kill()
    assert "a request could not be prepared" in caplog.text


def test_what_an_intake_had_in_hand_is_prepared_by_the_next_one(
    patient: IntakeProcess, begin: Callable[[str], Future[PreparedRequest]]
) -> None:
    waits = [begin("wait") for _ in range(2)]
    wait_until(lambda: giving_way(patient))
    killed, left = patient.pid, forks(patient)
    os.kill(killed, signal.SIGKILL)
    assert [each.result(60).prompt_ids for each in waits]
    assert patient.pid != killed
    psutil.wait_procs(left, 10)
    assert not any(fork.is_running() for fork in left)


def test_one_that_is_killed_while_it_loads_again_costs_no_request(
    patient: IntakeProcess, begin: Callable[[str], Future[PreparedRequest]]
) -> None:
    patient.around()
    for _ in range(3):
        killed = patient.pid
        os.kill(killed, signal.SIGKILL)
        wait_until(partial(lambda before: patient.pid != before, killed))
    asked = begin("Hi")
    killed = patient.pid
    os.kill(killed, signal.SIGKILL)
    assert asked.result(60).prompt_ids


def test_one_that_was_killed_too_often_starts_for_the_next_engine(
    patient: IntakeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    patient.around()
    monkeypatch.setattr(process, "_MOST_STARTS", 1)
    os.kill(patient.pid, signal.SIGKILL)
    loading = patient.pid
    wait_until(lambda: patient.pid != loading)
    os.kill(patient.pid, signal.SIGKILL)
    with pytest.raises(InternalError, match="while it loaded"):
        patient.around()
    wait_until(lambda: not patient._runs)
    assert isinstance(patient.around(), AroundTurns)


def test_one_that_ends_again_and_again_while_nobody_asks_starts_when_it_is_asked(
    folder: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(process, "_MOST_IDLE_ENDS", 1)
    with IntakeProcess(folder) as intake:
        intake.around()
        os.kill(intake.pid, signal.SIGKILL)
        wait_until(lambda: "it starts again when it is asked" in caplog.text)
        assert not intake._runs
        assert intake.prepare(chat("Hi"), limits).prompt_ids


def test_no_request_hangs_where_the_system_starts_no_process(
    patient: IntakeProcess,
    begin: Callable[[str], Future[PreparedRequest]],
    limits: Limits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waits = begin("wait")
    wait_until(lambda: giving_way(patient))

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("Resource temporarily unavailable")

    with monkeypatch.context() as patched:
        patched.setattr(child, "spawn", refuse)
        os.kill(patient.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="cannot start again: Resource"):
            waits.result(120)
        with pytest.raises(InternalError, match="cannot start again: Resource"):
            patient.prepare(chat("Hi"), limits)
    assert patient.prepare(chat("Hi"), limits).prompt_ids


def test_a_request_is_withdrawn_at_once_also_from_a_process_that_hangs(
    folder: Path, limits: Limits
) -> None:
    with IntakeProcess(folder) as intake, ThreadPoolExecutor() as threads:
        intake.around()
        os.kill(intake.pid, signal.SIGSTOP)
        preparing: Future[Preparation] = Future()
        waits = threads.submit(
            intake.prepare_document, chat("Hi"), limits, on_asked=preparing.set_result
        )
        preparing.result(120).cancel()
        with pytest.raises(Cancelled):
            waits.result(120)
        with pytest.raises(DeadlineExceeded):
            intake.prepare_document(chat("Hi"), limits, within_s=0.01)
        os.kill(intake.pid, signal.SIGCONT)
        assert intake.prepare(chat("Hi"), limits).prompt_ids
        os.kill(intake.pid, signal.SIGSTOP)


def test_an_intake_that_cannot_start_again_says_so_until_it_can(
    folder: Path, limits: Limits, tmp_path: Path
) -> None:
    moved, away = shutil.copytree(folder, tmp_path / "model"), tmp_path / "away"
    with IntakeProcess(moved) as intake:
        intake.around()
        (moved / "tokenizer.json").rename(away)
        os.kill(intake.pid, signal.SIGKILL)
        with pytest.raises(InternalError, match="cannot start again") as caught:
            intake.prepare(chat("Hi"), limits)
        assert caught.value.retriable
        away.rename(moved / "tokenizer.json")
        assert intake.prepare(chat("Hi"), limits).prompt_ids


def test_an_intake_for_which_there_is_no_process_says_so_until_there_is(
    folder: Path, limits: Limits, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("no room for a process")

    with IntakeProcess(folder) as intake, ThreadPoolExecutor() as threads:
        intake.around()
        desk = psutil.Process(intake.pid)
        desk.suspend()
        asked = threads.submit(intake.prepare, chat("Hi"), limits)
        wait_until(lambda: intake._asked)
        with monkeypatch.context() as patch:
            patch.setattr(child, "spawn", refuse)
            desk.kill()
            with pytest.raises(InternalError, match="cannot start again: no room for a process"):
                asked.result(120)
        assert intake.prepare(chat("Hi"), limits).prompt_ids


def test_a_template_that_computes_for_every_chat_stops_no_prompt(
    folder: Path, limits: Limits, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bomb = shutil.copytree(folder, tmp_path / "bomb")
    (bomb / "chat_template.jinja").write_text("{{ 7 ** (7 ** 9) }}")
    with IntakeProcess(bomb, SMALL) as intake:
        assert intake.around() == AroundTurns()
        assert "a plain chat is refused: the model's chat template takes more than" in caplog.text
        assert intake.prepare(GenerationRequest(prompt="Once"), limits).prompt_ids
        with pytest.raises(InvalidRequest, match=r"takes more than 0\.3 s of processor time"):
            intake.prepare(chat("Hi"), limits)


def test_a_vocabulary_that_cannot_be_used_is_said_at_the_start(tmp_path: Path) -> None:
    with IntakeProcess(tmp_path) as intake:
        with pytest.raises(ModelLoadFailed, match=r"neither tokenizer\.json nor tokenizer\.model"):
            intake.around()
        with pytest.raises(ModelLoadFailed, match=r"neither tokenizer\.json nor tokenizer\.model"):
            intake.answer(DescribeTokenizer())
