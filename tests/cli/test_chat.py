"""``llorch chat``: a conversation, in a pipe and in a terminal."""

from __future__ import annotations

import json
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest

from llorch_worker.broker.connections.connection import connect
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.fleet.registry import WorkerCard
from llorch_worker.cli.chat.partner import Partners
from llorch_worker.cli.terminal.screen import Screen
from llorch_worker.client import Client
from llorch_worker.contract import EmbedRequest, GenerationRequest
from llorch_worker.settings import Settings
from tests.cli.command import COMMAND_TIMEOUT_S, OBEYING_CTRL_C, Ran, Served, environment, run
from tests.cli.pseudo_terminal import Opener, PseudoTerminal
from tests.services import RedisServer, WorkerProcess, wait_until
from tests.store import job_ids, jobs_that_wait

NOWHERE = "redis://127.0.0.1:1/0"
QUICK = ("--max-tokens", "4", "-t", "0")


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    # A terminal answers where its cursor is; this one never does.
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")


@pytest.fixture
def talk(served: Served) -> Iterator[Opener]:
    """Opens a conversation with what the fleet serves."""
    with ExitStack() as opened:

        def open_terminal(*arguments: str) -> PseudoTerminal:
            terminal = PseudoTerminal(
                "chat", "--redis", served.redis_url, *arguments, columns=80, lines=24
            )
            opened.enter_context(closing(terminal))
            see(terminal, "›")
            return terminal

        yield open_terminal


def see(terminal: PseudoTerminal, text: str, since: int = 0) -> int:
    """Waits until the terminal shows ``text``; returns where that ends."""
    wait_until(lambda: text in terminal.raw[since:], timeout_s=COMMAND_TIMEOUT_S, what=text)
    return terminal.raw.index(text, since) + len(text)


def documents(ran: Ran) -> list[dict[str, dict[str, int]]]:
    assert ran.code == 0, ran
    parts = ran.out.replace("}\n{", "}\0{").split("\0")
    return [json.loads(part) for part in parts]


def test_a_turn_knows_those_before_it_until_the_conversation_is_cleared(served: Served) -> None:
    lines = "Tell me of a fox\nAnd then?\n/clear\nTell me of a fox\n"
    ran = run("chat", "--json", *QUICK, "--redis", served.redis_url, stdin=lines)
    first, second, third = (each["usage"]["prompt"] for each in documents(ran))
    assert second > first + 4
    assert third == first


def test_what_stands_between_quotes_is_one_message(served: Served) -> None:
    lines = '"""\nTell me\nof a fox\n"""\n'
    ran = run("chat", "--json", *QUICK, "--redis", served.redis_url, stdin=lines)
    assert len(documents(ran)) == 1


def test_a_file_answers_without_a_redis_and_a_pipe_gets_only_its_text(demo_model: Path) -> None:
    chat = ("chat", *QUICK, "--redis", NOWHERE)
    ran = run(*chat, demo_model, "--system", "Be brief", stdin="Tell me of a fox\n")
    assert ran.code == 0, ran
    generated = run("generate", "Tell me of a fox", "--system", "Be brief", *QUICK)
    assert ran.out == generated.out != ""
    assert "loaded here. set: max_tokens 4, temperature 0.0" in ran.err
    refused = run(*chat, stdin="x\n")
    assert (refused.code, refused.out) == (1, "")
    assert "`llorch up` starts one, and `llorch chat FILE` or `demo` needs none" in refused.err


def test_an_engine_that_died_is_loaded_again_for_the_next_answer(demo_model: Path) -> None:
    terminal = PseudoTerminal(
        "chat", str(demo_model), "--ignore-eos", "--redis", NOWHERE, columns=80, lines=24
    )
    with closing(terminal):
        seen = see(terminal, "›")
        children = psutil.Process(terminal.process.pid).children()
        [engine] = [each for each in children if "engine.process.server" in str(each.cmdline())]
        engine.kill()
        wait_until(lambda: not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE)
        terminal.press("/set max_tokens 3\r")
        seen = see(terminal, "›", see(terminal, "set: ", seen))
        terminal.press("Tell me of a fox\r")
        seen = see(terminal, "3 tokens, ", seen)
        see(terminal, "›", seen)
        terminal.press("\x04")
        assert terminal.process.wait(COMMAND_TIMEOUT_S) == 0


def test_what_is_set_is_checked_and_holds_for_the_next_answers(served: Served) -> None:
    chat = ("chat", "--json", "--redis", served.redis_url)
    lines = (
        "/set max_tokens 3\n/set ignore_eos true\nx\n/set max_tokens 5\nx\n/set max_tokens\n/set\n"
    )
    ran = run(*chat, stdin=lines)
    assert [each["usage"]["completion"] for each in documents(ran)] == [3, 5]
    for line, said in {
        "/set temperature 9": "temperature",
        "/set colour red": "/set colour: there are max_tokens, ",
        "/sing": "/sing is unknown; there are /system, ",
        "/model nobody": "no worker here has ever served 'nobody'",
        "/save": "/save FILE",
    }.items():
        ran = run(*chat, stdin=f"{line}\nx\n")
        assert ran.code in (1, 2), line
        assert said in ran.json["error"]["message"], line


def test_without_a_maximum_an_answer_may_fill_the_context(served: Served) -> None:
    ran = run("chat", "--json", "--ignore-eos", "-t", "0", "--redis", served.redis_url, stdin="x\n")
    [answer] = documents(ran)
    with Client(Settings(redis_url=served.redis_url)) as client:
        context = client.model_card(served.model).max_context
    assert answer["usage"]["prompt"] + answer["usage"]["completion"] == context


def test_a_conversation_is_saved_once(served: Served, tmp_path: Path) -> None:
    for name in ("talk.md", "talk.json"):
        file = tmp_path / name
        lines = f"/system Be brief\nTell me of a fox\n/save {file}\n/save {file}\n"
        ran = run("chat", *QUICK, "--redis", served.redis_url, stdin=lines)
        assert ran.code == 2
        assert f"{file} exists" in ran.err
        answer = ran.out.strip()
        if name.endswith("json"):
            roles = {each["role"]: each["content"].strip() for each in json.loads(file.read_text())}
            assert roles == {"system": "Be brief", "user": "Tell me of a fox", "assistant": answer}
        else:
            assert f"## user\n\nTell me of a fox\n\n## assistant\n\n {answer}" in file.read_text()


def test_ctrl_c_and_esc_stop_an_answer_and_not_the_program(
    talk: Opener, served: Served, served_worker: WorkerProcess, tmp_path: Path
) -> None:
    terminal = talk("--max-tokens", "8", "--ignore-eos")
    seen = 0
    with served_worker.paused(), Client(Settings(redis_url=served.redis_url)) as client:
        for key in ("\x03", "\x1b"):
            terminal.press("Tell me of a bear\r")
            seen = see(terminal, "waiting", seen)
            terminal.press(key)
            seen = see(terminal, "stopped", seen)
        # What is typed meanwhile is not shown amid the answer, and comes after it.
        terminal.press("Tell me of a bear\r")
        seen = see(terminal, "waiting", seen)
        terminal.press("/set\rhalf a line\x1b")
        seen = see(terminal, "stopped", seen)
        seen = see(terminal, "set: max_tokens 8", seen)
        seen = see(terminal, "half a line", seen)
        terminal.press("\x03")
        wait_until(lambda: not jobs_that_wait(client.redis, "demo"))
    # At the prompt Ctrl-C gives up what is typed.
    terminal.press("nonsense\x03Tell me of a fox\r")
    seen = see(terminal, "8 tokens, ", seen)
    terminal.press("\x1b[A")
    seen = see(terminal, "Tell me of a fox", seen)
    terminal.press("\x03/exit\r")
    assert terminal.process.wait(COMMAND_TIMEOUT_S) == 0
    assert termios.tcgetattr(terminal._slave) == terminal.modes
    history = tmp_path / "llorch" / "chat_history"
    assert "bear" in history.read_text()
    assert history.stat().st_mode & 0o077 == 0


def test_a_signal_ends_it_amid_an_answer_and_leaves_the_terminal_as_it_was(
    talk: Opener, served: Served, served_worker: WorkerProcess, tmp_path: Path
) -> None:
    (tmp_path / "llorch").write_text("no folder: the history is kept in memory")
    terminal = talk()
    with served_worker.paused(), Client(Settings(redis_url=served.redis_url)) as client:
        before = job_ids(client.redis)
        terminal.press("Tell me of a bear\r")
        see(terminal, "waiting")
        terminal.process.terminate()
        assert terminal.process.wait(COMMAND_TIMEOUT_S) == 130
        assert termios.tcgetattr(terminal._slave) == terminal.modes
        [job] = job_ids(client.redis) - before
        assert client.job(job).status().state == "cancelled"


def test_who_leaves_an_empty_prompt_leaves_no_hint_on_it(talk: Opener) -> None:
    terminal = talk()
    see(terminal, "Say something, or /help")
    terminal.press("\x04")
    assert terminal.process.wait(COMMAND_TIMEOUT_S) == 0
    wait_until(lambda: "\x1b[?2004l" in terminal.raw)  # the prompt was given up
    assert "Say something" not in terminal.raw.rpartition("›")[2]


def test_a_refusal_in_a_terminal_does_not_end_the_conversation(talk: Opener) -> None:
    terminal = talk(*QUICK)
    terminal.press("/set temperature 9\r")
    seen = see(terminal, "temperature: ")
    seen = see(terminal, "›", seen)
    terminal.press("Tell me\x1b\rof a fox\r")
    seen = see(terminal, "4 tokens, ", seen)
    see(terminal, "›", seen)
    terminal.press("\x04")
    assert terminal.process.wait(COMMAND_TIMEOUT_S) == 0


def test_ctrl_c_in_a_pipe_ends_the_command_and_its_job(
    served: Served, served_worker: WorkerProcess
) -> None:
    with Client(Settings(redis_url=served.redis_url)) as client:
        before = job_ids(client.redis)
        with served_worker.paused():
            command = [*OBEYING_CTRL_C, "chat", "--redis", served.redis_url]
            pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            chat: Any = subprocess.Popen(command, env=environment(), **pipe)  # type: ignore[call-overload]
            try:
                chat.stdin.write("Tell me of a bear\n")
                chat.stdin.flush()
                [job] = wait_until(lambda: job_ids(client.redis) - before)
                chat.send_signal(signal.SIGINT)
                assert chat.wait(COMMAND_TIMEOUT_S) == 130
            finally:
                chat.kill()
                chat.communicate()
            assert client.job(job).status().state == "cancelled"


def test_of_several_served_models_one_that_generates_answers(redis_server: RedisServer) -> None:
    settings, now_s = Settings(redis_url=redis_server.url), time.time()
    with connect(redis_server.url) as client, closing(Partners(settings, Screen())) as partners:
        client.flushall()
        for model, task in ("a-vectors", EmbedRequest.task), ("b-text", GenerationRequest.task):
            card = WorkerCard(
                hostname=model,
                pid=1,
                model=model,
                max_context=128,
                max_sequences=4,
                tasks=(task,),
                device="cpu",
                started_at=now_s,
                last_seen=now_s,
                engine={},
            )
            registry.announce(client, card)
        assert partners.find(None).name == "b-text"
