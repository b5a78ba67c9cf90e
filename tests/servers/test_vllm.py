"""vLLM as a worker's engine.

Skipped unless ``LLORCH_TEST_VLLM`` is a command line of ``vllm``, such as that of a build for CPUs.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from llorch_worker.client import Client
from llorch_worker.contract import (
    Cancelled,
    ContextLengthExceeded,
    GenerationRequest,
    InvalidRequest,
    read_journal,
)
from llorch_worker.servers.server_engine import Address, ServerEngine
from tests.servers.canvas import run_canvas
from tests.servers.test_server_workers import read_by
from tests.services import (
    LOCALHOST,
    REAL_APP,
    RedisServer,
    begun,
    free_port,
    running_worker,
    stock_app,
    tethered,
)
from tests.sizes import sized
from tests.waiting import wait_until

COMMAND = shlex.split(os.environ.get("LLORCH_TEST_VLLM", ""))
MODEL = "toy"
JOBS = sized(24, 200)
pytestmark = [
    pytest.mark.lacks("needs LLORCH_TEST_VLLM", when=not COMMAND),
    pytest.mark.timeout(900),
]


class VllmServer:
    def __init__(self, model: Path, log: Path) -> None:
        port = free_port()
        self.url = f"http://{LOCALHOST}:{port}/v1"
        self._log = log
        self._command = tethered(
            *COMMAND, "serve", str(model), "--served-model-name", MODEL, "--host", LOCALHOST,
            "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8",
        )  # fmt: skip

    def start(self) -> None:
        variables = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command, env=variables, stdout=log, stderr=log, start_new_session=True
            )

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(60)


@pytest.fixture(scope="module")
def server(trained_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    server = VllmServer(trained_model / "hf", tmp_path_factory.mktemp("vllm") / "server.log")
    server.start()
    yield server
    server.kill()


@pytest.fixture
def engine(server: VllmServer) -> Iterator[ServerEngine]:
    address = Address(server.url, None, MODEL, MODEL)
    engine = ServerEngine.load(address, max_sequences=8, wait=lambda _: time.sleep(0.2))
    yield engine
    engine.close()


def asked(**fields: object) -> GenerationRequest:
    return GenerationRequest(**{"prompt": "Once upon a time", "max_tokens": 8, **fields})


def test_a_greedy_text_goes_on_after_its_journal(engine: ServerEngine) -> None:
    ask = asked(temperature=0)
    whole = engine.submit(ask)
    events = [event for event in whole.events() if event.type in ("started", "tokens")]
    journal = read_journal(events[:4])
    assert len(journal.choices[0].token_ids) == 3
    assert engine.continues(ask, journal)
    result = engine.submit(ask, journal=journal).result()
    assert result.choices == whole.result().choices
    assert result.usage == whole.result().usage


def test_what_vllm_is_asked_means_what_ours_would_mean(engine: ServerEngine) -> None:
    everything = asked(
        temperature=0.7, n=2, top_k=5, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.1,
        stop=["."], include_stop_str_in_output=True, min_tokens=2, logit_bias={5: -100.0}, seed=3,
        stop_token_ids=[7], ignore_eos=True, skip_special_tokens=False, add_special_tokens=False,
    )  # fmt: skip
    assert len(engine.submit(everything).result().choices) == 2
    for shape, texts in (
        ({"choice": ["yes", "no"]}, ("yes", "no")),
        ({"regex": "[a]{3}"}, ("aaa",)),
        ({"grammar": 'root ::= "b" "c"'}, ("bc",)),
    ):
        assert engine.submit(asked(structured_outputs=shape)).result().text in texts
    most = engine.submit(asked(max_tokens=5000, cut_max_tokens=True, ignore_eos=True)).result()
    assert most.usage.prompt + most.usage.completion == engine.facts.max_context


def test_what_vllm_refuses_is_said_without_the_prompt(engine: ServerEngine) -> None:
    with pytest.raises(ContextLengthExceeded):
        engine.submit(asked(prompt="Once " * 2000)).result()
    with pytest.raises(InvalidRequest, match="logit_bias") as raised:
        engine.submit(asked(logit_bias={10**6: 1.0})).result()
    assert "Once" not in str(raised.value)


def test_a_stock_producers_canvas_runs_at_vllm_and_a_cancel_reaches_it(
    server: VllmServer, own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    def running() -> str:
        with urllib.request.urlopen(server.url.replace("/v1", "/metrics")) as page:
            (line,) = re.findall(rb"^vllm:num_requests_running{.*} (\S+)$", page.read(), re.M)
        return line.decode()

    with (
        running_worker(own_server.url, tmp_path, app=REAL_APP, engine_url=server.url, model=MODEL),
        stock_app(own_server.url) as app,
    ):
        run_canvas(app, MODEL, JOBS)
        job = own_client.submit(model=MODEL, prompt="Once", max_tokens=400, ignore_eos=True)
        begun(job).cancel()
        with pytest.raises(Cancelled):
            job.result(timeout=60)
        wait_until(lambda: running() == "0.0")


def test_log_probabilities_are_refused_by_name_and_ids_are_told(engine: ServerEngine) -> None:
    with pytest.raises(InvalidRequest, match="logprobs: is not done by vLLM"):
        engine.submit(asked(logprobs=2))
    assert len(engine.submit(asked(ignore_eos=True)).result().choices[0].token_ids) == 8


def test_a_job_survives_vllms_death(
    server: VllmServer, own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with running_worker(own_server.url, tmp_path, app=REAL_APP, engine_url=server.url, model=MODEL):
        job = own_client.submit(
            model=MODEL, prompt="Once", max_tokens=300, temperature=0, ignore_eos=True
        )
        begun(job)
        server.kill()
        server.start()
        result = job.result(timeout=600)
        assert result.text == read_by(job)
        assert result.usage.completion == len(result.choices[0].token_ids) == 300
        assert result.resumed
