"""``/v1/jobs``: submitting, reading, following and cancelling jobs."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from llorch_worker.client import Client
from tests.gateway import sse
from tests.gateways import GatewayProcess
from tests.latch import Latch
from tests.services import WorkerProcess, wait_until
from tests.toy_generation import token_id


@pytest.fixture
def api(http: httpx.Client, toy_worker: WorkerProcess) -> httpx.Client:
    return http


def submit(api: httpx.Client, **fields: Any) -> dict[str, Any]:
    answer = api.post("/v1/jobs", json={"prompt": "x", "max_tokens": 4, **fields})
    assert answer.status_code == 202, answer.text
    document = answer.json()
    assert answer.headers["location"] == document["urls"]["job"]
    return dict(document)


def ended(api: httpx.Client, job_id: str) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        document = api.get(f"/v1/jobs/{job_id}").json()
        return document if document["status"] in ("succeeded", "failed", "cancelled") else None

    found = wait_until(look)
    assert found is not None
    return found


def test_a_job_is_accepted_and_its_result_is_read_later(api: httpx.Client) -> None:
    job = submit(api, metadata={"a": 1}, seed=3)
    assert job["status"] in ("queued", "running", "succeeded")
    found = ended(api, job["id"])
    assert found["status"] == "succeeded"
    assert found["result"]["text"] == "w0 w1 w2 w3 "
    assert (found["result"]["id"], found["result"]["metadata"]) == (job["id"], {"a": 1})
    assert "error" not in found


def test_a_failed_job_has_its_error(api: httpx.Client) -> None:
    found = ended(api, submit(api, prompt="raise ValueError hush")["id"])
    assert (found["status"], found["error"]["code"]) == ("failed", "INTERNAL")
    assert "hush" not in str(found)


def test_events_are_those_of_the_contract(api: httpx.Client, gateway: GatewayProcess) -> None:
    job = submit(api, seed=5, max_tokens=8)
    found = sse.read(gateway.url, job["id"])
    assert (found[0].type, found[-1].type) == ("started", "finished")
    assert sse.token_ids(found) == [token_id(5, i) for i in range(8)]
    assert sse.text(found) == ended(api, job["id"])["result"]["text"]


def test_a_reader_goes_on_after_any_event(api: httpx.Client, gateway: GatewayProcess) -> None:
    job = submit(api, max_tokens=30)
    whole = sse.read(gateway.url, job["id"])
    for place, seen in enumerate(whole[:-1]):
        rest = sse.read(gateway.url, job["id"], seen.id)
        assert [each.event for each in whole[: place + 1] + rest] == [e.event for e in whole]
    query = httpx.get(
        f"{gateway.url}/v1/jobs/{job['id']}/events", params={"last_event_id": whole[-2].id}
    )
    assert [e.event for e in sse.events(query.text.splitlines())] == [whole[-1].event]
    # A browser comes back after the last event, too, unless it is told not to.
    path = f"/v1/jobs/{job['id']}/events"
    assert api.get(path, headers={"Last-Event-ID": whole[-1].id}).status_code == 204
    wrong = api.get(path, headers={"Last-Event-ID": "yesterday"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "Last-Event-ID")


def test_a_client_that_hangs_up_does_not_cancel_its_job(api: httpx.Client, latch: Latch) -> None:
    job = submit(api, prompt=latch.prompt(after=2), max_tokens=4)
    with api.stream("GET", f"/v1/jobs/{job['id']}/events") as response:
        next(response.iter_lines())
    latch.open()
    assert ended(api, job["id"])["status"] == "succeeded"


def test_a_running_job_is_cancelled(api: httpx.Client, latch: Latch) -> None:
    job = submit(api, prompt=latch.prompt(), max_tokens=4)
    path = f"/v1/jobs/{job['id']}"
    wait_until(lambda: api.get(path).json()["status"] == "running")
    answer = api.delete(path)
    assert answer.status_code in (200, 202)
    assert answer.json()["status"] in ("cancelling", "cancelled")
    assert ended(api, job["id"])["status"] == "cancelled"
    assert api.delete(path).status_code == 200
    assert api.get(f"{path}/events").text.count("event: cancelled") == 1


def test_a_waiting_job_has_its_position(api: httpx.Client, toy_worker: WorkerProcess) -> None:
    with toy_worker.paused():
        jobs = [submit(api)["id"] for _ in range(2)]
        places = [api.get(f"/v1/jobs/{job}").json()["position"]["place"] for job in jobs]
    assert places == [1, 2]
    assert "position" not in ended(api, jobs[0])


def test_a_waiting_job_is_cancelled_at_once(api: httpx.Client, toy_worker: WorkerProcess) -> None:
    with toy_worker.paused():
        job = submit(api)
        answer = api.delete(f"/v1/jobs/{job['id']}")
    assert (answer.status_code, answer.json()["status"]) == (200, "cancelled")


def test_an_ended_job_cannot_be_cancelled(api: httpx.Client) -> None:
    job = submit(api)
    ended(api, job["id"])
    answer = api.delete(f"/v1/jobs/{job['id']}")
    assert (answer.status_code, answer.json()["error"]["llorch_code"]) == (409, "ALREADY_ENDED")
    # OpenAI's clients would send it twice more.
    assert answer.headers["x-should-retry"] == "false"


@pytest.mark.parametrize("job_id", ["nothing", "x:events", "a%2Fb", "x" * 300])
def test_unknown_jobs_are_not_found(api: httpx.Client, job_id: str) -> None:
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/events")):
        answer = api.request(method, f"/v1/jobs/{job_id}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


def test_one_idempotency_key_is_one_job(api: httpx.Client) -> None:
    first = submit(api, idempotency_key="k1")
    assert submit(api, idempotency_key="k1")["id"] == first["id"]
    body = {"max_tokens": 4, "prompt": "x"}
    by_header = api.post("/v1/jobs", json=body, headers={"Idempotency-Key": "k1"})
    assert by_header.json()["id"] == first["id"]
    too_long = api.post("/v1/jobs", json={"prompt": "x"}, headers={"Idempotency-Key": "k" * 201})
    assert too_long.status_code == 400


def test_an_idempotency_key_is_free_again_after_a_retriable_error(api: httpx.Client) -> None:
    again = {"prompt": "raise ValueError", "idempotency_key": "k2"}
    first = submit(api, **again)
    assert ended(api, first["id"])["error"]["retriable"]
    second = submit(api, **again)
    assert second["id"] != first["id"]
    assert ended(api, second["id"])["error"]["retriable"]


@pytest.mark.parametrize(
    ("path", "body", "others"),
    [
        ("/v1/jobs", {"prompt": "x"}, [{"prompt": "y"}, {"temperature": 0.5}]),
        ("/v1/completions", {"prompt": "x"}, [{"prompt": ["x", "x"]}, {"max_tokens": 3}]),
        ("/v1/completions", {"prompt": ["x", "y"]}, [{"prompt": "x"}, {"prompt": ["x", "y", "z"]}]),
    ],
)
def test_another_body_with_the_same_idempotency_key_is_a_conflict(
    api: httpx.Client, path: str, body: dict[str, Any], others: list[dict[str, Any]]
) -> None:
    body = {**body, "max_tokens": 2}
    headers = {"Idempotency-Key": path + str(body)}
    first = api.post(path, json=body, headers=headers)
    assert first.is_success, first.text
    for other in others:
        answer = api.post(path, json={**body, **other}, headers=headers)
        error = answer.json()["error"]
        assert (answer.status_code, error["llorch_code"]) == (409, "INVALID_REQUEST")
        assert (error["type"], error["param"]) == ("invalid_request_error", "idempotency_key")
        # OpenAI's clients would send it twice more.
        assert answer.headers["x-should-retry"] == "false"
    assert api.post(path, json=body, headers=headers).json()["id"] == first.json()["id"]


def test_jobs_of_other_producers_are_read_too(api: httpx.Client, client: Client) -> None:
    job = client.submit(prompt="x", max_tokens=2)
    assert ended(api, job.id)["result"]["text"] == "w0 w1 "
