"""The metrics of a worker, as Prometheus reads them."""

from __future__ import annotations

import os
import signal
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from llorch_worker.client import Client
from llorch_worker.contract import Cancelled, LlorchError
from llorch_worker.contract.installing import install_command
from llorch_worker.telemetry.metrics.http_server import PORTS, serve
from tests.latch import Latch
from tests.services import (
    LOCALHOST,
    RedisServer,
    WorkerProcess,
    begun,
    free_port,
    running_worker,
    wait_until,
)
from tests.telemetry.scraping import Scrape, scrape

SECRET = "zqxPROMPTxqz"
GENERATED = "w0 w1 w2"
TOY = {"model_name": "toy", "max_sequences": 4, "TOY_STEP_MS": 5}
HISTOGRAMS = (
    "time_to_first_token", "e2e_request_latency", "request_queue_time",
    "request_prefill_time", "request_decode_time",
)  # fmt: skip


def address(worker: WorkerProcess) -> str:
    card = worker.card()
    assert card is not None
    assert card.metrics_address is not None
    return card.metrics_address


def metrics_of(worker: WorkerProcess) -> Scrape:
    return scrape(address(worker))


def ended(worker: WorkerProcess, jobs: int) -> Scrape:
    """The metrics once ``jobs`` ends are counted, which is after their results are seen."""
    return wait_until(
        lambda: (last := metrics_of(worker))("llorch_jobs_ended_total") == jobs and last
    )


def test_every_end_of_a_job_is_counted(
    own_server: RedisServer, own_client: Client, tmp_path: Path, latch: Latch
) -> None:
    with running_worker(own_server.url, tmp_path, **TOY, metrics_port=free_port()) as worker:
        said = f"metrics at http://{address(worker)}/metrics"
        wait_until(lambda: worker.text().count(said) == 1)
        for _ in range(3):
            own_client.submit(prompt="x", max_tokens=4).result(120)
        with pytest.raises(LlorchError):
            own_client.submit(prompt="raise ValueError", max_tokens=4).result(120)
        held = own_client.submit(prompt=latch.prompt(), max_tokens=9)
        wait_until(lambda: metrics_of(worker)("llorch_num_requests_running") == 1)
        held.cancel()
        with pytest.raises(Cancelled):
            held.result(120)
        found = ended(worker, 5)
        assert found("llorch_jobs_ended_total", outcome="length") == 3
        assert found("llorch_jobs_ended_total", outcome="failed") == 1
        assert found("llorch_jobs_ended_total", outcome="cancelled") == 1
        assert found("llorch_job_errors_total", code="INTERNAL") == 1
        assert found("llorch_job_errors_total") == 1
        assert found("llorch_request_success_total", finished_reason="length") == 3
        for name in HISTOGRAMS:
            assert found(f"llorch_{name}_seconds_count") == 3, name
        assert found("llorch_job_attempts_total") == 5
        assert found("llorch_job_redeliveries_total") == 0
        assert found("llorch_model_load_seconds") > 0
        assert found("llorch_lease_age_seconds") < 10
        resumed = begun(own_client.submit(prompt=latch.prompt(), max_tokens=9))
        os.kill(worker.engine_pid(), signal.SIGKILL)
        latch.open()
        resumed.result(60)
        found = ended(worker, 6)
        assert found("llorch_job_resumes_total") == 1
        # Its first token came in the other attempt.
        counts = {name: found(f"llorch_{name}_seconds_count") for name in HISTOGRAMS}
        assert counts == {**dict.fromkeys(HISTOGRAMS, 3), "e2e_request_latency": 4}
        labels = {labels for name, labels in found.samples if name.startswith("llorch_")}
        assert all({("model_name", "toy"), ("engine", "0")} <= each for each in labels)


def test_metrics_hold_nothing_of_a_prompt_or_a_text(
    own_server: RedisServer, own_client: Client, tmp_path: Path
) -> None:
    with running_worker(own_server.url, tmp_path, **TOY, metrics_port=free_port()) as worker:
        job = own_client.submit(
            prompt=f"{SECRET} {SECRET}", max_tokens=9, stop=[SECRET], metadata={"a": SECRET}
        )
        assert job.result(120).text.startswith(GENERATED)
        with pytest.raises(LlorchError):
            own_client.submit(prompt=f"raise ValueError {SECRET}", max_tokens=2).result(120)
        text = metrics_of(worker).text
        assert SECRET not in text
        assert GENERATED not in text
        assert job.id not in text


def test_without_the_setting_a_worker_listens_nowhere(toy_worker: WorkerProcess) -> None:
    card = toy_worker.card()
    assert card is not None
    assert card.metrics_address is None


def test_when_all_ports_are_taken_there_is_one_warning_and_no_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExitStack() as taken:
        first_port = _free_range(taken)
        assert serve(CollectorRegistry(), LOCALHOST, first_port) is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert f"from {first_port} to {first_port + PORTS - 1} of {LOCALHOST}" in record.message


def _free_range(taken: ExitStack) -> int:
    """Takes :data:`PORTS` ports in a row, and returns the first."""
    while True:
        first_port = free_port()
        try:
            with ExitStack() as trial:
                for port in range(first_port, first_port + PORTS):
                    listener = trial.enter_context(socket.socket())
                    listener.bind((LOCALHOST, port))
                    listener.listen()
                taken.push(trial.pop_all())
        except OSError:
            continue
        return first_port


def test_a_worker_without_prometheus_client_names_the_extra(
    own_server: RedisServer, tmp_path: Path
) -> None:
    # A finder that knows no such module.
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as u\n"
        "find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'prometheus_client' else find(name, *a)\n"
    )
    worker = WorkerProcess(
        own_server.url,
        tmp_path / "w.log",
        **TOY,
        metrics_port=free_port(),
        fresh=True,
        PYTHONPATH=f"{tmp_path}:{Path(__file__).resolve().parents[2]}",
    )
    assert worker.wait_exit(60) == 1
    assert install_command("metrics") in worker.text()
