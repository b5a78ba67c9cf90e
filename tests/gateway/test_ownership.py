"""What a key makes over HTTP is that key's, by every route; and deletion deletes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from llorch_worker.broker import keys
from llorch_worker.client import Client
from llorch_worker.gateway.app import create_app
from llorch_worker.gateway.keys import new_key
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.settings import Settings
from tests.gateways import running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess
from tests.waiting import wait_until

NAMES = ("alice", "bob", "operator")
TEXT = "w0 w1 "
LISTS = {"/v1/files", "/v1/batches", "/v1/webhooks/dead", "/v1/usage", "/console/api/jobs"}
"""Each shows what is the caller's."""
HARMLESS = {
    *("/health", "/ready", "/docs", "/openapi.json", "/", "/console/api/session"),
    *("/models", "/v1/models", "/tokenize", "/detokenize", "/tokenizer_info"),
    *("/v1/jobs", "/v1/completions", "/v1/chat/completions", "/v1/responses"),
    *("/v1/embeddings", "/v1/rerank", "/v1/score"),
    *("/v1/messages", "/v1/messages/count_tokens"),
    *("/v1/responses/input_tokens", "/v1/responses/compact"),
}
"""These take no ids, but for ``previous_response_id`` and idempotency keys, and list nothing that a
key made."""


@pytest.fixture(scope="module")
def callers(
    redis_server: RedisServer,
    toy_worker: WorkerProcess,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, httpx.Client]]:
    """A client for each key of one gateway."""
    made = {name: new_key(name) for name in NAMES}
    folder = tmp_path_factory.mktemp("owned")
    file = folder / "keys.toml"
    file.write_text("".join(entry for _, entry in made.values()) + "operator = true\n")
    with running_gateway(
        redis_server.url, folder, keys=file, private_callbacks=True, webhook_give_up_s=0.1
    ) as gateway:
        clients = {
            name: httpx.Client(
                base_url=gateway.url, headers={"Authorization": f"Bearer {key}"}, timeout=60
            )
            for name, (key, _) in made.items()
        }
        yield clients
        for each in clients.values():
            each.close()


def respond(caller: httpx.Client, **fields: Any) -> dict[str, Any]:
    body = {"model": "toy", "input": "x", "max_output_tokens": 2} | fields
    answer = caller.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def job_of(response: dict[str, Any]) -> str:
    return str(response["id"]).removeprefix("resp_")


@pytest.fixture(scope="module")
def ids(callers: dict[str, httpx.Client], client: Client) -> dict[str, str]:
    """The id of one thing of each kind, all of them alice's."""
    alice = callers["alice"]
    body = {"model": "toy", "prompt": "x", "max_tokens": 2}
    job = alice.post("/v1/jobs", json=body | {"callback_url": "http://127.0.0.1:1/"}).json()
    completion = alice.post("/v1/completions", json=body).json()
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    file = alice.post(
        "/v1/files",
        data={"purpose": "batch"},
        files={"file": ("in.jsonl", io.BytesIO(json.dumps(line).encode()))},
    ).json()
    new = {
        "input_file_id": file["id"],
        "endpoint": "/v1/completions",
        "completion_window": "1h",
    }
    batch = alice.post("/v1/batches", json=new).json()
    ended = wait_until(
        lambda: (
            found
            if (found := alice.get(f"/v1/batches/{batch['id']}").json())["status"] == "completed"
            else None
        )
    )
    output = alice.get(f"/v1/files/{ended['output_file_id']}/content").json()
    wait_until(lambda: alice.get("/v1/webhooks/dead").json()["data"], what="a dead webhook")
    return {
        "job": job["id"],
        "completion's job": completion["id"].removeprefix("cmpl-"),
        "response": respond(alice)["id"],
        "background response": respond(alice, background=True)["id"],
        "file": file["id"],
        "batch": batch["id"],
        "output": ended["output_file_id"],
        "line's job": output["response"]["body"]["id"].removeprefix("cmpl-"),
    }


def routes(redis_url: str, folder: Path) -> list[tuple[str, str]]:
    """Every method and path of the application."""
    app = create_app(Settings(redis_url=redis_url), GatewaySettings(files=str(folder)))

    def walk(some: Iterable[Any]) -> Iterator[tuple[str, str]]:
        for route in some:
            if hasattr(route, "effective_candidates"):
                yield from walk(route.effective_candidates())
            else:
                yield from ((method, route.path) for method in route.methods)

    return list(walk(app.routes))


def test_every_route_without_an_id_is_a_list_for_operators_or_gives_nothing_of_others(
    callers: dict[str, httpx.Client],
    ids: dict[str, str],
    redis_server: RedisServer,
    tmp_path: Path,
) -> None:
    assert ids
    for method, path in routes(redis_server.url, tmp_path):
        if "{" in path or path in HARMLESS or (method == "POST" and path in LISTS):
            continue
        answer = callers["bob"].request(
            method, path, json={"ids": list(ids.values()), "model": "toy"}
        )
        if path in LISTS:
            assert answer.json()["jobs" if path.endswith("/jobs") else "data"] == [], path
        else:
            assert answer.status_code == 403, (method, path)


def test_no_route_gives_a_key_what_is_anothers(
    callers: dict[str, httpx.Client],
    ids: dict[str, str],
    redis_server: RedisServer,
    tmp_path: Path,
) -> None:
    alice, bob = callers["alice"], callers["bob"]
    jobs = {name: each.removeprefix("resp_") for name, each in ids.items()}
    everything = {*ids.values(), *jobs.values()}
    asked = 0
    for method, path in routes(redis_server.url, tmp_path):
        if "{" not in path:
            continue
        head, _, tail = path.partition("{")
        for each in everything:
            answer = bob.request(method, head + each + tail.partition("}")[2])
            assert answer.status_code == 404, (method, path, answer.text)
            asked += 1
    assert asked > 80
    refused = bob.post(
        "/v1/responses",
        json={"model": "toy", "input": "x", "previous_response_id": ids["response"]},
    )
    assert refused.status_code == 400
    batch = {"endpoint": "/v1/completions", "completion_window": "1h"}
    for each in (ids["file"], ids["output"]):
        refused = bob.post("/v1/batches", json=batch | {"input_file_id": each})
        assert (refused.status_code, "no such file" in refused.text) == (400, True)
    # Nothing of it has ended or gone.
    for kind, path in (
        ("job", "jobs"),
        ("completion's job", "jobs"),
        ("line's job", "jobs"),
        ("response", "responses"),
        ("file", "files"),
        ("batch", "batches"),
    ):
        for caller in (alice, callers["operator"]):
            answer = caller.get(f"/v1/{path}/{ids[kind]}")
            assert answer.status_code == 200, (kind, answer.text)


def test_a_job_that_no_key_made_is_for_operators(
    callers: dict[str, httpx.Client], client: Client
) -> None:
    job = client.submit(prompt="x", model="toy", max_tokens=2)
    assert callers["operator"].get(f"/v1/jobs/{job.id}").status_code == 200
    assert callers["alice"].get(f"/v1/jobs/{job.id}").status_code == 404


@pytest.mark.parametrize("background", [False, True])
def test_a_deleted_response_leaves_no_text(
    callers: dict[str, httpx.Client], client: Client, background: bool
) -> None:
    alice = callers["alice"]
    made = respond(alice, background=background)
    assert alice.get(f"/v1/jobs/{job_of(made)}").status_code == 200
    assert alice.delete(f"/v1/responses/{made['id']}").status_code == 200
    assert_no_text(callers, client, job_of(made))


def test_a_response_that_is_deleted_while_it_runs_leaves_no_text(
    callers: dict[str, httpx.Client], client: Client, latch: Latch
) -> None:
    made = respond(callers["alice"], input=latch.prompt(), background=True)
    assert callers["alice"].delete(f"/v1/responses/{made['id']}").status_code == 200
    latch.open()
    assert_no_text(callers, client, job_of(made))


def test_a_response_that_is_not_stored_leaves_no_text(
    callers: dict[str, httpx.Client], client: Client
) -> None:
    made = respond(callers["alice"], store=False)
    assert made["output"][0]["content"][0]["text"] == TEXT
    assert_no_text(callers, client, job_of(made))


def test_a_stream_that_is_not_stored_leaves_no_text_when_its_client_hangs_up(
    callers: dict[str, httpx.Client], client: Client, latch: Latch
) -> None:
    body = {"model": "toy", "input": latch.prompt(), "stream": True, "store": False}
    with callers["alice"].stream("POST", "/v1/responses", json=body) as answer:
        seen = ""
        for line in answer.iter_lines():
            seen += line
            if "output_text.delta" in seen:
                break
    (job_id,) = set(re.findall(r"resp_([0-9a-f-]{36})", seen))
    assert client.redis.exists(keys.events(job_id))
    wait_until(
        lambda: not client.redis.exists(keys.result(job_id), keys.events(job_id)),
        what="the text to go",
    )
    assert_no_text(callers, client, job_id)


def test_a_deleted_response_leaves_no_text_in_its_webhook(
    callers: dict[str, httpx.Client], client: Client
) -> None:
    alice = callers["alice"]
    made = respond(alice, background=True, callback_url="http://127.0.0.1:1/")
    webhook = keys.webhook(job_of(made))
    wait_until(lambda: client.redis.hget(webhook, "reason"), what="a dead webhook")
    assert TEXT in client.redis.hget(webhook, "body")
    assert alice.delete(f"/v1/responses/{made['id']}").status_code == 200
    assert not client.redis.exists(webhook)


def test_a_retry_of_a_deleted_response_makes_another(callers: dict[str, httpx.Client]) -> None:
    alice = callers["alice"]
    first = respond(alice, idempotency_key="deleted")
    assert respond(alice, idempotency_key="deleted")["id"] == first["id"]
    assert alice.delete(f"/v1/responses/{first['id']}").status_code == 200
    assert respond(alice, idempotency_key="deleted")["id"] != first["id"]


def test_an_idempotency_key_is_its_callers_alone(callers: dict[str, httpx.Client]) -> None:
    answers = {respond(callers[name], idempotency_key="shared")["id"] for name in NAMES}
    assert len(answers) == len(NAMES)


def assert_no_text(callers: dict[str, httpx.Client], client: Client, job_id: str) -> None:
    for caller in callers.values():
        assert caller.get(f"/v1/jobs/{job_id}").status_code == 404
        assert caller.get(f"/v1/jobs/{job_id}/events").status_code == 404
    assert not client.redis.exists(keys.result(job_id), keys.events(job_id), keys.response(job_id))


def test_a_retry_gets_the_first_answer_whatever_else_holds(
    own_server: RedisServer,
    own_worker: WorkerProcess,
    tmp_path: Path,
) -> None:
    key, entry = new_key("limited")
    file = tmp_path / "keys.toml"
    file.write_text(f"{entry}max_jobs = 1\n")
    headers = {"Authorization": f"Bearer {key}", "Idempotency-Key": "a"}
    body = {"model": "toy", "prompt": "x", "max_tokens": 2}
    with running_gateway(own_server.url, tmp_path, keys=file) as gateway:
        url = f"{gateway.url}/v1/completions"
        first = httpx.post(url, json=body, headers=headers, timeout=60).json()
        with Latch(tmp_path / "latch") as latch:
            # Its only place is taken.
            busy = {"model": "toy", "prompt": latch.prompt(), "max_tokens": 2}
            other = {"Authorization": headers["Authorization"]}
            assert httpx.post(f"{gateway.url}/v1/jobs", json=busy, headers=other).status_code == 202
            again = httpx.post(url, json=body, headers=headers, timeout=60)
            assert (again.status_code, again.json()["choices"]) == (200, first["choices"])
    own_worker.stop()
    with running_gateway(own_server.url, tmp_path, keys=file) as gateway:
        url = f"{gateway.url}/v1/completions"
        assert httpx.post(url, json=body, headers=other, timeout=60).status_code == 503
        again = httpx.post(url, json=body, headers=headers, timeout=60)
        assert (again.status_code, again.json()["choices"]) == (200, first["choices"])
