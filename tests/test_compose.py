"""The compose file and the image provide what a deployment needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.settings import Settings
from llorch_worker.stack.programs import FLOWER_DEFAULTS
from tests.gateways import running_gateway
from tests.probes import assert_tells_age
from tests.services import own_redis

yaml = pytest.importorskip("yaml", reason="needs PyYAML to read the compose file")

REPOSITORY = Path(__file__).resolve().parents[1]
COMPOSE = REPOSITORY / "docker-compose.yml"
TRACES = {
    *("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_HEADERS"),
    *("OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"),
}

HUB = {"HF_ENDPOINT", "HF_TOKEN", "HF_HUB_OFFLINE"}


@pytest.fixture(scope="module")
def services() -> Any:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_only_what_asks_for_a_login_or_a_key_is_published_beyond_localhost(services: Any) -> None:
    ports = {name: service.get("ports", []) for name, service in services.items()}
    public = {name for name, each in ports.items() for p in each if not p.startswith("127.0.0.1:")}
    assert public == {"gateway", "flower"}
    assert services["gateway"]["environment"]["LLORCH_GATEWAY_KEYS"]
    assert services["flower"]["environment"]["FLOWER_BASIC_AUTH"].startswith(
        "${FLOWER_BASIC_AUTH:?"
    )


def test_a_worker_has_the_time_to_drain(services: Any) -> None:
    drain_min = Settings.model_fields["drain_s"].default / 60
    assert int(services["worker"]["stop_grace_period"].removesuffix("m")) > drain_min


@pytest.mark.parametrize(
    ("service", "variable"),
    [
        ("worker", "LLORCH_DEVICE_LOCKS"), ("worker", "TRITON_CACHE_DIR"), ("worker", "HF_HOME"),
        ("gateway", "LLORCH_GATEWAY_FILES"), ("flower", "FLOWER_DB"),
    ],
)  # fmt: skip
def test_what_must_outlive_a_container_lies_in_a_volume_of_the_images_user(
    services: Any, service: str, variable: str
) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    of_the_image = dict(re.findall(r"^ENV (\w+)=(\S+)$", dockerfile, re.MULTILINE))
    value = (of_the_image | services[service]["environment"])[variable]
    value = re.sub(r"^\$\{\w+:-(.*)\}$", r"\1", value)
    folder = str(Path(value).parent) if variable == "FLOWER_DB" else value
    mounted = [volume.partition(":")[2] for volume in services[service]["volumes"]]
    assert folder in mounted
    assert re.search(rf"install --directory --owner llorch (--mode \d+ )?{folder}", dockerfile)


def test_every_setting_reaches_its_service(services: Any) -> None:
    settings = {f"LLORCH_{name.upper()}" for name in Settings.model_fields}
    assert set(services["worker"]["environment"]) == settings | TRACES | HUB
    fields = {f"LLORCH_GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields}
    kept = {"LLORCH_RESULT_TTL_S", "LLORCH_STREAM_TTL_S", "LLORCH_LOG_FORMAT"}
    sent = {"LLORCH_PLACEMENT", "LLORCH_GENERATION_CONFIG", "LLORCH_LEASE_S"}
    assert fields | TRACES | kept | sent <= set(services["gateway"]["environment"])
    assert kept <= set(services["exporter"]["environment"])
    flower = services["flower"]["environment"]
    assert {name: str(flower[name]) for name in FLOWER_DEFAULTS} == FLOWER_DEFAULTS


def test_a_worker_is_healthy_while_it_renews_its_file(services: Any, tmp_path: Path) -> None:
    worker = services["worker"]
    file = worker["environment"]["LLORCH_HEALTH_FILE"]
    kind, command = worker["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    assert_tells_age(command.replace("$$", "$"), file, tmp_path)


def test_a_gateway_as_in_the_file_starts_with_a_first_key_and_not_without(
    services: Any, tmp_path: Path
) -> None:
    given = services["gateway"]["environment"]
    fixed = {name: str(value) for name, value in given.items() if value is not None}
    keys, files = tmp_path / "gateway.toml", tmp_path / "files"
    fixed |= {"LLORCH_GATEWAY_KEYS": str(keys), "LLORCH_GATEWAY_FILES": str(files)}
    fixed |= {"LLORCH_GATEWAY_PORT": "0"}
    with own_redis() as server:
        environment = os.environ | fixed | {"LLORCH_REDIS_URL": server.url}
        command = [sys.executable, "-m", "llorch_worker.cli"]

        def run(*arguments: str) -> subprocess.CompletedProcess[str]:
            return subprocess.run(
                [*command, *arguments],
                env=environment,
                cwd=REPOSITORY,
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )

        refused = run("gateway")
        assert refused.returncode == 2
        assert f"the file of keys {keys}" in refused.stderr
        made = run("gateway-key", "alice")
        keys.write_text(made.stdout)
        key = made.stderr.split()[-1]
        with running_gateway(server.url, tmp_path, keys=keys, host="0.0.0.0") as gateway:
            url = gateway.url.replace("0.0.0.0", "127.0.0.1")
            answers = [
                httpx.get(f"{url}/v1/models", headers={"Authorization": f"Bearer {each}"})
                for each in (key, "another")
            ]
    assert [answer.status_code for answer in answers] == [200, 401]


def test_prometheus_finds_every_service_by_its_name_and_port(services: Any) -> None:
    config = yaml.safe_load((REPOSITORY / "deploy/prometheus/prometheus.yml").read_text())
    jobs = {job["job_name"]: job for job in config["scrape_configs"]}
    targets = {
        target
        for job in jobs.values()
        for static in job.get("static_configs", [])
        for target in static["targets"]
    }
    *_, exporter_port = services["exporter"]["command"]
    _, _, gateway_port = services["gateway"]["ports"][0].rpartition(":")
    _, _, flower_port = services["flower"]["ports"][0].rpartition(":")
    assert targets == {
        f"exporter:{exporter_port}", f"gateway:{gateway_port}", f"flower:{flower_port}",
    }  # fmt: skip
    (discovery,) = jobs["llorch-workers"]["http_sd_configs"]
    assert discovery["url"] == f"http://exporter:{exporter_port}/targets"
    assert services["worker"]["environment"]["LLORCH_METRICS_HOST"] == "0.0.0.0"
    (key,) = services["prometheus"]["configs"]
    assert jobs["llorch-gateway"]["authorization"]["credentials_file"] == key["target"]
