"""``llorch exporter``: the fleet for Prometheus and KEDA."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import date
from pathlib import Path

import httpx
import pytest

from llorch_worker.broker.fleet import registry
from llorch_worker.broker.jobs.usage import UsageRow
from llorch_worker.client import Client
from llorch_worker.telemetry.metrics.fleet_metrics import MOST_ROWS, _used
from tests.cli.command import run
from tests.services import RedisServer, free_port, running_worker, wait_until
from tests.store import add_letter
from tests.telemetry.exporters import running_exporter
from tests.telemetry.scraping import parse, scrape

TOY = {"model_name": "toy", "TOY_STEP_MS": 5}
SCRAPES = 60
PROMETHEUS_TIMEOUT_S = 5
"""Of a scrape every 5 s."""


@pytest.fixture
def exporter(own_server: RedisServer, tmp_path: Path) -> Iterator[str]:
    with running_exporter(own_server.url, tmp_path) as url:
        yield url


def test_jobs_without_workers_show_by_priority_and_saturate(
    own_server: RedisServer, own_client: Client, tmp_path: Path, exporter: str
) -> None:
    with running_worker(own_server.url, tmp_path, **TOY, max_sequences=3):
        wait_until(lambda: scrape(exporter)("llorch_fleet_workers", model_name="toy") == 1)
        assert scrape(exporter)("llorch_fleet_slots", model_name="toy") == 3
    # So that KEDA can start a worker where none is.
    for priority, jobs in (("high", 1), ("normal", 3), ("low", 2)):
        for _ in range(jobs):
            own_client.submit(prompt="x", priority=priority)
    wait_until(lambda: scrape(exporter)("llorch_fleet_waiting", model_name="toy") == 6)
    found = scrape(exporter)
    assert found("llorch_fleet_workers", model_name="toy") == 0
    assert found("llorch_fleet_slots", model_name="toy") == 0
    assert found("llorch_fleet_saturation", model_name="toy") == 6
    for priority, jobs in (("high", 1), ("normal", 3), ("low", 2)):
        where = {"model_name": "toy", "priority": priority}
        assert found("llorch_fleet_queue_length", **where) == jobs
        assert 0 < found("llorch_fleet_oldest_job_age_seconds", **where) < 120


def test_a_dead_letter_and_the_memory_of_redis_show(
    own_server: RedisServer, own_client: Client, exporter: str
) -> None:
    add_letter(own_client.redis, "{}")
    own_client.redis.config_set("maxmemory", 50_000_000)
    wait_until(lambda: scrape(exporter)("llorch_fleet_dead_letters") == 1)
    found = scrape(exporter)
    assert found("llorch_redis_up") == 1
    assert found("llorch_redis_memory_max_bytes") == 50_000_000
    assert 0 < found("llorch_redis_memory_bytes") < 50_000_000


def test_without_redis_it_lives_and_says_so(own_server: RedisServer, exporter: str) -> None:
    assert scrape(exporter)("llorch_redis_up") == 1
    own_server.halt()
    found = wait_until(lambda: (s := scrape(exporter))("llorch_redis_up") == 0 and s)
    assert not [name for name in found.names if name.startswith("llorch_fleet")]
    assert httpx.get(f"{exporter}/health").status_code == 200
    # Prometheus keeps its targets only if this is no answer.
    assert httpx.get(f"{exporter}/targets").status_code == 503
    own_server.start()
    wait_until(lambda: scrape(exporter)("llorch_redis_up") == 1)


def test_a_redis_that_became_a_replica_is_not_up(own_client: Client, exporter: str) -> None:
    assert scrape(exporter)("llorch_redis_up") == 1
    own_client.redis.replicaof("127.0.0.1", free_port())
    wait_until(lambda: scrape(exporter)("llorch_redis_up") == 0)
    own_client.redis.replicaof("NO", "ONE")
    wait_until(lambda: scrape(exporter)("llorch_redis_up") == 1)


def test_it_starts_without_redis_and_says_so_once(tmp_path: Path) -> None:
    url = f"redis://127.0.0.1:{free_port()}/0"
    log = tmp_path / "exporter.log"
    with running_exporter(url, tmp_path) as exporter:
        wait_until(lambda: f"No Redis at {url}" in log.read_text())
        assert scrape(exporter)("llorch_redis_up") == 0
    assert log.read_text().count("No Redis at") == 1


def test_many_scrapes_are_one_reading(own_client: Client, exporter: str) -> None:
    def commands() -> int:
        return int(own_client.redis.info("stats")["total_commands_processed"])

    def of_a_scrape() -> int:
        fresh = commands()
        scrape(exporter)
        return commands() - fresh - 1

    # Of one for which the exporter reads; the others add nothing.
    a_reading = wait_until(of_a_scrape)
    before = commands()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: scrape(exporter), range(SCRAPES)))
    assert len(answers) == SCRAPES
    # There is one a second at most, however long the scrapes take on a busy machine.
    assert commands() - before < a_reading * SCRAPES / 2


def test_targets_are_the_workers_that_serve_metrics(
    own_server: RedisServer, tmp_path: Path, exporter: str
) -> None:
    port = free_port()

    def serving() -> list[str]:
        groups = httpx.get(f"{exporter}/targets").json()
        return [target for group in groups for target in group["targets"]]

    with (
        running_worker(own_server.url, tmp_path, **TOY) as silent,
        running_worker(own_server.url, tmp_path, name="w2", **TOY, metrics_port=port) as first,
        running_worker(own_server.url, tmp_path, name="w3", **TOY, metrics_port=port) as second,
    ):
        answer = httpx.get(f"{exporter}/targets")
        assert answer.headers["content-type"] == "application/json"
        assert {group["labels"]["worker"] for group in answer.json()} == {
            first.hostname,
            second.hostname,
        }
        assert silent.hostname not in answer.text
        for target in serving():
            assert scrape(target)("llorch_model_load_seconds", model_name="toy") > 0
    assert serving() == []


def test_the_usage_of_those_with_the_most_tokens_of_both_kinds_is_shown() -> None:
    few = UsageRow(date.today(), "few", "toy", 1, 0, 10, 0, 1, 1)
    much = replace(few, tenant="much", prompt_tokens=1, completion_tokens=1000)
    jobs, *_ = _used([*[few] * MOST_ROWS, much])
    tenants = {sample.labels["tenant"] for sample in jobs.samples}
    assert tenants == {"few", "much"}


def test_an_address_of_ipv6_is_written_in_brackets() -> None:
    fields = dict.fromkeys(registry.WorkerCard.model_fields)
    card = registry.WorkerCard.model_construct(
        **fields | {"metrics_host": "::1", "metrics_port": 9400}
    )
    assert card.metrics_address == "[::1]:9400"
    # Of documentation: no machine has it.
    ran = run("exporter", "--host", "2001:db8::1", "--port", "9390", "--json")
    assert ran.json["error"]["message"].startswith("cannot listen at [2001:db8::1]:9390: ")


def test_unknown_paths_and_taken_ports_are_told(exporter: str) -> None:
    assert httpx.get(f"{exporter}/nothing").status_code == 404
    port = exporter.rpartition(":")[2]
    ran = run("exporter", "--port", port, "--json")
    assert ran.code == 1
    assert ran.json["error"]["code"] == "CANNOT_LISTEN"


def test_a_redis_that_hangs_is_told_before_prometheus_gives_up(
    own_server: RedisServer, exporter: str
) -> None:
    assert scrape(exporter)("llorch_redis_up") == 1
    assert httpx.get(f"{exporter}/targets").status_code == 200

    def up() -> float:
        answer = httpx.get(f"{exporter}/metrics", timeout=PROMETHEUS_TIMEOUT_S)
        return parse(answer.text)("llorch_redis_up")

    with own_server.paused():
        # The last reading is told for a second.
        wait_until(lambda: up() == 0)
        answer = httpx.get(f"{exporter}/targets", timeout=PROMETHEUS_TIMEOUT_S)
        assert answer.status_code == 503
