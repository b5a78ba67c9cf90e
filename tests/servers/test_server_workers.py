"""Workers whose engine is a server, through Redis; and their deaths."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from llorch_worker import devices
from llorch_worker.broker.fleet import registry
from llorch_worker.broker.jobs.dead_letters import count, letters
from llorch_worker.client import Client, Job
from llorch_worker.contract import AttemptsExhausted, Cancelled, Restarted, Tokens
from llorch_worker.engine_options import SEQUENCES
from llorch_worker.gateway.webhook_secret import new_secret
from llorch_worker.settings import Settings
from llorch_worker.worker.celery.config import worker_config
from tests.cli.command import run
from tests.gateway.receiver import running_receiver
from tests.gateway.test_batches import api_of, documents, ended, line
from tests.gateway.test_batches import begun as begun_batch
from tests.gateways import running_gateway
from tests.servers.stand_in import FIRST_ID, MODEL, StandIn
from tests.services import (
    LOCALHOST,
    REAL_APP,
    Process,
    RedisServer,
    WorkerProcess,
    begun,
    environment,
    free_port,
    running_worker,
    start_python,
    stock_app,
)
from tests.sizes import FULL_SIZE, sized
from tests.telemetry.collector import running_collector
from tests.told import merged
from tests.waiting import wait_until

KILLS = sized(3, 100)


class Server:
    """A stand-in as a process that can be killed and started again."""

    def __init__(self, kind: str, folder: Path, step_ms: int = 20) -> None:
        self.kind, self.port = kind, free_port()
        self.url = f"http://{LOCALHOST}:{self.port}/v1"
        self._log = folder / "server.log"
        self.step_ms = step_ms
        """For each token, from the next start on."""
        self.process: Process | None = None

    def start(self) -> None:
        self.process = start_python(
            "tests.servers.stand_in",
            str(self.port),
            self.kind,
            variables=environment("redis://unused", STAND_IN_STEP_MS=self.step_ms),
            log=self._log,
        )

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(60)

    def has_died(self) -> bool:
        assert self.process is not None
        return self.process.poll() is not None


@contextmanager
def running_server(kind: str, folder: Path, **options: int) -> Iterator[Server]:
    server = Server(kind, folder, **options)
    server.start()
    try:
        yield server
    finally:
        if not server.has_died():
            server.kill()


@contextmanager
def worker_of(
    server: Server | StandIn, redis: RedisServer, folder: Path, **options: object
) -> Iterator[WorkerProcess]:
    settings = {
        "app": REAL_APP,
        "engine_url": server.url,
        "model": MODEL,
        "lease_s": 2,
        "sweep_s": 0.5,
    }
    with running_worker(redis.url, folder, **(settings | options)) as worker:
        yield worker


def read_by(job: Job) -> str:
    """What a reader of the job's stream has at its end."""
    text = ""
    for entry in job.stream(timeout=60):
        if isinstance(entry.event, Restarted):
            text = ""
        elif isinstance(entry.event, Tokens):
            text += entry.event.text
    return text


def started_again_until_it_ends(server: Server, job: Job) -> int:
    """How often the server died before the job ended."""
    deaths = 0

    def has_ended() -> bool:
        nonlocal deaths
        if server.has_died():
            deaths += 1
            server.start()
        return job.status().ended

    wait_until(has_ended, timeout_s=150)
    return deaths


def test_a_stock_producer_gets_a_text_from_a_server(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with (
        running_server("vLLM", tmp_path) as server,
        worker_of(server, own_server, tmp_path) as worker,
    ):
        with stock_app(own_server.url) as app:
            job = app.send_task(
                "llorch.generate",
                kwargs={"prompt": "one", "max_tokens": 3},
                queue=f"llorch.{MODEL}",
            )
            assert job.get(timeout=60)["text"] == "w0 w1 w2 "
        card = worker.card()
        assert card is not None
        assert card.device == "vLLM"
        assert card.engine["weakens"], "what a server does not promise"
        assert worker.find_engine() is None, "it needs no process of its own"


def test_a_cancelled_job_ends_at_the_server_too(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with running_server("vLLM", tmp_path) as server, worker_of(server, own_server, tmp_path):
        job = begun(own_client.submit(model=MODEL, prompt="one", max_tokens=4000))
        job.cancel()
        with pytest.raises(Cancelled):
            job.result(timeout=60)


@pytest.mark.parametrize("kind", ["vLLM", "another server"])
def test_jobs_survive_the_server_and_no_reader_gets_a_token_twice_unsaid(
    own_server: RedisServer, own_client: Client, tmp_path: Path, kind: str
) -> None:
    with (
        running_server(kind, tmp_path, step_ms=500) as server,
        worker_of(server, own_server, tmp_path) as worker,
    ):
        jobs = [own_client.submit(model=MODEL, prompt="one", max_tokens=60) for _ in range(3)]
        for job in jobs:
            begun(job)
        server.kill()

        def away() -> str | None:
            card = worker.card()
            return None if card is None else card.away

        assert (wait_until(away) or "").endswith("; it is looked for every second")
        waiting = own_client.submit(model=MODEL, prompt="one", max_tokens=2)
        assert waiting.status().state == "queued", "nothing is claimed meanwhile"
        server.step_ms = 20
        server.start()
        for job in jobs:
            result = job.result(timeout=60)
            assert result.text == read_by(job) == "".join(f"w{i} " for i in range(60))
            if kind == "vLLM":
                assert (result.resumed, result.restarted) == (True, None)
                ids = tuple(range(FIRST_ID, FIRST_ID + 60))
                assert result.choices[0].token_ids == ids
            else:
                assert (result.resumed, result.restarted) == (None, True)
        assert waiting.result(timeout=60).text == "w0 w1 "
        assert "the server serves again after" in worker.text()
        assert "loaded for" not in worker.text()
        assert count(own_client.redis) == 0


def test_another_worker_goes_on_after_the_first_is_killed(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with running_server("vLLM", tmp_path, step_ms=100) as server:
        with worker_of(server, own_server, tmp_path) as first:
            job = begun(own_client.submit(model=MODEL, prompt="one", max_tokens=40))
            os.kill(first.process.pid, signal.SIGKILL)
            with worker_of(server, own_server, tmp_path, name="w2"):
                result = job.result(timeout=60)
        assert result.text == read_by(job)
        assert result.choices[0].token_ids == tuple(range(FIRST_ID, FIRST_ID + 40))
        assert result.resumed


@pytest.mark.parametrize("kind", ["vLLM", "another server"])
@pytest.mark.timeout(3_000 if FULL_SIZE else 600)
def test_kills_of_workers_and_servers_lose_no_job_and_repeat_no_token_unsaid(
    own_server: RedisServer, own_client: Client, tmp_path: Path, kind: str
) -> None:
    with ExitStack() as running:
        server = running.enter_context(running_server(kind, tmp_path))
        worker = running.enter_context(worker_of(server, own_server, tmp_path))
        for number in range(KILLS):
            what = ("server", "worker", "both")[number % 3]
            jobs = [own_client.submit(model=MODEL, prompt="one", max_tokens=40) for _ in range(3)]
            for job in jobs:
                begun(job)
            if what != "worker":
                server.kill()
            if what != "server":
                os.kill(worker.process.pid, signal.SIGKILL)
                worker.process.wait(60)
            if what != "worker":
                server.start()
            if what != "server":
                name = f"w{number + 2}"
                worker = running.enter_context(worker_of(server, own_server, tmp_path, name=name))
            for job in jobs:
                result = job.result(timeout=60)
                assert result.text == read_by(job) == "".join(f"w{i} " for i in range(40)), what
                assert result.restarted is None or kind != "vLLM"
        assert count(own_client.redis) == 0


def test_no_job_pays_for_a_proxy_that_reaches_no_server_for_a_while(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with StandIn("vLLM").running() as server, worker_of(server, own_server, tmp_path):
        server.unreached = 50
        jobs = [own_client.submit(model=MODEL, prompt="one", max_tokens=2) for _ in range(20)]
        for job in jobs:
            assert job.result(timeout=60).text == "w0 w1 "
        assert server.unreached == 0
        assert count(own_client.redis) == 0


def test_a_job_that_ends_the_server_three_times_alone_is_a_dead_letter(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with running_server("vLLM", tmp_path) as server, worker_of(server, own_server, tmp_path):
        job = own_client.submit(model=MODEL, prompt="die", max_tokens=9)
        assert 3 <= started_again_until_it_ends(server, job) <= 6
        with pytest.raises(AttemptsExhausted):
            job.result(timeout=60)
        assert own_client.submit(model=MODEL, prompt="one", max_tokens=1).result(60).text == "w0 "


def test_a_job_that_ends_the_server_in_company_is_found_and_no_other_pays(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with (
        running_server("vLLM", tmp_path, step_ms=500) as server,
        worker_of(server, own_server, tmp_path),
    ):
        server.step_ms = 20  # once they were in company
        others = [own_client.submit(model=MODEL, prompt="one", max_tokens=90) for _ in range(2)]
        for job in others:
            begun(job)
        poison = own_client.submit(model=MODEL, prompt="die", max_tokens=9)
        assert started_again_until_it_ends(server, poison) <= 8
        with pytest.raises(AttemptsExhausted):
            poison.result(timeout=60)
        for job in others:
            assert (
                job.result(timeout=60).text == read_by(job) == "".join(f"w{i} " for i in range(90))
            )


def test_a_worker_waits_for_a_server_that_starts_later_and_tells_of_it(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    server = Server("vLLM", tmp_path)
    settings = {"app": REAL_APP, "engine_url": server.url, "model": MODEL, "dtype": "float16"}
    worker = WorkerProcess(own_server.url, tmp_path / "w1.log", **settings)
    try:
        wait_until(lambda: f"waits for the server at {server.url}" in worker.text())
        server.start()
        worker.wait_ready()
        assert (
            "no effect with LLORCH_ENGINE_URL, where the server decides: LLORCH_DTYPE"
            in worker.text()
        )
    finally:
        worker.stop()
        server.kill()


def test_a_wrong_key_ends_the_worker_with_a_sentence_that_does_not_show_it(
    own_server: RedisServer, tmp_path: Path
) -> None:
    secret = tmp_path / "key"
    secret.write_text("hunter2\n")
    with StandIn("vLLM", key="right").running() as server:
        settings = {"engine_url": server.url, "engine_key_file": secret, "model": MODEL}
        worker = WorkerProcess(own_server.url, tmp_path / "w1.log", app=REAL_APP, **settings)
        assert worker.wait_exit() == 1
        assert "refuses the key" in worker.text()
        assert "hunter2" not in worker.text()


def test_no_other_worker_pays_for_servers() -> None:
    from tests.services import run_python

    loaded = run_python(
        "import json, sys; import llorch_worker.worker.celery.bootstep;"
        "names = ('aiohttp', 'llorch_worker.servers');"
        "print(json.dumps([n for n in sys.modules if n.startswith(names)]))",
        "redis://unused",
    )
    assert loaded == []


def test_a_servers_worker_is_not_sized_for_the_cards_of_its_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "has_card", lambda: True)
    settings = Settings(engine_url=f"http://{LOCALHOST}:1", model=MODEL)
    assert worker_config(settings)["worker_concurrency"] == SEQUENCES["server"]


@pytest.mark.parametrize("prompt", ["cut 2", "die at 2"])
def test_tokens_that_begin_again_clear_no_job_of_its_servers_deaths(
    own_server: RedisServer, own_client: Client, tmp_path: Path, prompt: str
) -> None:
    """Each attempt has tokens, of which none is kept where there are no ids."""
    with (
        running_server("another server", tmp_path) as server,
        worker_of(server, own_server, tmp_path),
    ):
        job = own_client.submit(model=MODEL, prompt=prompt, max_tokens=9)
        started_again_until_it_ends(server, job)
        with pytest.raises(AttemptsExhausted):
            job.result(timeout=60)
        (letter,) = letters(own_client.redis)
        assert letter.attempts == 3


def test_a_job_that_always_begins_again_ends_after_so_many_deaths(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with (
        running_server("another server", tmp_path) as server,
        worker_of(server, own_server, tmp_path, max_attempts=5, max_deaths=2),
    ):
        job = own_client.submit(model=MODEL, prompt="die at 2", max_tokens=9)
        assert started_again_until_it_ends(server, job) == 2
        with pytest.raises(AttemptsExhausted):
            job.result(timeout=60)


def test_a_job_that_ends_the_server_after_tokens_is_found_where_all_begin_again(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with (
        running_server("another server", tmp_path, step_ms=100) as server,
        worker_of(server, own_server, tmp_path),
    ):
        others = [own_client.submit(model=MODEL, prompt="one", max_tokens=30) for _ in range(2)]
        for job in others:
            begun(job)
        poison = own_client.submit(model=MODEL, prompt="die at 9", max_tokens=20)
        assert started_again_until_it_ends(server, poison) <= 8
        with pytest.raises(AttemptsExhausted):
            poison.result(timeout=60)
        for job in others:
            result = job.result(timeout=60)
            assert result.text == read_by(job) == "".join(f"w{i} " for i in range(30))


def test_batches_webhooks_and_traces_run_as_with_an_engine_of_ours(
    own_server: RedisServer, tmp_path: Path
) -> None:
    with ExitStack() as running:
        server = running.enter_context(running_server("vLLM", tmp_path))
        collector = running.enter_context(running_collector())
        traced = collector.environment()
        running.enter_context(worker_of(server, own_server, tmp_path, **traced))
        receiver = running.enter_context(running_receiver())
        called = {"private_callbacks": True, "webhook_secret": new_secret()}
        gateway = running.enter_context(running_gateway(own_server.url, tmp_path, **called))
        body = {"model": MODEL, "prompt": "one", "max_tokens": 3}
        asked = httpx.post(f"{gateway.url}/v1/jobs", json=body | {"callback_url": receiver.url})
        assert asked.status_code == 202, asked.text
        spans = collector.wait_for(
            asked.json()["id"], f"process llorch.{MODEL}", "queue", "prefill", "decode"
        )
        assert spans["decode"].start >= spans["prefill"].start >= spans["queue"].start
        wait_until(lambda: receiver.deliveries)
        data = receiver.deliveries[0].document["data"]
        assert data["result"]["text"] == "w0 w1 w2 "
        api = running.enter_context(api_of(gateway))
        batch = ended(api, begun_batch(api, [line(each, **body) for each in ("a", "b")]))
        found = documents(api, batch.output_file_id)
        answers = {each["custom_id"]: each["response"]["body"]["choices"] for each in found}
        assert {name: choices[0]["text"] for name, choices in answers.items()} == {
            "a": "w0 w1 w2 ",
            "b": "w0 w1 w2 ",
        }


def said_in(stream: str) -> tuple[str, str]:
    """The thought, and the arguments of the calls, of a streamed answer."""
    thought = arguments = ""
    for each in stream.splitlines():
        if not each.startswith("data: {"):
            continue
        match json.loads(each.removeprefix("data: ")):
            case {"choices": [{"delta": delta}]}:
                thought += delta.get("reasoning_content", "")
                calls = delta.get("tool_calls", ())
                arguments += "".join(call["function"]["arguments"] for call in calls)
            case {"type": "content_block_delta", "delta": delta}:
                thought += delta.get("thinking", "")
                arguments += delta.get("partial_json", "")
            case {"type": "response.reasoning_text.delta", "delta": delta}:
                thought += delta
            case {"type": "response.function_call_arguments.delta", "delta": delta}:
                arguments += delta
    return thought, arguments


def test_thoughts_and_calls_without_ids_reach_readers_also_once_the_stream_has_expired(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    function = {"name": "look"}
    chat: dict[str, Any] = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "call"}],
        "tools": [{"type": "function", "function": function}],
    }
    tool = {**function, "input_schema": {"type": "object"}}
    messages = chat | {"tools": [tool], "thinking": {"type": "enabled"}, "max_tokens": 16}
    tool = {**function, "type": "function", "parameters": {"type": "object"}}
    response = {"model": MODEL, "input": "call", "tools": [tool]}
    bodies = {"chat/completions": chat, "messages": messages, "responses": response}
    with (
        running_server("SGLang", tmp_path) as server,
        worker_of(server, own_server, tmp_path),
        running_gateway(own_server.url, tmp_path) as gateway,
    ):
        job = own_client.submit(**chat)
        told = [e.event for e in job.stream(timeout=60) if isinstance(e.event, Tokens)]
        assert merged(told) == [Tokens.of(job.result(60).choices[0])]
        for _ in range(2):
            for path, body in bodies.items():
                answer = httpx.post(
                    f"{gateway.url}/v1/{path}",
                    json=body | {"stream": True},
                    headers={"Idempotency-Key": path},
                    timeout=60,
                )
                assert said_in(answer.text) == ("I look it up.", '{"where": "sea"}{}'), path
            for stream in list(own_client.redis.scan_iter("llorch:job:*:events")):
                own_client.redis.delete(stream)
        assert len(own_client.redis.keys("celery-task-meta-*")) == 4, "each was computed once"


def test_a_server_is_one_of_several_models_and_always_there(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with (
        running_server("vLLM", tmp_path) as server,
        running_worker(
            own_server.url,
            tmp_path,
            models=f"a.gguf,{server.url}={MODEL},b.gguf",
            min_resident_s=0,
            idle_unload_s=600,
        ) as worker,
    ):

        def model_of(model: str) -> str | None:
            job = own_client.submit(model=model, prompt="one", max_tokens=2)
            assert job.result(timeout=60).text == "w0 w1 "
            return job.result().model

        def kept() -> dict[str, str]:
            """By model the device, of each that has an engine."""
            cards = registry.workers(own_client.redis)
            return {card.model: card.device for card in cards if not card.away}

        wait_until(lambda: kept() == {"a": "cpu", MODEL: "vLLM"})
        for model in (MODEL, "b", MODEL, "a"):
            assert model_of(model) == model
        wait_until(lambda: kept() == {"a": "cpu", MODEL: "vLLM"})
        card = worker.card()
        assert card is not None
        assert card.models == ("a", MODEL, "b")
        told = {
            command: run(command, MODEL, LLORCH_REDIS_URL=own_server.url)
            for command in ("load", "unload", "reload")
        }
        assert told["load"].code == told["reload"].code == 0
        assert f"{MODEL} is a server's, which stays" in told["unload"].err
        # What it is away for is that model's alone.
        server.kill()
        wait_until(lambda: kept() == {"a": "cpu"})
        waits = own_client.submit(model=MODEL, prompt="one", max_tokens=2)
        assert model_of("b") == "b"
        server.start()
        assert waits.result(timeout=60).model == MODEL
        wait_until(lambda: kept() == {"b": "cpu", MODEL: "vLLM"})


def test_a_worker_of_servers_alone_serves_each_and_computes_nothing(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with ExitStack() as running:
        one = running.enter_context(StandIn("vLLM").running())
        other = running.enter_context(StandIn("llama-server").running())
        other.card = {"id": "owner/other"}
        models = f"{one.url}={MODEL},{other.url}=owner/other"
        worker = running.enter_context(running_worker(own_server.url, tmp_path, models=models))
        assert not [*worker.engines()]
        for model in (MODEL, "other"):
            job = own_client.submit(model=model, prompt="one", max_tokens=2)
            assert job.result(timeout=60).text == "w0 w1 "
