"""The manifests of deploy/kubernetes: valid, confined, and what a worker needs."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from llorch_worker import __version__
from llorch_worker.broker import keys
from llorch_worker.broker.queues import LOW_STEP, STEP_SEPARATOR, inbox_of, normal_queue, queues
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.settings import Settings
from llorch_worker.stack.programs import FLOWER_DEFAULTS
from tests.probes import assert_tells_age

yaml = pytest.importorskip("yaml", reason="needs PyYAML")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="needs the extra dev")

MANIFESTS = Path(__file__).resolve().parents[1] / "deploy" / "kubernetes"
Document = dict[str, Any]


def built(folder: Path) -> list[Document]:
    if shutil.which("kubectl") is None:
        pytest.skip("needs kubectl")
    done = subprocess.run(
        ["kubectl", "kustomize", str(folder)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


@pytest.fixture(scope="module")
def documents() -> list[Document]:
    return built(MANIFESTS)


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """With the component ``autoscaling``."""
    folder = tmp_path_factory.mktemp("overlay")
    base = os.path.relpath(MANIFESTS, folder)
    overlay = {"resources": [base], "components": [f"{base}/autoscaling"]}
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    return built(folder)


def named(documents: list[Document], kind: str, name: str) -> Any:
    (found,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found["spec"]


def pod(documents: list[Document], name: str) -> tuple[Any, Any, dict[str, str]]:
    """A deployment's pod, its container, and the variables that are given by value."""
    found = named(documents, "Deployment", name)["template"]["spec"]
    (container,) = found["containers"]
    given = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return found, container, given


def settings(documents: list[Document]) -> dict[str, str]:
    (found,) = [document["data"] for document in documents if document["kind"] == "ConfigMap"]
    return found  # type: ignore[no-any-return]


KEDA_TRIGGERS = {
    "prometheus": {
        "serverAddress", "query", "threshold", "activationThreshold", "ignoreNullValues",
    },
    "redis": {"address", "listName", "listLength", "activationListLength", "databaseIndex"},
}  # fmt: skip
"""The metadata that KEDA 2 documents, as far as we use its triggers; all of them are strings."""


def autoscaler(scaled_object: Document) -> Document:
    """The HorizontalPodAutoscaler that KEDA makes of it, without its metrics."""
    spec = scaled_object["spec"]
    return {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": scaled_object["metadata"],
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment"}
            | spec["scaleTargetRef"],
            "maxReplicas": spec["maxReplicaCount"],
            "behavior": spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"],
        },
    }


def test_every_document_is_valid(documents: list[Document], scaled: list[Document]) -> None:
    assert len(documents) > 15
    for document in [*documents, *(each for each in scaled if each not in documents)]:
        match document["kind"]:
            case "ScaledObject":
                for trigger in document["spec"]["triggers"]:
                    assert set(trigger["metadata"]) <= KEDA_TRIGGERS[trigger["type"]]
                    assert all(isinstance(value, str) for value in trigger["metadata"].values())
                document = autoscaler(document)
            case "TriggerAuthentication":
                continue
            case "Deployment" if document["metadata"]["name"] != "redis":
                (container,) = document["spec"]["template"]["spec"]["containers"]
                assert container["image"] == f"llorch-worker:{__version__}"
        kubernetes_validate.validate(document, "1.37", strict=True)


def test_a_worker_has_the_time_to_drain(documents: list[Document]) -> None:
    found, _, _ = pod(documents, "worker")
    drain_s = float(settings(documents)["LLORCH_DRAIN_S"])
    assert found["terminationGracePeriodSeconds"] >= drain_s + 30


def test_a_worker_is_probed_by_the_age_of_its_file(
    documents: list[Document], tmp_path: Path
) -> None:
    _, container, given = pod(documents, "worker")
    file = given["LLORCH_HEALTH_FILE"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        *_, command = container[probe]["exec"]["command"]
        assert_tells_age(command, file, tmp_path)
    start = container["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] >= 3600


def test_what_a_pod_writes_lies_in_volumes(documents: list[Document]) -> None:
    for name, variables in (
        ("worker", ["HOME", "LLORCH_HEALTH_FILE"]),
        ("gateway", ["HOME", "LLORCH_GATEWAY_FILES"]),
        ("flower", ["HOME", "FLOWER_DB"]),
    ):
        _, container, given = pod(documents, name)
        writable = [v["mountPath"] for v in container["volumeMounts"] if not v.get("readOnly")]
        for variable in variables:
            assert any(Path(given[variable]).is_relative_to(folder) for folder in writable)
        assert "/tmp" in writable
    _, worker, _ = pod(documents, "worker")
    image = (MANIFESTS.parents[1] / "Dockerfile").read_text()
    folders = re.findall(r"^ENV (?:TRITON_CACHE_DIR|HF_HOME)=(.*)$", image, re.MULTILINE)
    assert len(folders) == 2
    assert {*folders} <= {v["mountPath"] for v in worker["volumeMounts"] if not v.get("readOnly")}


def test_only_settings_that_exist_are_set(documents: list[Document]) -> None:
    known = {f"LLORCH_{name.upper()}" for name in Settings.model_fields}
    known |= {f"LLORCH_GATEWAY_{name.upper()}" for name in GatewaySettings.model_fields}
    given = set(settings(documents))
    for name in ("worker", "gateway"):
        given |= {v for v in pod(documents, name)[2] if v.startswith("LLORCH_")}
    assert given <= known
    _, _, flower = pod(documents, "flower")
    assert {name: flower[name] for name in FLOWER_DEFAULTS} == FLOWER_DEFAULTS


def test_a_server_beside_the_worker_has_its_gpu(tmp_path: Path) -> None:
    base = os.path.relpath(MANIFESTS, tmp_path)
    overlay = {"resources": [base], "components": [f"{base}/server"]}
    (tmp_path / "kustomization.yaml").write_text(yaml.safe_dump(overlay))
    documents = built(tmp_path)
    for document in documents:
        kubernetes_validate.validate(document, "1.37", strict=True)
    whole, worker, given = pod(documents, "worker")
    (server,) = whole["initContainers"]
    assert server["restartPolicy"] == "Always", "what makes it a sidecar"
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "nvidia.com/gpu" not in worker["resources"]["limits"]
    arguments = dict(each.removeprefix("--").split("=") for each in server["args"][1:])
    assert given["LLORCH_ENGINE_URL"] == f"http://{arguments['host']}:{arguments['port']}/v1"
    assert given["LLORCH_MAX_SEQUENCES"] == arguments["max-num-seqs"]


def test_a_second_model_has_pods_of_its_own_and_the_same_ways(tmp_path: Path) -> None:
    folder = shutil.copytree(MANIFESTS, tmp_path / "deploy" / "kubernetes")
    text = (MANIFESTS.parents[1] / "docs" / "DEPLOYING.md").read_text()
    (command,) = [part for part in text.split("```") if "worker-13b.yaml" in part]
    subprocess.run(["sh", "-ec", command.removeprefix("sh\n")], cwd=tmp_path, check=True)
    kustomization = folder / "kustomization.yaml"
    listed = kustomization.read_text()
    kustomization.write_text(
        listed.replace("  - worker.yaml\n", "  - worker.yaml\n  - worker-13b.yaml\n")
    )
    both = built(folder)
    templates = {}
    for name, model in (("worker", "llama-2-7b"), ("worker-13b", "llama-2-13b")):
        deployment = named(both, "Deployment", name)
        templates[name] = deployment["template"]["metadata"]["labels"]
        wanted = deployment["selector"]["matchLabels"]
        assert wanted == named(both, "PodDisruptionBudget", name)["selector"]["matchLabels"]
        assert wanted == {"app.kubernetes.io/name": "worker", "llorch-model": model}
        assert wanted.items() <= templates[name].items()
    assert pod(both, "worker-13b")[2].items() >= {
        "LLORCH_MODEL": "/models/llama-2-13b.Q8_0.gguf", "LLORCH_MODEL_NAME": "llama-2-13b"
    }.items()  # fmt: skip
    # The policies select pods by this label alone.
    (of_both,) = {labels["app.kubernetes.io/name"] for labels in templates.values()}
    assert of_both in str(named(both, "NetworkPolicy", "to-redis")["podSelector"])
    for document in both:
        kubernetes_validate.validate(document, "1.37", strict=True)
    kustomization.write_text(kustomization.read_text() + "components:\n  - autoscaling\n")
    both = built(folder)
    for name in templates:
        assert "replicas" not in named(both, "Deployment", name), "its number is KEDA's"


def test_a_managed_redis_is_named_in_all_files_that_have_its_address() -> None:
    first_lines, _, _ = (MANIFESTS / "redis.yaml").read_text().partition("apiVersion")
    users = {
        path.name
        for path in MANIFESTS.glob("*.yaml")
        if "name: LLORCH_REDIS_URL" in path.read_text()
    }
    assert len(users) == 4
    assert {name for name in users if name in first_lines} == users


def test_workers_scale_by_saturation_and_from_none_by_the_lists_of_their_model(
    scaled: list[Document],
) -> None:
    assert "replicas" not in named(scaled, "Deployment", "worker")
    spec = named(scaled, "ScaledObject", "worker")
    assert spec["scaleTargetRef"]["name"] == "worker"
    assert spec["minReplicaCount"] == 0
    model = settings(scaled)["LLORCH_MODEL_NAME"]
    saturation, *lists = spec["triggers"]
    query = f'max(llorch_fleet_saturation{{model_name="{model}"}})'
    assert saturation["metadata"]["query"] == query
    assert saturation["metricType"] == "Value"
    watched = [each["metadata"]["listName"] for each in lists]
    low = f"{normal_queue(model)}{STEP_SEPARATOR}{LOW_STEP}"
    assert watched == [keys.waiting(model), *queues(model), low]
    assert set(watched[1:]) <= set(inbox_of(model))
