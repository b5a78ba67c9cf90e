"""What models do and whether they are loaded, and operators who load and unload them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from llorch_worker.gateway.keys import new_key
from tests.gateways import running_gateway
from tests.services import RedisServer, running_worker, wait_until


@pytest.fixture
def operator(own_server: RedisServer, tmp_path: Path) -> Iterator[httpx.Client]:
    """A client with an operator's key, of a gateway over a worker of a, b and c, of which c does
    not load."""
    key, entry = new_key("operator")
    file = tmp_path / "keys.toml"
    file.write_text(f"{entry}operator = true\n")
    (tmp_path / "refused").write_text("c")
    with (
        running_worker(
            own_server.url, tmp_path, models="a.gguf,b.gguf,c.gguf", min_resident_s=0,
            TOY_REFUSES=tmp_path / "refused", TOY_LOADS_SLOWLY_FROM=tmp_path / "slow",
        ),
        running_gateway(own_server.url, tmp_path, keys=file) as gateway,
        httpx.Client(
            base_url=gateway.url, headers={"Authorization": f"Bearer {key}"}, timeout=60
        ) as client,
    ):  # fmt: skip
        yield client


def statuses(client: httpx.Client) -> dict[str, str]:
    return {
        each["id"]: each["status"]["value"] + " failed" * each["status"]["failed"]
        for each in client.get("/models").json()["data"]
    }


def test_an_operator_sees_what_is_loaded_and_changes_it(
    operator: httpx.Client, tmp_path: Path
) -> None:
    def post(what: str, **body: str) -> httpx.Response:
        return operator.post(f"/models/{what}", json=body)

    wait_until(lambda: statuses(operator) == {"a": "loaded", "b": "unloaded", "c": "unloaded"})
    assert operator.get("/v1/models/b").json()["tasks"] == ["llorch.generate"]
    answer = post("load", model="b")
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    worker = answer.json()["worker"]
    wait_until(lambda: statuses(operator) == {"a": "unloaded", "b": "loaded", "c": "unloaded"})
    assert post("unload", model="b", worker=worker).status_code == 200
    wait_until(lambda: set(statuses(operator).values()) == {"unloaded"})
    (tmp_path / "slow").touch()
    assert post("load", model="a").status_code == 200
    wait_until(lambda: statuses(operator)["a"] == "loading")


def test_what_cannot_be_loaded_or_unloaded_is_refused_by_name(operator: httpx.Client) -> None:
    def post(what: str, **body: str) -> tuple[int, str]:
        answer = operator.post(f"/models/{what}", json=body)
        return answer.status_code, answer.json()["error"]["message"]

    assert post("load", model="d") == (404, "no worker serves 'd'; see llorch status")
    assert post("unload", model="b") == (404, "no worker has loaded 'b'; see llorch status")
    assert post("load", model="a", worker="w9")[0] == 404
    assert post("load")[0] == 400
    assert operator.post("/models/load", json={"model": "c"}).status_code == 200
    wait_until(lambda: statuses(operator)["c"] == "unloaded failed")
