"""``/v1/completions`` as it is on the wire: streams, errors, clients that hang up, keys."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import Client
from llorch_worker.gateway.keys import new_key
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, running_worker, wait_until
from tests.store import held_ids, job_ids, stored_result

PATH = "/v1/completions"
CONTEXT = 4096


@pytest.fixture
def toy(http: httpx.Client, toy_worker: WorkerProcess) -> httpx.Client:
    """The gateway over the toy engine, whose token ``i`` is ``w<i> ``."""
    return http


def documents(answer: httpx.Response) -> Iterator[Any]:
    """The data of the server-sent events, as they come; [DONE] as a string."""
    for line in answer.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@contextmanager
def streamed(http: httpx.Client, **fields: Any) -> Iterator[Iterator[Any]]:
    """The documents of a stream; leaving the context hangs up."""
    with http.stream("POST", PATH, json={"prompt": "x", "stream": True, **fields}) as answer:
        assert answer.status_code == 200, answer.read()
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield documents(answer)


def all_of(http: httpx.Client, **fields: Any) -> list[Any]:
    with streamed(http, **fields) as found:
        return list(found)


def texts(chunks: list[Any]) -> dict[int, str]:
    """The whole text of each choice."""
    found: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def test_an_answer_has_the_shape_of_openai(toy: httpx.Client) -> None:
    answer = toy.post(PATH, json={"model": "toy", "prompt": "x", "max_tokens": 2}).json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 0
    assert answer.pop("system_fingerprint").startswith("fp_")
    assert answer == {
        "object": "text_completion",
        "model": "toy",
        "choices": [{"text": "w0 w1 ", "index": 0, "logprobs": None, "finish_reason": "length"}],
        "usage": {
            "prompt_tokens": 1,
            "completion_tokens": 2,
            "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {
                "reasoning_tokens": 0,
                "accepted_prediction_tokens": 0,
            },
        },
    }


def test_a_stream_ends_with_a_reason_and_done(toy: httpx.Client) -> None:
    *chunks, last, done = all_of(toy, max_tokens=20)
    assert done == "[DONE]"
    assert texts(chunks) == {0: "".join(f"w{i} " for i in range(20))}
    assert last["choices"] == [
        {"text": "", "index": 0, "logprobs": None, "finish_reason": "length"}
    ]
    same = {(c["id"], c["created"], c["model"], c["object"]) for c in [*chunks, last]}
    assert len(same) == 1
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert all("usage" not in chunk for chunk in chunks)


def test_several_prompts_are_streamed_side_by_side(toy: httpx.Client, latch: Latch) -> None:
    with streamed(toy, prompt=[latch.prompt(), "x"], max_tokens=3) as found:
        # The second ends although the first waits.
        seen = []
        for chunk in found:
            seen.append(chunk)
            if chunk["choices"][0]["index"] == 1 and chunk["choices"][0]["finish_reason"]:
                break
        assert texts(seen)[1] == "w0 w1 w2 "
        latch.open()
        seen += [chunk for chunk in found if chunk != "[DONE]"]
    assert texts(seen)[0] == "w0 w1 w2 "


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_puts_the_prompt_first(toy: httpx.Client, stream: bool) -> None:
    fields = {"prompt": ["a ", "b "], "echo": True, "max_tokens": 1}
    if stream:
        assert texts(all_of(toy, **fields)[:-1]) == {0: "a w0 ", 1: "b w0 "}
    else:
        choices = toy.post(PATH, json=fields).json()["choices"]
        assert [choice["text"] for choice in choices] == ["a w0 ", "b w0 "]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "x", "guided_json": {}}, "guided_json"),
        ({"prompt": [7] * CONTEXT, "max_tokens": 1}, "prompt"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_names_the_field(
    toy: httpx.Client, fields: dict[str, Any], param: str, stream: bool
) -> None:
    refused = toy.post(PATH, json={**fields, "stream": stream})
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True])
def test_what_nobody_knows_is_ignored_and_named_in_a_header(
    toy: httpx.Client, stream: bool
) -> None:
    body = {"prompt": "x", "max_tokens": 1, "stream": stream, "user": "u"}
    answer = toy.post(PATH, json={**body, "warmth": 1, " ü\n,": "x", "none": None})
    assert answer.status_code == 200
    assert answer.headers["x-llorch-ignored"] == r'warmth, " \u00fc\\n,"'
    assert "x-llorch-ignored" not in toy.post(PATH, json=body).headers


def test_more_tokens_than_the_context_holds_are_cut(
    redis_server: RedisServer, http: httpx.Client, tmp_path: Path
) -> None:
    asked = {"model": "small", "prompt": "x", "max_tokens": 10**6}
    with running_worker(
        redis_server.url, tmp_path, name="small", model_name="small", max_context=64
    ):
        answer = http.post(PATH, json=asked).json()
        assert answer["usage"]["completion_tokens"] == 63
        assert answer["choices"][0]["finish_reason"] == "length"
        # Those of a job are not.
        job = http.post("/v1/jobs", json=asked)
    assert job.json()["error"]["llorch_code"] == "CONTEXT_LENGTH_EXCEEDED"


def test_a_gateway_may_bound_answers(
    toy: httpx.Client, redis_server: RedisServer, tmp_path: Path
) -> None:
    with running_gateway(redis_server.url, tmp_path, max_tokens=3) as gateway:

        def tokens(path: str, **fields: Any) -> int:
            answer = httpx.post(f"{gateway.url}{path}", json=fields).json()
            return int(answer["usage"]["completion_tokens"])

        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert tokens("/v1/chat/completions", **chat) == 3
        assert tokens(PATH, prompt="x", max_tokens=10) == 3
        assert tokens(PATH, prompt="x", max_tokens=2) == 2
        job = httpx.post(f"{gateway.url}/v1/jobs", json={"prompt": "x", "max_tokens": 10}).json()
        ended = toy.get(f"/v1/jobs/{job['id']}/events").text
        assert '"completion":10' in ended.replace(" ", ""), "what a job names is not cut"


def test_an_answer_without_a_maximum_gets_the_gateways_and_a_given_one_stands(
    toy: httpx.Client, redis_server: RedisServer, tmp_path: Path
) -> None:
    with running_gateway(redis_server.url, tmp_path, default_max_tokens=20) as gateway:

        def tokens(path: str, **fields: Any) -> int:
            body = {"model": "toy", **fields}
            answer = httpx.post(f"{gateway.url}{path}", json=body).json()
            usage = answer["usage"]
            return int(usage.get("completion_tokens") or usage["output_tokens"])

        chat = {"messages": [{"role": "user", "content": "x"}]}
        assert tokens("/v1/chat/completions", **chat) == 20
        assert tokens("/v1/chat/completions", **chat, max_tokens=None) == 20
        assert tokens("/v1/chat/completions", **chat, min_tokens=25) == 25
        assert tokens("/v1/chat/completions", **chat, max_tokens=30) == 30
        assert tokens("/v1/responses", input="x") == 20
        assert tokens(PATH, prompt="x") == 16, "OpenAI's"
        job = httpx.post(f"{gateway.url}/v1/jobs", json={"prompt": "x"}).json()
        ended = toy.get(f"/v1/jobs/{job['id']}/events").text
        assert '"completion":256' in ended.replace(" ", ""), "the contract's"


@pytest.mark.parametrize(
    ("path", "body", "right"),
    [
        ("/v1/completions", {"prompt": "x", "max_tokns": 3}, "max_tokens"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "temprature": 0},
            "temperature",
        ),
        ("/v1/responses", {"input": "x", "max_output_tokesn": 3}, "max_output_tokens"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "temprature": 0},
            "temperature",
        ),
        ("/v1/jobs", {"prompt": "x", "max_tokns": 3}, "max_tokens"),
        ("/tokenize", {"prompt": "x", "add_special_token": False}, "add_special_tokens"),
    ],
)
def test_a_slip_is_a_400_that_says_what_was_meant(
    toy: httpx.Client, path: str, body: dict[str, Any], right: str
) -> None:
    answer = toy.post(path, json={"model": "toy", **body})
    assert answer.status_code == 400
    assert f"did you mean {right}?" in answer.json()["error"]["message"]


def test_a_gateway_may_refuse_what_nobody_knows(
    toy: httpx.Client, redis_server: RedisServer, tmp_path: Path
) -> None:
    with running_gateway(redis_server.url, tmp_path, unknown_fields="refuse") as gateway:
        answer = httpx.post(f"{gateway.url}{PATH}", json={"prompt": "x", "warmth": 1})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "warmth")
        body = {"prompt": "x", "max_tokens": 1, "user": "u"}
        assert httpx.post(f"{gateway.url}{PATH}", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_job_that_fails_before_its_first_token_is_a_status(
    toy: httpx.Client, stream: bool
) -> None:
    failed = toy.post(PATH, json={"prompt": "raise ValueError", "stream": stream})
    assert (failed.status_code, failed.json()["error"]["llorch_code"]) == (500, "INTERNAL")


def test_a_job_that_ends_early_ends_its_stream_with_an_error(
    toy: httpx.Client, client: Client, latch: Latch
) -> None:
    with streamed(toy, prompt=latch.prompt()) as found:
        first = next(found)
        client.job(first["id"].removeprefix("cmpl-")).cancel()
        rest = list(found)
    assert [document["error"]["llorch_code"] for document in rest] == ["CANCELLED"]


@pytest.mark.parametrize("prompts", [1, 3])
def test_a_client_that_hangs_up_cancels_its_stream(
    toy: httpx.Client, latch: Latch, gateway: GatewayProcess, prompts: int
) -> None:
    with streamed(toy, prompt=[latch.prompt()] * prompts) as found:
        next(found)
    latch.wait_ended(prompts)
    wait_until(lambda: "499: the client of /v1/completions hung up" in gateway.log.read_text())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_before_the_first_token_cancels_too(
    toy: httpx.Client, redis_server: RedisServer, latch: Latch, stream: bool
) -> None:
    body = {"prompt": latch.prompt(after=0), "stream": stream}
    request = toy.build_request("POST", PATH, json=body)
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with connect(redis_server.url) as store:
        before = job_ids(store)
        with socket.create_connection((request.url.host, request.url.port)) as connection:
            connection.sendall(f"POST {PATH} HTTP/1.1\r\n{head}\r\n".encode() + request.read())
            # A worker has it.
            wait_until(lambda: held_ids(store) - before)
        wait_until_cancelled(store, before)


def wait_until_cancelled(store: redis.Redis, before: set[str]) -> None:
    """For the one job that is not in ``before``. It may end before an engine has it."""
    (job_id,) = job_ids(store) - before
    wait_until(lambda: '"REVOKED"' in (stored_result(store, job_id) or ""))


@pytest.mark.parametrize("stream", [False, True])
def test_a_job_whose_prompt_ids_cannot_be_told_is_cancelled(
    toy: httpx.Client, redis_server: RedisServer, latch: Latch, stream: bool
) -> None:
    body = {"prompt": latch.prompt(), "return_token_ids": True, "stream": stream}
    with connect(redis_server.url) as store:
        before = job_ids(store)
        store.set(keys.token_questions("toy"), "no list")
        try:
            assert toy.post(PATH, json=body).is_error
        finally:
            store.delete(keys.token_questions("toy"))
        wait_until_cancelled(store, before)


def test_a_request_with_a_key_outlives_its_client(
    toy: httpx.Client, latch: Latch, gateway: GatewayProcess
) -> None:
    body = {"prompt": latch.prompt(), "max_tokens": 5, "stream": True}
    headers = {"Idempotency-Key": "again"}
    with toy.stream("POST", PATH, json=body, headers=headers) as answer:
        first = next(documents(answer))
    assert latch.ended() == 0
    latch.open()
    second = toy.post(PATH, json={**body, "stream": False}, headers=headers).json()
    assert (second["id"], second["choices"][0]["text"]) == (first["id"], "w0 w1 w2 w3 w4 ")
    *chunks, done = all_of(toy, **body, idempotency_key="again")
    assert (texts(chunks)[0], done) == ("w0 w1 w2 w3 w4 ", "[DONE]")
    assert latch.ended() == 1


def test_an_answer_is_told_again_when_its_stream_has_expired(
    toy: httpx.Client, redis_server: RedisServer
) -> None:
    body = {"max_tokens": 3, "idempotency_key": "late"}
    first = all_of(toy, **body)
    with connect(redis_server.url) as store:
        (events,) = store.keys(f"*{first[0]['id'].removeprefix('cmpl-')}:events")
        store.delete(events)
    again = all_of(toy, **body)
    assert texts(again[:-1]) == texts(first[:-1]) == {0: "w0 w1 w2 "}
    assert again[0]["model"] == "toy"


@pytest.fixture
def caller(
    redis_server: RedisServer, toy_worker: WorkerProcess, tmp_path: Path
) -> Iterator[httpx.Client]:
    """One who may have one job in flight."""
    key, entry = new_key("one")
    file = tmp_path / "keys.toml"
    file.write_text(f"{entry}max_jobs = 1\n")
    headers = {"Authorization": f"Bearer {key}"}
    with (
        running_gateway(redis_server.url, tmp_path, keys=file) as gateway,
        httpx.Client(base_url=gateway.url, headers=headers) as http,
    ):
        yield http


def test_the_end_of_an_answer_frees_its_place(caller: httpx.Client, latch: Latch) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    assert [caller.post(PATH, json=body).status_code for _ in range(3)] == [200] * 3
    with streamed(caller, prompt=latch.prompt()) as found:
        next(found)
        full = caller.post(PATH, json=body)
        assert (full.status_code, full.headers["retry-after"]) == (429, "5")
    wait_until(lambda: caller.post(PATH, json=body).status_code == 200)
