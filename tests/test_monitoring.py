"""The alerts and the dashboard: Prometheus accepts them, and what they ask for exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from llorch_worker.contract.errors import ERROR_CLASSES
from tests.prometheus import Prometheus, running_prometheus
from tests.services import LOCALHOST
from tests.waiting import wait_until

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="needs promtool (Debian's package prometheus)"
)

REPOSITORY = Path(__file__).resolve().parents[1]
DEPLOY = REPOSITORY / "deploy"
PROMETHEUS = DEPLOY / "prometheus"
RECORDS = PROMETHEUS / "rules" / "records.yml"
ALERTS = PROMETHEUS / "rules" / "alerts.yml"
ALERT_TESTS = PROMETHEUS / "tests" / "alerts.yml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "llorch.json"
MANUAL = REPOSITORY / "docs" / "MONITORING.md"
GATEWAY_KEY = "/run/llorch/gateway-key"

WORKER = ("model_name", "engine", "instance")
FLEET = ("model_name",)
QUEUES = ("model_name", "priority")
GAUGES = {
    "llorch_num_requests_running": WORKER,
    "llorch_num_requests_waiting": WORKER,
    "llorch_kv_cache_usage_perc": WORKER,
    "llorch_lease_age_seconds": WORKER,
    "llorch_memory_bytes": (*WORKER, "part"),
    "llorch_model_load_seconds": WORKER,
    "llorch_fleet_queue_length": QUEUES,
    "llorch_fleet_oldest_job_age_seconds": QUEUES,
    "llorch_fleet_workers": FLEET,
    "llorch_fleet_slots": FLEET,
    "llorch_fleet_running": FLEET,
    "llorch_fleet_waiting": FLEET,
    "llorch_fleet_saturation": FLEET,
    "llorch_fleet_dead_letters": (),
    "llorch_redis_up": (),
    "llorch_redis_memory_bytes": (),
    "llorch_redis_memory_max_bytes": (),
    "llorch_gateway_open_requests": (),
}
COUNTERS = {
    "llorch_prefix_cache_queries_total": WORKER,
    "llorch_prefix_cache_hits_total": WORKER,
    "llorch_prompt_tokens_total": WORKER,
    "llorch_generation_tokens_total": WORKER,
    "llorch_num_preemptions_total": WORKER,
    "llorch_request_success_total": (*WORKER, "finished_reason"),
    "llorch_job_attempts_total": WORKER,
    "llorch_job_redeliveries_total": WORKER,
    "llorch_job_resumes_total": WORKER,
    "llorch_fenced_writes_total": WORKER,
    "llorch_jobs_ended_total": (*WORKER, "outcome"),
    "llorch_job_errors_total": (*WORKER, "code"),
    "llorch_engine_steps_total": WORKER,
    "llorch_gateway_requests_total": ("method", "route", "status"),
}
HISTOGRAMS = {
    "llorch_time_to_first_token_seconds": WORKER,
    "llorch_inter_token_latency_seconds": WORKER,
    "llorch_e2e_request_latency_seconds": WORKER,
    "llorch_request_queue_time_seconds": WORKER,
    "llorch_request_prefill_time_seconds": WORKER,
    "llorch_request_decode_time_seconds": WORKER,
    "llorch_iteration_tokens_total": WORKER,
    "llorch_gateway_request_seconds": ("route",),
}
EXPORTED = {*GAUGES, *COUNTERS} | {
    f"{name}_{suffix}" for name in HISTOGRAMS for suffix in ("bucket", "sum", "count")
}
"""Every name that a worker, an exporter or a gateway shows."""


def rules(file: Path) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(file.read_text())["groups"] for rule in group["rules"]]


RECORDED = {rule["record"] for rule in rules(RECORDS)}
ALERT_RULES = {rule["alert"]: rule for rule in rules(ALERTS)}


def panels() -> list[dict[str, Any]]:
    """The dashboard's panels that show something."""
    found = json.loads(DASHBOARD.read_text())["panels"]
    return [panel for panel in found if panel["type"] != "row"]


def queries() -> list[str]:
    """What the dashboard's panels ask, for all models and workers and a range of a minute."""
    chosen = {"$model_name": ".+", "$instance": ".+", "$__rate_interval": "1m"}
    found = []
    for panel in panels():
        for target in panel["targets"]:
            expression = target["expr"]
            for variable, value in chosen.items():
                expression = expression.replace(variable, value)
            found.append(expression)
    return found


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def asked_for(text: str) -> set[str]:
    """The names of ours in PromQL, those in quotes excepted."""
    bare = re.sub(r'"[^"]*"', "", text)
    return set(re.findall(r"[A-Za-z_:]*llorch_[A-Za-z_0-9:]*", bare))


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The configuration of Compose in a folder of its own, with a key for the gateway."""
    shutil.copytree(PROMETHEUS, tmp_path / "prometheus")
    key = tmp_path / "key"
    key.write_text("none")
    copied = tmp_path / "prometheus" / "prometheus.yml"
    text = copied.read_text()
    assert GATEWAY_KEY in text
    copied.write_text(text.replace(GATEWAY_KEY, str(key)))
    return copied


@needs_promtool
def test_prometheus_accepts_the_configuration_and_the_rules(config: Path) -> None:
    promtool("check", "config", str(config))
    promtool("check", "rules", str(RECORDS), str(ALERTS))


@needs_promtool
def test_alerts_fire_and_resolve_as_their_tests_say() -> None:
    promtool("test", "rules", str(ALERT_TESTS))


@pytest.mark.parametrize("alert", ALERT_RULES)
def test_the_tests_show_that_an_alert_fires_and_when_it_does_not(alert: str) -> None:
    cases = [
        case
        for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"]
        for case in test["alert_rule_test"]
        if case["alertname"] == alert
    ]
    fires = [bool(case["exp_alerts"]) for case in cases]
    assert fires.index(True) > 0, "first it does not fire"
    assert fires[-1] is False, "at last it is over"


@pytest.mark.parametrize("alert", ALERT_RULES)
def test_an_alert_says_how_bad_it_is_and_where_the_remedy_stands(alert: str) -> None:
    rule = ALERT_RULES[alert]
    assert rule["labels"]["severity"] in ("critical", "warning")
    assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
    assert rule["annotations"]["runbook_url"] == f"docs/MONITORING.md#{alert.lower()}"
    paragraph = MANUAL.read_text().partition(f"\n### {alert}\n")[2]
    assert paragraph.strip().lower().startswith(f"{rule['labels']['severity']}.")


def test_every_name_that_is_asked_for_is_exported_or_recorded() -> None:
    assert not {name for rule in rules(RECORDS) for name in asked_for(rule["expr"])} - EXPORTED
    known = EXPORTED | RECORDED
    asked = {name for rule in ALERT_RULES.values() for name in asked_for(rule["expr"])}
    assert not asked - known
    scaling = (DEPLOY / "kubernetes" / "autoscaling" / "worker.yaml").read_text()
    dashboard = json.loads(DASHBOARD.read_text())
    variables = [each["query"] for each in dashboard["templating"]["list"]]
    for text in (scaling, *queries(), json.dumps(variables).replace('\\"', "'")):
        assert not asked_for(text) - EXPORTED, text


def test_nothing_is_recorded_that_no_alert_asks_for() -> None:
    asked = {name for rule in ALERT_RULES.values() for name in asked_for(rule["expr"])}
    assert asked >= RECORDED


def test_the_error_codes_that_are_not_the_services_fault_exist() -> None:
    (rule,) = [rule for rule in rules(RECORDS) if "job_errors" in rule["record"]]
    (codes,) = re.findall(r'code!~"([^"]+)"', rule["expr"])
    ours = set(ERROR_CLASSES) - set(codes.split("|"))
    assert set(codes.split("|")) < set(ERROR_CLASSES)
    assert ours == {"INTERNAL", "OUT_OF_MEMORY", "ATTEMPTS_EXHAUSTED", "MODEL_LOAD_FAILED"}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """With our rules, and with every metric, whose counters grow."""
    folder = tmp_path_factory.mktemp("prometheus")
    registry = CollectorRegistry()
    grow = [_metric(registry, name) for name in (*GAUGES, *COUNTERS, *HISTOGRAMS)]
    server, thread = start_http_server(0, LOCALHOST, registry)
    config = folder / "prometheus.yml"
    config.write_text(
        yaml.safe_dump(
            {
                "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
                "rule_files": [str(RECORDS), str(ALERTS)],
                "scrape_configs": [
                    {
                        "job_name": "llorch-workers",
                        "static_configs": [{"targets": [f"{LOCALHOST}:{server.server_port}"]}],
                    }
                ],
            }
        )
    )

    def counted(running: Prometheus) -> bool:
        for each in grow:
            each()
        return bool(running.query("rate(llorch_engine_steps_total[1m]) > 0 and on () ALERTS"))

    try:
        with running_prometheus(config, folder) as running:
            wait_until(lambda: counted(running), what="two scrapes and the first alert")
            yield running
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _metric(registry: CollectorRegistry, name: str) -> Callable[[], None]:
    """Makes a metric of one series, and returns what lets it grow."""
    every = GAUGES | COUNTERS | HISTOGRAMS
    labels = [label for label in every[name] if label != "instance"]
    values = ["x"] * len(labels)
    if name in HISTOGRAMS:
        histogram = Histogram(name, name, labels, registry=registry)
        return lambda: (histogram.labels(*values) if labels else histogram).observe(1)
    kind = Gauge if name in GAUGES else Counter
    metric = kind(name, name, labels, registry=registry)
    return lambda: (metric.labels(*values) if labels else metric).inc()


def test_prometheus_evaluates_every_rule(prometheus: Prometheus) -> None:
    loaded = prometheus.rules()
    assert {rule["name"] for rule in loaded} == RECORDED | set(ALERT_RULES)
    assert {rule["health"] for rule in loaded} == {"ok"}
    for name in RECORDED:
        assert prometheus.query(name), name


def test_every_query_of_the_dashboard_finds_series(prometheus: Prometheus) -> None:
    empty = [expression for expression in queries() if not prometheus.query(expression)]
    assert not empty


def test_the_dashboard_lets_one_choose_the_models_and_workers_that_there_are() -> None:
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    assert [each["name"] for each in variables] == ["datasource", "model_name", "instance"]
    used = set(re.findall(r"\$(\w+)", " ".join(t["expr"] for p in panels() for t in p["targets"])))
    assert used == {"model_name", "instance", "__rate_interval"}


def test_panels_have_ids_of_their_own_and_do_not_overlap() -> None:
    every = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in every}) == len(every)
    taken: set[tuple[int, int]] = set()
    for panel in every:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_grafana_finds_its_data_source_and_its_dashboards() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://prometheus:9090")
    (provider,) = yaml.safe_load((folder / "dashboards/llorch.yml").read_text())["providers"]
    grafana = yaml.safe_load((REPOSITORY / "docker-compose.yml").read_text())["services"]["grafana"]
    path = provider["options"]["path"]
    assert f"./deploy/grafana/dashboards:{path}:ro" in grafana["volumes"]
    for name in ("datasources", "dashboards"):
        mounted = f"./deploy/grafana/provisioning/{name}:/etc/grafana/provisioning/{name}:ro"
        assert mounted in grafana["volumes"]
    home = grafana["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{path}/{DASHBOARD.name}"
