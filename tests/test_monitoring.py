"""The alerts and the dashboard: Prometheus accepts them, and what they ask for exists."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from llorch_worker.client import Client
from llorch_worker.contract.errors import ERROR_CLASSES
from llorch_worker.gateway.keys import new_key
from tests.gateways import running_gateway
from tests.services import REAL_APP, RedisServer, free_port, running_worker
from tests.telemetry.exporters import running_exporter
from tests.telemetry.prometheus_server import Prometheus, running_server
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

# tests/telemetry holds this table against what a running fleet exports.
METRICS = dict(
    re.findall(
        r"^\| `(llorch_\w+)` \| (\w+)",
        (REPOSITORY / "docs" / "MONITORING.md").read_text(),
        re.MULTILINE,
    )
)
"""The kind of each metric."""
EXPORTED = {
    f"{name}{suffix}"
    for name, kind in METRICS.items()
    for suffix in (("_bucket", "_sum", "_count") if kind == "histogram" else ("",))
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


@needs_promtool
def test_prometheus_accepts_the_configuration_and_the_rules(tmp_path: Path) -> None:
    config = configured(tmp_path, key="none", exporter="exporter:9390", gateway="gateway:8080")
    promtool("check", "config", str(config))
    promtool("check", "rules", str(RECORDS), str(ALERTS))


@needs_promtool
def test_alerts_fire_and_resolve_as_their_tests_say() -> None:
    promtool("test", "rules", str(ALERT_TESTS))


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
    of_jobs = {"INTERNAL", "OUT_OF_MEMORY", "ATTEMPTS_EXHAUSTED", "MODEL_LOAD_FAILED"}
    # Those who wait get these. No worker counts them.
    assert ours == of_jobs | {"JOB_LOST", "MODEL_CHANGED"}


@pytest.fixture(scope="module")
def prometheus(
    redis_server: RedisServer,
    client: Client,
    trained_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Prometheus]:
    """As in Compose, but without Flower: with a worker, an exporter and a gateway with keys."""
    folder = tmp_path_factory.mktemp("monitoring")
    key, entry = new_key("prometheus")
    (folder / "keys.toml").write_text(f"{entry}operator = true\n")
    with ExitStack() as running:
        exporter = running.enter_context(running_exporter(redis_server.url, folder))
        gateway = running.enter_context(
            running_gateway(redis_server.url, folder, keys=folder / "keys.toml")
        )
        config = configured(
            folder,
            key=key,
            exporter=exporter.removeprefix("http://"),
            gateway=gateway.url.removeprefix("http://"),
        )
        server = running.enter_context(running_server(config, folder))
        running.enter_context(
            running_worker(
                redis_server.url,
                folder,
                app=REAL_APP,
                model=trained_model / "f32.gguf",
                model_name="stories",
                metrics_port=free_port(),
            )
        )
        ready = 'count(up{job=~"llorch-(exporter|workers|gateway)"} == 1)'
        wait_until(lambda: server.value(ready) == 3, what="three targets")

        def counted() -> bool:
            client.submit(prompt="Once", max_tokens=4).result(120)
            httpx.get(f"{gateway.url}/health").raise_for_status()
            grown = ("llorch_request_success_total", "llorch_gateway_requests_total")
            return all(server.value(f"sum(rate({name}[1m]))") > 0 for name in grown)

        wait_until(counted, what="counters that grow")
        yield server


def configured(folder: Path, *, key: str, exporter: str, gateway: str) -> Path:
    """A copy of Compose's configuration, with these addresses, that looks every second."""
    shutil.copytree(PROMETHEUS, folder / "prometheus")
    (folder / "key").write_text(key)
    config = folder / "prometheus" / "prometheus.yml"
    text = config.read_text()
    for ours, theirs in {
        "exporter:9390": exporter,
        "gateway:8080": gateway,
        GATEWAY_KEY: str(folder / "key"),
    }.items():
        assert ours in text
        text = text.replace(ours, theirs)
    config.write_text(re.sub(r"(_interval: )\d+s", r"\g<1>1s", text))
    return config


def test_a_worker_goes_by_the_name_that_llorch_top_gives_it(prometheus: Prometheus) -> None:
    ((labels, _),) = prometheus.values("llorch_num_requests_running")
    assert labels["instance"] == "w1@test"
    assert "worker" not in labels


def test_prometheus_evaluates_every_rule(prometheus: Prometheus) -> None:
    loaded = {rule["name"]: rule["health"] for rule in prometheus.rules()}
    assert loaded == dict.fromkeys(RECORDED | set(ALERT_RULES), "ok")
    for name in RECORDED:
        # Rules see a counter grow an evaluation later than queries do.
        wait_until(lambda name=name: prometheus.values(name), what=name)


def test_every_query_of_the_dashboard_finds_series(prometheus: Prometheus) -> None:
    for query in queries():
        wait_until(lambda query=query: prometheus.values(query), what=query)
