"""The compose file and the image provide what a deployment needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml", reason="needs PyYAML to read the compose file")

REPOSITORY = Path(__file__).resolve().parents[1]
COMPOSE = REPOSITORY / "docker-compose.yml"


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
    assert redis["command"][1:3] == ["--appendonly", "yes"]
    assert redis["command"][3:5] == ["--maxmemory-policy", "noeviction"]
    assert any(volume.endswith(":/data") for volume in redis["volumes"])
    assert "ping" in redis["healthcheck"]["test"]


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
    assert worker["stop_grace_period"].endswith("m")
    assert worker["depends_on"]["redis"]["condition"] == "service_healthy"


def test_compiled_kernels_outlive_their_container(services: Any) -> None:
    dockerfile = (REPOSITORY / "Dockerfile").read_text()
    kernels = re.search(r"^ENV TRITON_CACHE_DIR=(\S+)$", dockerfile, re.MULTILINE)
    assert kernels is not None
    assert f"kernels:{kernels[1]}" in services["worker"]["volumes"]
    assert f"install --directory --owner llorch {kernels[1]}" in dockerfile


def test_every_setting_reaches_the_worker(services: Any) -> None:
    from llorch_worker.settings import Settings

    settings = {f"LLORCH_{name.upper()}" for name in Settings.model_fields}
    assert set(services["worker"]["environment"]) == settings


def test_the_cpu_worker_differs_only_in_its_device(services: Any) -> None:
    cpu, worker = services["worker-cpu"], services["worker"]
    differing = {key for key in cpu.keys() | worker.keys() if cpu.get(key) != worker.get(key)}
    assert differing == {"deploy", "profiles", "environment"}
    assert cpu["environment"] == worker["environment"] | {"LLORCH_DEVICE": "cpu"}
    assert "deploy" not in cpu
    assert cpu["profiles"], "without a profile it would start beside the other"


def test_flower_requires_a_login(services: Any) -> None:
    login = services["flower"]["environment"]["FLOWER_BASIC_AUTH"]
    assert login.startswith("${FLOWER_BASIC_AUTH:?set FLOWER_BASIC_AUTH to user:password")


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
    assert "USER llorch" in final
    assert "STOPSIGNAL SIGTERM" in final
    assert 'ENTRYPOINT ["llorch"]' in final
