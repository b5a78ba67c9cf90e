"""A real Prometheus over two workers, a gateway and an exporter shows what clients counted."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest

from llorch_worker.client import Client, Job
from llorch_worker.contract import Cancelled, GenerationResult, LlorchError
from tests.gateways import running_gateway
from tests.services import (
    REAL_APP,
    REPOSITORY,
    RedisServer,
    WorkerProcess,
    begun,
    free_port,
    running_worker,
    wait_until,
)
from tests.sizes import sized
from tests.store import record_of
from tests.telemetry.exporters import running_exporter
from tests.telemetry.prometheus_server import Prometheus, running_prometheus
from tests.telemetry.scraping import scrape

pytestmark = pytest.mark.timeout(sized(600, 1_800))
JOBS = sized(24, 1_000)
HANG_UPS = sized(60, 500)
CLIENTS = 16
SLOTS = 4
CONTEXT = 128
LONG = 90
WINDOW_S = sized(600, 3_600)
"""Of rates: longer than the load takes on a busy machine."""
END_S = 240
"""A busy machine takes long."""
AGREES = 0.02
PROMPT = "Once upon a time there was a little girl named Lily who loved to play outside"
BLOCK_BYTES = 2 * 5 * 16 * 2 * 32 * 4
"""Keys and values of a block: layers, tokens, heads, their size, float32."""
CONSTANT = {
    "llorch_fleet_models", "llorch_fleet_slots", "llorch_fleet_workers", "llorch_memory_bytes",
    "llorch_redis_up",
    "llorch_model_load_seconds", "llorch_redis_memory_max_bytes",
    "llorch_fleet_unserved_queue_length", "llorch_model_loads_total", "llorch_models_late_seconds",
    "llorch_resident",
}  # fmt: skip
"""What a load does not change."""
OF_SPECULATION = {
    "llorch_spec_decode_num_drafts_total", "llorch_spec_decode_num_draft_tokens_total",
    "llorch_spec_decode_num_accepted_tokens_total",
}  # fmt: skip
"""The workers here do not speculate."""


@dataclass(frozen=True)
class Stage:
    """Two workers of one model, behind a gateway, watched by Prometheus."""

    gateway_url: str
    workers: list[WorkerProcess]
    client: Client
    prometheus: Prometheus


@pytest.fixture(scope="module")
def stage(
    redis_server: RedisServer,
    client: Client,
    trained_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Stage]:
    folder = tmp_path_factory.mktemp("stage")
    options = {
        "app": REAL_APP,
        "model": trained_model / "f32.gguf",
        "model_name": "stories",
        "max_sequences": SLOTS,
        # So little that sequences must yield to each other.
        "max_context": CONTEXT,
        "kv_cache_bytes": 12 * BLOCK_BYTES,
        "batch_invariant": False,
        "lease_s": 3,
        "sweep_s": 0.5,
        "metrics_port": free_port(),
    }
    for _ in range(3):
        client.redis.rpush("llorch.tyo", "a producer's typing error")
    with ExitStack() as running:
        gateway = running.enter_context(running_gateway(redis_server.url, folder))
        exporter = running.enter_context(running_exporter(redis_server.url, folder))
        static = [url.removeprefix("http://") for url in (gateway.url, exporter)]
        prometheus = running.enter_context(
            running_prometheus(folder, targets_url=f"{exporter}/targets", static=static)
        )
        workers = [
            running.enter_context(running_worker(redis_server.url, folder, name=name, **options))
            for name in ("w1", "w2")
        ]
        wait_until(lambda: prometheus.value("sum(up)") == 4, what="four targets")
        yield Stage(gateway.url, workers, client, prometheus)


def run_jobs(stage: Stage, jobs: int) -> list[GenerationResult]:
    """Sends jobs through the gateway, as many at a time as there are clients."""
    with httpx.Client(base_url=stage.gateway_url, timeout=60) as http:

        def job(number: int) -> GenerationResult:
            body = {
                "prompt": f"{PROMPT}. {number % 7}",
                "max_tokens": 8 + 4 * (number % 13),
                "seed": number,
                "priority": ("high", "normal", "low")[number % 3],
            }
            answer = http.post("/v1/jobs", json=body)
            assert answer.status_code == 202, answer.text
            return stage.client.job(answer.json()["id"]).result(END_S)

        with ThreadPoolExecutor(CLIENTS) as pool:
            return list(pool.map(job, range(jobs)))


def test_totals_and_rates_are_what_the_clients_counted(stage: Stage) -> None:
    prometheus = stage.prometheus
    # Prometheus has seen each counter at 0.
    assert prometheus.value("sum(llorch_request_success_total)") == 0
    results = run_jobs(stage, JOBS)
    completion = sum(result.usage.completion for result in results)
    first_tokens_s = sum(result.timings.first_token_ms for result in results) / 1e3
    decode_s = sum(result.timings.decode_ms for result in results) / 1e3
    counted = {
        "llorch_request_success_total": JOBS,
        "llorch_jobs_ended_total": JOBS,
        "llorch_job_attempts_total": JOBS,
        "llorch_prompt_tokens_total": sum(result.usage.prompt for result in results),
        "llorch_prefix_cache_hits_total": sum(result.usage.cached for result in results),
        "llorch_generation_tokens_total": completion,
        "llorch_inter_token_latency_seconds_count": completion - JOBS,
        "llorch_time_to_first_token_seconds_count": JOBS,
        "llorch_time_to_first_token_seconds_sum": first_tokens_s,
        "llorch_e2e_request_latency_seconds_count": JOBS,
        "llorch_e2e_request_latency_seconds_sum": first_tokens_s + decode_s,
        "llorch_request_queue_time_seconds_count": JOBS,
        "llorch_request_queue_time_seconds_sum": (
            sum(result.timings.queue_ms for result in results) / 1e3
        ),
        "llorch_request_prefill_time_seconds_count": JOBS,
        "llorch_request_decode_time_seconds_count": JOBS,
        "llorch_request_decode_time_seconds_sum": decode_s,
    }
    wait_until(
        lambda: prometheus.value("sum(llorch_request_success_total)") == JOBS, timeout_s=END_S
    )
    both = prometheus.values("sum by (instance) (llorch_request_success_total)")
    assert len(both) == 2
    assert all(jobs > 0 for _, jobs in both), "one worker did it all"
    # The gateway is scraped at a time of its own. Its series began with the first request, of which
    # a rate knows nothing.
    accepted = 'llorch_gateway_requests_total{route="/v1/jobs",status="202"}'
    wait_until(lambda: prometheus.value(f"sum({accepted})") == JOBS, timeout_s=END_S)
    for metric, expected in counted.items():
        found = prometheus.value(f"sum({metric})")
        exact = not metric.endswith("_sum")
        assert found == (expected if exact else pytest.approx(expected)), metric
        # At the time of a sample, where Prometheus need not extrapolate.
        rate = sum(
            prometheus.value(f"sum(rate({_only(metric, labels)}[{WINDOW_S}s]))", at_s)
            for labels, at_s in prometheus.values(f"max by (instance) (timestamp({metric}))")
        )
        assert rate * WINDOW_S == pytest.approx(expected, rel=AGREES), metric
    steps = prometheus.value("sum(llorch_engine_steps_total)")
    assert steps == prometheus.value("sum(llorch_iteration_tokens_total_count)") > 0
    # On a busy machine the jobs may have come so slowly that none had to yield.
    preempted = "sum(llorch_num_preemptions_total)"
    wait_until(lambda: prometheus.value(preempted) > 0 or not run_jobs(stage, JOBS), what=preempted)


def _only(metric: str, labels: dict[str, str]) -> str:
    """A selector of one instance's series."""
    return f'{metric}{{instance="{labels["instance"]}"}}'


def test_faults_show(stage: Stage) -> None:
    client, prometheus = stage.client, stage.prometheus
    with pytest.raises(LlorchError):
        client.submit(prompt_token_ids=[10**6], max_tokens=1).result(END_S)
    wait_until(lambda: _was_cancelled(client), what="a job to be cancelled before its end")
    client.redis.lpush("llorch.stories", "no message at all")
    wait_until(lambda: prometheus.value("max(llorch_fleet_dead_letters)") == 1)
    frozen, other = (_metrics_address(worker) for worker in stage.workers)
    # A job that is frozen before its first token is stored is redelivered, but does not resume.
    while not (
        scrape(frozen)("llorch_fenced_writes_total") and scrape(other)("llorch_job_resumes_total")
    ):
        _freeze_with_jobs(stage, stage.workers[0], frozen)
    os.kill(stage.workers[0].engine_pid(), signal.SIGKILL)
    for metric, least in {
        "llorch_fenced_writes_total": 1,
        "llorch_job_redeliveries_total": 1,
        "llorch_job_resumes_total": 1,
        'llorch_jobs_ended_total{outcome="failed"}': 1,
        'llorch_jobs_ended_total{outcome="cancelled"}': 1,
        'llorch_job_errors_total{code="INVALID_REQUEST"}': 1,
        'llorch_engine_deaths_total{reason="killed"}': 1,
    }.items():
        wait_until(lambda m=metric, n=least: prometheus.value(f"sum({m})") >= n, what=metric)


def _was_cancelled(client: Client) -> bool:
    """Cancels a job that runs; on a fast machine it may end first."""
    job = begun(client.submit(prompt=PROMPT, max_tokens=LONG, ignore_eos=True))
    job.cancel()
    try:
        job.result(END_S)
    except Cancelled:
        return True
    return False


def _metrics_address(worker: WorkerProcess) -> str:
    card = worker.card()
    assert card is not None
    assert card.metrics_address is not None
    return card.metrics_address


def _freeze_with_jobs(stage: Stage, worker: WorkerProcess, address: str) -> None:
    """Stops a worker in the middle of jobs until the other has ended them."""

    def running() -> float:
        return scrape(address)("llorch_num_requests_running")

    def has_ended(job: Job) -> bool:
        return record_of(stage.client.redis, job.id).get("state") == "ended"

    jobs = [
        stage.client.submit(prompt=PROMPT, max_tokens=LONG, ignore_eos=True, seed=seed)
        for seed in range(2 * SLOTS)
    ]
    # On a fast machine the other worker may have taken them all.
    wait_until(lambda: running() > 0 or all(has_ended(job) for job in jobs), timeout_s=END_S)
    with worker.paused():
        for job in jobs:
            job.result(END_S)
    wait_until(lambda: running() == 0, timeout_s=END_S)


def test_a_job_that_waits_shows_its_age(stage: Stage) -> None:
    first, second = stage.workers
    with first.paused(), second.paused():
        job = stage.client.submit(prompt=PROMPT, max_tokens=1)
        for gauge in ("llorch_fleet_queue_length", "llorch_fleet_oldest_job_age_seconds"):
            wait_until(lambda g=gauge: stage.prometheus.value(f"max({g})") > 0, what=gauge)
    job.result(END_S)


def test_a_queue_that_no_worker_knows_is_shown_with_its_jobs(stage: Stage) -> None:
    found = stage.prometheus.values("max by (queue) (llorch_fleet_unserved_queue_length)")
    assert [(labels["queue"], value) for labels, value in found] == [("llorch.tyo", 3)]


def test_every_documented_metric_is_there_and_moved(stage: Stage) -> None:
    text = (REPOSITORY / "docs" / "MONITORING.md").read_text()
    documented = dict(re.findall(r"^\| `(llorch_\w+)` \| (\w+)", text, re.MULTILINE))
    assert len(documented) > 30
    prometheus = stage.prometheus
    stored = {labels["__name__"] for labels, _ in prometheus.values('{__name__=~"llorch_.+"}')}
    series = {f"{name}_count" if kind == "histogram" else name for name, kind in documented.items()}
    assert series <= stored
    parts = {f"{name}{end}" for name in documented for end in ("_bucket", "_sum", "_count")}
    assert stored <= series | parts, "metrics that the documentation lacks"

    def moved(name: str) -> bool:
        return prometheus.value(f"max(max_over_time({name}[1h]) - min_over_time({name}[1h]))") > 0

    def is_above_zero(name: str) -> bool:
        return prometheus.value(f"min({name})") > 0

    still = series - CONSTANT - OF_SPECULATION
    # A gauge shows only what goes on during a scrape: on a fast machine perhaps nothing. And a
    # gateway's series begins with its first request: all may come before it is first scraped.
    give_up_s = time.monotonic() + END_S
    while still := {name for name in still if not moved(name)}:
        assert time.monotonic() < give_up_s, f"they never moved: {sorted(still)}"
        run_jobs(stage, JOBS)
    # No model waits for another, and most reasons of a load have never been.
    none = {"llorch_models_late_seconds", "llorch_model_loads_total"}
    for name in CONSTANT - none - {"llorch_redis_memory_max_bytes"}:
        # An engine that an earlier test killed may still load.
        wait_until(partial(is_above_zero, name), timeout_s=END_S, what=name)
