"""llama.cpp's own server as a worker's engine.

Skipped unless llama-server is on the PATH, or ``LLORCH_TEST_LLAMA_SERVER`` is a command line of it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from llorch_worker.client import Client
from llorch_worker.contract import Cancelled, GenerationRequest
from llorch_worker.servers.server_engine import Address, ServerEngine
from tests.servers.canvas import run_canvas
from tests.servers.test_server_workers import read_by
from tests.services import (
    LOCALHOST,
    REAL_APP,
    RedisServer,
    WorkerProcess,
    begun,
    free_port,
    running_worker,
    stock_app,
    tethered,
)
from tests.sizes import sized
from tests.waiting import wait_until

COMMAND = shlex.split(os.environ.get("LLORCH_TEST_LLAMA_SERVER") or "llama-server")
MODEL = "smol"
SLOTS = 4
JOBS = sized(24, 200)
pytestmark = pytest.mark.lacks("needs llama-server", when=shutil.which(COMMAND[0]) is None)


class LlamaServer:
    def __init__(self, model: Path, log: Path) -> None:
        port = free_port()
        self.url = f"http://{LOCALHOST}:{port}/v1"
        self._log = log
        self._command = tethered(
            *COMMAND, "-m", str(model), "--alias", MODEL, "--host", LOCALHOST, "--port", str(port),
            "-np", str(SLOTS), "-c", str(512 * SLOTS), "-t", "1", "--no-warmup",
        )  # fmt: skip

    def start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(60)


@pytest.fixture(scope="module")
def server(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    server = LlamaServer(smollm2, tmp_path_factory.mktemp("llama") / "server.log")
    server.start()
    yield server
    server.kill()


@contextmanager
def worker_of(server: LlamaServer, redis: RedisServer, folder: Path) -> Iterator[WorkerProcess]:
    with running_worker(
        redis.url, folder, app=REAL_APP, engine_url=server.url, model=MODEL
    ) as worker:
        yield worker


def test_a_stock_producers_canvas_runs_at_llama_server(
    server: LlamaServer, own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with worker_of(server, own_server, tmp_path) as worker, stock_app(own_server.url) as app:
        card = worker.card()
        assert card is not None
        assert (card.device, card.max_sequences) == ("llama-server", SLOTS + 1)
        run_canvas(app, MODEL, JOBS)


def test_a_cancelled_job_frees_its_slot_within_a_second(
    server: LlamaServer, own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    def is_free() -> bool:
        with urllib.request.urlopen(server.url.replace("/v1", "/slots")) as slots:
            return b'"is_processing":true' not in slots.read()

    with worker_of(server, own_server, tmp_path):
        job = begun(own_client.submit(model=MODEL, prompt="Once", max_tokens=400, ignore_eos=True))
        assert not is_free()
        job.cancel()
        with pytest.raises(Cancelled):
            job.result(timeout=60)
        wait_until(is_free)


def test_a_chat_goes_on_at_the_next_token_after_the_servers_death(
    server: LlamaServer, own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with worker_of(server, own_server, tmp_path):
        messages = [{"role": "user", "content": "Count from one to ninety in words."}]
        job = own_client.submit(
            model=MODEL, messages=messages, max_tokens=90, temperature=0, ignore_eos=True
        )
        begun(job)
        server.kill()
        server.start()
        result = job.result(timeout=120)
        assert result.text == read_by(job)
        assert result.usage.completion == 90
        assert result.resumed or result.restarted


def test_what_llama_server_is_asked_means_what_ours_would_mean(server: LlamaServer) -> None:
    address = Address(server.url, None, MODEL, MODEL)
    engine = ServerEngine.load(address, max_sequences=None, wait=lambda _: time.sleep(0.2))
    try:
        ask = GenerationRequest(prompt="One, two, three,", max_tokens=12, temperature=0)
        plain = engine.submit(ask).result()
        assert plain.choices[0].token_ids
        again = ask.model_copy(
            update={"stop": (plain.text[4:7],), "include_stop_str_in_output": True}
        )
        stopped = engine.submit(again).result().choices[0]
        assert plain.text.startswith(stopped.text)
        assert stopped.stop_string == plain.text[4:7]
        assert stopped.text.endswith(plain.text[4:7])
        banned = ask.model_copy(update={"logit_bias": {plain.choices[0].token_ids[0]: -100.0}})
        assert engine.submit(banned).result().text != plain.text
        chosen = GenerationRequest(
            prompt="yes or no?", max_tokens=20, structured_outputs={"choice": ['a "b"\n', "c"]}
        )
        assert engine.submit(chosen).result().text in ('a "b"\n', "c")
        scored = engine.submit(ask.model_copy(update={"logprobs": 2})).result().choices[0]
        assert scored.logprobs is not None
        assert [entry.id for entry in scored.logprobs] == list(scored.token_ids)
        assert [len(entry.top) for entry in scored.logprobs] == [2] * 12
    finally:
        engine.close()
