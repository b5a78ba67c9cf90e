"""``llorch doctor``: a verdict and a remedy for each thing that a job needs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from llorch_worker.broker.connections.connection import connect
from tests.cli.command import Ran, Served, run
from tests.servers.stand_in import StandIn
from tests.services import free_node_port, free_port, own_redis


def by_subject(ran: Ran) -> dict[str, Any]:
    return {check["subject"]: check for check in ran.json["checks"]}


@pytest.fixture
def careless_redis() -> Iterator[str]:
    """A Redis that evicts keys when it is full."""
    with own_redis() as server, connect(server.url) as client:
        client.config_set("maxmemory", "100mb")
        client.config_set("maxmemory-policy", "allkeys-lru")
        yield server.url


def test_a_healthy_machine_passes(served: Served, demo_model: Path) -> None:
    ran = run("doctor", "--redis", served.redis_url, "--model", demo_model, "--json", fresh=True)
    assert (ran.code, ran.json["ok"]) == (0, True), ran
    found = by_subject(ran)
    for subject in ("python", "redis", "memory", "torch", "device", "model", "fit", "workers"):
        assert found[subject]["verdict"] == "ok", found[subject]
    assert found["kernels"]["finding"].startswith("torch for float32")
    assert found["storage"]["verdict"] == "warn", "this Redis keeps nothing"
    remedy = f"redis-cli -u {served.redis_url} config set appendonly yes"
    assert found["storage"]["remedy"] == remedy


def test_a_redis_in_cluster_mode_fails() -> None:
    with own_redis(options=("--cluster-enabled", "yes"), port=free_node_port()) as server:
        found = by_subject(run("doctor", "--redis", server.url, "--json"))
    assert found["redis"]["verdict"] == "fail"
    assert found["redis"]["finding"] == f"{server.url} is in cluster mode"
    assert found["redis"]["remedy"].startswith("use a Redis with cluster mode disabled")


def test_failed_checks_have_a_remedy(careless_redis: str) -> None:
    arguments = ("--model", "/nowhere.gguf", "--device", "cuda:77", "--json")
    ran = run("doctor", "--redis", careless_redis, *arguments)
    assert (ran.code, ran.json["ok"]) == (1, False), ran
    found = by_subject(ran)
    for subject in ("memory", "model", "device"):
        assert found[subject]["verdict"] == "fail"
        assert found[subject]["remedy"]
    assert found["workers"]["verdict"] == "warn"


def test_a_given_redis_that_does_not_answer_fails() -> None:
    ran = run("doctor", "--redis", "redis://127.0.0.1:1/0", "--model", "demo")
    assert ran.code == 1, ran
    assert "No Redis at redis://127.0.0.1:1/0" in ran.out.replace("\n            ", " ")
    assert "1 failed" in ran.out


def test_a_wrong_database_fails_with_the_right_remedy(redis_url: str) -> None:
    ran = run("doctor", "--redis", f"{redis_url.removesuffix('0')}99", "--json")
    redis = by_subject(ran)["redis"]
    assert (ran.code, redis["verdict"]) == (1, "fail")
    assert redis["finding"].endswith("refuses: DB index is out of range")
    assert redis["remedy"].startswith("correct the URL")


def test_a_job_in_a_queue_that_no_worker_reads_is_a_warning_with_the_right_queue(
    served: Served,
) -> None:
    app = Celery(broker=served.redis_url)
    app.send_task("llorch.generate", kwargs={"prompt": "Once"}, queue=served.model)
    try:
        checks = run("doctor", "--redis", served.redis_url, "--json").json["checks"]
    finally:
        with connect(served.redis_url) as client:
            client.delete(served.model)
    assert {
        "subject": "queues",
        "verdict": "warn",
        "finding": f"1 job in {served.model!r}, which no worker serves",
        "remedy": f'its producer should say queue="llorch.{served.model}"',
    } in checks


def test_a_variable_that_is_no_setting_is_a_warning(redis_url: str) -> None:
    variables = {"LLORCH_MAX_SEQUENCE": "4", "LLORCH_GATEWAY_PROT": "80"}
    ran = run("doctor", "--redis", redis_url, "--model", "demo", "--json", **variables)
    found = [check for check in ran.json["checks"] if check["subject"] == "settings"]
    assert [(check["verdict"], check["remedy"]) for check in found] == [
        ("warn", "did you mean LLORCH_GATEWAY_PORT?"),
        ("warn", "did you mean LLORCH_MAX_SEQUENCES?"),
    ]


def test_each_model_of_a_worker_is_checked(redis_url: str, demo_model: Path) -> None:
    with StandIn("vLLM").running() as server:
        models = [str(demo_model), "/nowhere.gguf", f"{server.url}=toy", f"{server.url}=other"]
        away = f"http://127.0.0.1:{free_port()}/v1=toy2"
        ran = run("doctor", "--redis", redis_url, "--json", LLORCH_MODELS=",".join([*models, away]))
        # As a worker's, the option is in place of the variable.
        alone = run(
            *("doctor", "--redis", redis_url, "--model", demo_model, "--json"),
            LLORCH_MODELS="/nowhere.gguf",
        )
    assert (ran.code, alone.code) == (1, 0), (ran, alone)
    found = [check for check in ran.json["checks"] if check["subject"] == "model"]
    assert [check["verdict"] for check in found] == ["ok", "fail", "ok", "fail", "fail"]
    assert found[2]["finding"] == f"toy: vLLM at {server.url} serves it"
    assert "serves toy, and not other" in found[3]["finding"]
    assert found[4]["remedy"].startswith("start the server")


def test_a_context_beyond_the_models_own_fails(redis_url: str) -> None:
    ran = run(
        "doctor", "--redis", redis_url, "--model", "demo", "--json", LLORCH_MAX_CONTEXT="9999"
    )
    assert ran.code == 1, ran
    found = by_subject(ran)["model"]
    assert found["finding"].startswith("max_context must be at most 512")
    assert found["remedy"].startswith("lower LLORCH_MAX_CONTEXT")
