"""The compose file and the image provide what a deployment needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

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


def compose_command() -> list[str] | None:
    for command in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(command[0]) is None:
            continue
        probe = subprocess.run([*command, "version"], capture_output=True, check=False)
        if probe.returncode == 0:
            return command
    return None


@pytest.fixture(scope="module")
def services() -> Any:
    return yaml.safe_load(COMPOSE.read_text())["services"]


def test_redis_keeps_its_data_and_has_a_health_check(services: Any) -> None:
    redis = services["redis"]
    given = dict(zip(redis["command"][1::2], redis["command"][2::2], strict=True))
    assert given["--appendonly"] == "yes"
    assert given["--maxmemory-policy"] == "noeviction"
    # Otherwise the alert on Redis' memory never fires; rewriting its file takes as much again.
    assert given["--maxmemory"] == "${LLORCH_REDIS_MAXMEMORY:-1gb}"
    assert redis["mem_limit"] == "${LLORCH_REDIS_MEMORY:-2g}"
    assert any(volume.endswith(":/data") for volume in redis["volumes"])
    assert redis["healthcheck"]["test"][1] == "redis-cli ping | grep -q PONG"


def test_every_service_has_a_health_check_and_a_memory_limit(services: Any) -> None:
    for name, service in services.items():
        assert service["healthcheck"]["test"], name
        assert service["mem_limit"], name


def test_redis_without_a_password_listens_on_localhost_only(services: Any) -> None:
    assert all(port.startswith("127.0.0.1:") for port in services["redis"]["ports"])


def test_each_replica_claims_one_of_all_gpus_and_has_time_to_drain(services: Any) -> None:
    worker = services["worker"]
    (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
    assert (device["driver"], device["count"], device["capabilities"]) == ("nvidia", "all", ["gpu"])
    assert worker["environment"]["LLORCH_DEVICE"] == "${LLORCH_DEVICE:-cuda}"
    # All replicas share the locks, in a folder that the image makes for its user.
    locks = worker["environment"]["LLORCH_DEVICE_LOCKS"]
    assert f"device-locks:{locks}" in worker["volumes"]
    made = f"install --directory --owner llorch --mode 1777 {locks}"
    assert made in (REPOSITORY / "Dockerfile").read_text()
    assert "container_name" not in worker
    assert worker["restart"] == "unless-stopped"
    assert worker["stop_signal"] == "SIGTERM"
    drain_min = Settings.model_fields["drain_s"].default / 60
    assert int(worker["stop_grace_period"].removesuffix("m")) > drain_min
    assert worker["depends_on"]["redis"]["condition"] == "service_healthy"


def test_compiled_kernels_outlive_their_container(services: Any) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    kernels = re.search(r"^ENV TRITON_CACHE_DIR=(\S+)$", dockerfile, re.MULTILINE)
    assert kernels is not None
    assert f"kernels:{kernels[1]}" in services["worker"]["volumes"]
    assert f"install --directory --owner llorch {kernels[1]}" in dockerfile


def test_the_image_holds_the_kernels_for_every_processor_in_no_volume(services: Any) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    made = re.search(
        r"^ENV XDG_CACHE_HOME=(\S+)\nRUN python -m llorch_worker.kernels.native &&",
        dockerfile,
        re.MULTILINE,
    )
    assert made is not None
    mounted = [volume.split(":")[1] for volume in services["worker"]["volumes"]]
    assert not [folder for folder in mounted if made[1].startswith(folder)]


def test_every_setting_reaches_the_worker(services: Any) -> None:
    settings = {f"LLORCH_{name.upper()}" for name in Settings.model_fields}
    assert set(services["worker"]["environment"]) == settings | TRACES


def test_the_cpu_worker_differs_only_in_its_device(services: Any) -> None:
    cpu, worker = services["worker-cpu"], services["worker"]
    differing = {key for key in cpu.keys() | worker.keys() if cpu.get(key) != worker.get(key)}
    assert differing == {"deploy", "profiles", "environment"}
    assert cpu["environment"] == worker["environment"] | {"LLORCH_DEVICE": "cpu"}
    assert "deploy" not in cpu
    assert cpu["profiles"], "without a profile it would start beside the other"


def test_flower_requires_a_login_and_shows_jobs_as_llorch_up_does(services: Any) -> None:
    given = services["flower"]["environment"]
    login = given["FLOWER_BASIC_AUTH"]
    assert login.startswith("${FLOWER_BASIC_AUTH:?set FLOWER_BASIC_AUTH to user:password")
    assert {name: str(given[name]) for name in FLOWER_DEFAULTS} == FLOWER_DEFAULTS


def test_flower_keeps_its_tasks_in_a_volume(services: Any) -> None:
    flower = services["flower"]
    assert flower["environment"]["FLOWER_PERSISTENT"] == "true"
    folder = str(Path(flower["environment"]["FLOWER_DB"]).parent)
    assert f"flower:{folder}" in flower["volumes"]
    assert f"install --directory --owner llorch {folder}" in (REPOSITORY / "Dockerfile").read_text()


def test_a_worker_is_healthy_while_it_renews_its_file(services: Any, tmp_path: Path) -> None:
    worker = services["worker"]
    file = worker["environment"]["LLORCH_HEALTH_FILE"]
    kind, command = worker["healthcheck"]["test"]
    assert kind == "CMD-SHELL"
    assert_tells_age(command.replace("$$", "$"), file, tmp_path)


def test_the_gateway_listens_beyond_the_machine_and_only_with_keys(services: Any) -> None:
    gateway = services["gateway"]
    environment = gateway["environment"]
    assert environment["LLORCH_GATEWAY_HOST"] == "0.0.0.0"
    assert gateway["ports"] == ["${LLORCH_GATEWAY_PORT:-8080}:8080"]
    folder = str(Path(environment["LLORCH_GATEWAY_KEYS"]).parent)
    assert f"${{LLORCH_KEYS_DIR:-./keys}}:{folder}:ro" in gateway["volumes"]
    assert gateway["depends_on"]["redis"]["condition"] == "service_healthy"
    assert "/health" in gateway["healthcheck"]["test"][-1]


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


def test_every_setting_reaches_the_gateway_and_its_files_are_kept(services: Any) -> None:
    from llorch_worker.gateway.settings import GatewaySettings

    gateway = services["gateway"]
    fields = {f"LLORCH_GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields}
    assert fields | TRACES <= set(gateway["environment"])
    folder = "/var/lib/llorch/files"
    assert gateway["environment"]["LLORCH_GATEWAY_FILES"] == f"${{LLORCH_GATEWAY_FILES:-{folder}}}"
    assert f"files:{folder}" in gateway["volumes"]
    assert f"install --directory --owner llorch {folder}" in (REPOSITORY / "Dockerfile").read_text()


def test_monitoring_starts_only_when_asked_for_and_listens_on_localhost_only(services: Any) -> None:
    monitoring = {"exporter", "prometheus", "grafana"}
    profiles = {name: service.get("profiles") for name, service in services.items()}
    assert {name for name, profile in profiles.items() if profile == ["monitoring"]} == monitoring
    published = [port for name in monitoring for port in services[name].get("ports", [])]
    assert len(published) == 2
    assert all(port.startswith("127.0.0.1:") for port in published)


def test_monitoring_runs_versions_that_are_named(services: Any) -> None:
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+$", services[name]["image"])
    assert services["exporter"]["image"] == services["worker"]["image"]


def test_grafana_lets_everyone_look_and_nobody_log_in(services: Any) -> None:
    given = services["grafana"]["environment"]
    assert given["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert given["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert given["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"


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


@pytest.mark.skipif(compose_command() is None, reason="needs a docker compose client")
@pytest.mark.parametrize("login", ["admin:secret", None])
def test_the_client_accepts_the_file_only_with_a_login(login: str | None) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "FLOWER_BASIC_AUTH"}
    if login is not None:
        environment["FLOWER_BASIC_AUTH"] = login
    command = compose_command()
    assert command is not None
    done = subprocess.run(
        [*command, "--file", COMPOSE, "config", "--quiet"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert (done.returncode == 0) == (login is not None), done.stderr
    if login is None:
        assert "set FLOWER_BASIC_AUTH to user:password" in done.stderr


def test_the_image_runs_as_a_plain_user_and_is_stopped_by_sigterm() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    final = lines[max(i for i, line in enumerate(lines) if line.startswith("FROM")) :]
    assert "USER 10001" in final
    assert any("[worker,gateway,flower,metrics,otel]" in line for line in final)
    assert "STOPSIGNAL SIGTERM" in final
    assert 'ENTRYPOINT ["tini", "--", "llorch"]' in final
