"""What holds for every endpoint: health, keys, limits of bodies, the shape of errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.gateway.keys import new_key
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, wait_until


@pytest.fixture
def answer(http: httpx.Client, toy_worker: WorkerProcess) -> httpx.Client:
    return http


def test_a_gateway_without_a_worker_lives_and_is_not_ready(http: httpx.Client) -> None:
    # Runs before any test of this module has started a worker.
    assert http.get("/health").json() == {"status": "ok"}
    refused = http.get("/ready")
    assert (refused.status_code, refused.json()["error"]["llorch_code"]) == (
        503,
        "MODEL_NOT_SERVED",
    )
    assert int(refused.headers["retry-after"]) > 0


def test_without_keys_everyone_on_this_machine_is_an_operator(http: httpx.Client) -> None:
    assert http.get("/console/api/session").json() == {
        "needs_key": False,
        "signed_in": True,
        "name": "",
        "operator": True,
    }
    assert http.get("/console/api/fleet").json()["workers"] == []


def test_models_come_from_the_registry(answer: httpx.Client) -> None:
    assert answer.get("/ready").json() == {"status": "ok", "workers": 1}
    (model,) = answer.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["workers"]) == ("toy", "model", 1)
    assert answer.get("/v1/models/toy").json() == model
    missing = answer.get("/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"


def test_unknown_paths_and_methods_answer_in_the_shape_of_errors(http: httpx.Client) -> None:
    missing = http.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert "/openapi.json" in missing.json()["error"]["message"]
    wrong = http.delete("/v1/models")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (404, "not_found")
    ours = http.delete("/health")
    assert (ours.status_code, ours.json()["error"]["code"]) == (405, "method_not_allowed")


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/v1/nothing"])
def test_head_answers_as_get_without_the_body(http: httpx.Client, path: str) -> None:
    head, get = http.head(path), http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"")
    assert head.headers["content-length"] == get.headers["content-length"]


def test_head_of_a_stream_ends_with_its_header(
    http: httpx.Client, answer: httpx.Client, latch: Latch
) -> None:
    job = http.post("/v1/jobs", json={"prompt": latch.prompt(), "max_tokens": 1}).json()
    head = http.head(f"/v1/jobs/{job['id']}/events")
    assert head.headers["content-type"].startswith("text/event-stream")
    # The connection is free for the next request.
    assert http.get("/health").status_code == 200
    latch.open()


def test_every_answer_has_an_id(http: httpx.Client) -> None:
    ids = [http.get(path).headers["x-request-id"] for path in ("/health", "/v1/nothing") * 2]
    assert len(set(ids)) == 4
    for given, same in (("abc-1", True), ("a b", False), ("x" * 200, False)):
        answer = http.get("/health", headers={"x-request-id": given})
        assert (answer.headers.get_list("x-request-id") == [given]) == same
        assert len(answer.headers.get_list("x-request-id")) == 1


def test_a_body_without_its_content_type_is_told_which_one_it_needs(http: httpx.Client) -> None:
    headers = {"Content-Type": "application/x-www-form-urlencoded"}  # what curl -d sends
    refused = http.post("/v1/chat/completions", content=b'{"model": "toy"}', headers=headers)
    assert refused.status_code == 400
    assert "Content-Type: application/json" in refused.json()["error"]["message"]


def test_no_endpoint_documents_a_422(http: httpx.Client) -> None:
    paths = http.get("/openapi.json").json()["paths"]
    assert not [
        path for path, item in paths.items() for op in item.values() if "422" in op["responses"]
    ]


@pytest.fixture
def keyed(redis_server: RedisServer, tmp_path: Path) -> Iterator[tuple[GatewayProcess, Path, str]]:
    key, entry = new_key("one")
    file = tmp_path / "keys.toml"
    file.write_text(entry)
    with running_gateway(redis_server.url, tmp_path, keys=file) as gateway:
        yield gateway, file, key


def test_keys_are_asked_for_and_revoked_without_a_restart(
    keyed: tuple[GatewayProcess, Path, str],
) -> None:
    gateway, file, key = keyed

    def status(key: str | None) -> int:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return httpx.get(f"{gateway.url}/v1/models", headers=headers).status_code

    assert httpx.get(f"{gateway.url}/health").status_code == 200
    assert [status(None), status("llorch-wrong"), status(key)] == [401, 401, 200]
    second, entry = new_key("two")
    file.write_text(entry)
    wait_until(lambda: status(second) == 200)
    assert status(key) == 401
    file.write_text("not toml")
    assert status(second) == 200
    assert key not in gateway.log.read_text()


def test_a_defect_is_logged_without_the_text_that_it_quotes(
    gateway: GatewayProcess, http: httpx.Client, client: Client
) -> None:
    kept = keys.response("damaged")
    client.redis.set(kept, '{"conversation": "Once upon a time"}', ex=60)
    assert http.get("/v1/responses/resp_damaged").status_code == 500
    wait_until(lambda: "ValidationError" in gateway.log.read_text())
    assert "Once upon" not in gateway.log.read_text()


def test_a_path_forges_no_line_of_the_log(redis_server: RedisServer, tmp_path: Path) -> None:
    with running_gateway(redis_server.url, tmp_path) as gateway:
        assert httpx.get(f"{gateway.url}/a%0Aforged%E2%80%AE%1B?q=secret").status_code == 404
        wait_until(lambda: "forged" in gateway.log.read_text())
        log = gateway.log.read_text()
    assert r'"GET /a\nforged\u202e\x1b HTTP/1.1" 404' in log
    assert not {"\u202e", "\x1b"} & {*log}
    assert "secret" not in log


def test_a_misspelt_setting_is_named_in_the_log(redis_server: RedisServer, tmp_path: Path) -> None:
    with running_gateway(redis_server.url, tmp_path, prot=1) as gateway:
        wait_until(lambda: "did you mean LLORCH_GATEWAY_PORT?" in gateway.log.read_text())
