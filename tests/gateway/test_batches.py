"""Batches through the gateway, with OpenAI's own client and the toy engine."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch
from openai.types.webhooks import BatchCompletedWebhookEvent

from llorch_worker.broker import keys
from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import Client
from llorch_worker.gateway.files.store import FileStore
from llorch_worker.gateway.keys import new_key
from llorch_worker.gateway.webhook_secret import new_secret
from tests.gateway.receiver import running_receiver
from tests.gateway.test_files import remove_expired
from tests.gateways import GatewayProcess, running_gateway
from tests.latch import Latch
from tests.services import RedisServer, WorkerProcess, wait_until
from tests.store import jobs_that_wait, record_of

ENDED = ("completed", "failed", "expired", "cancelled")
BATCH_TIMEOUT_S = 120.0


def api_of(gateway: GatewayProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def api(gateway: GatewayProcess, toy_worker: WorkerProcess) -> Iterator[openai.OpenAI]:
    with api_of(gateway) as api:
        yield api


def line(custom_id: str, **body: Any) -> str:
    fields = {"model": "toy", "prompt": "x", "max_tokens": 1} | body
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": fields}
    )


def begun(api: openai.OpenAI, lines: list[str], **options: Any) -> Batch:
    file = api.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    options = {"endpoint": "/v1/completions", "completion_window": "24h"} | options
    return api.batches.create(input_file_id=file.id, **options)


def ended(api: openai.OpenAI, batch: Batch) -> Batch:
    def look() -> Batch | None:
        found = api.batches.retrieve(batch.id)
        return found if found.status in ENDED else None

    found = wait_until(look, timeout_s=BATCH_TIMEOUT_S, what="the end of the batch")
    assert found is not None
    return found


def documents(api: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    if file_id is None:
        return []
    return [json.loads(each) for each in api.files.content(file_id).text.splitlines()]


def test_every_line_is_answered_as_its_endpoint_answers(api: openai.OpenAI) -> None:
    lines = [line(f"n{n}", max_tokens=n, seed=n, temperature=0) for n in range(1, 6)]
    batch = begun(api, lines, metadata={"for": "me"})
    assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"for": "me"})
    assert batch.expires_at == batch.created_at + 24 * 3600
    done = ended(api, batch)
    assert (done.status, done.error_file_id, done.errors) == ("completed", None, None)
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 5, "completed": 5, "failed": 0}
    assert done.in_progress_at
    assert done.finalizing_at
    assert done.completed_at
    answers = documents(api, done.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"n{n}" for n in range(1, 6)]
    assert len({answer["id"] for answer in answers}) == 5
    for n, answer in enumerate(answers, start=1):
        assert answer["error"] is None
        assert answer["response"]["status_code"] == 200
        body = answer["response"]["body"]
        again = api.completions.create(
            model="toy", prompt="x", max_tokens=n, seed=n, temperature=0
        ).model_dump(mode="json")
        mine = openai.types.Completion.model_validate(body).model_dump(mode="json")
        for each in (mine, again):
            del each["id"], each["created"]
        assert mine == again
    assert done.output_file_id is not None
    file = api.files.retrieve(done.output_file_id)
    assert file.filename == f"{done.id}_output.jsonl"
    assert file.bytes == len(api.files.content(file.id).read())
    assert api.batches.list(limit=1).data == [done]


DAY_S = 24 * 3600


@pytest.mark.parametrize("wanted_s", [None, 7 * DAY_S])
def test_the_files_of_a_batch_go_with_it_or_when_it_says(
    api: openai.OpenAI,
    gateway: GatewayProcess,
    redis_server: RedisServer,
    wanted_s: int | None,
) -> None:
    after = {"anchor": "created_at", "seconds": wanted_s}
    lines = [line("good"), line("bad", max_tokens=-1)]
    given = {} if wanted_s is None else {"output_expires_after": after}
    done = ended(api, begun(api, lines, extra_body=given))
    assert done.output_file_id
    assert done.error_file_id
    files = [api.files.retrieve(each) for each in (done.output_file_id, done.error_file_id)]
    for file in files:
        assert file.expires_at == file.created_at + (wanted_s or DAY_S)
    folder = gateway.log.parent / "files" / "batches" / done.id
    assert len(list(folder.iterdir())) == 2
    store = FileStore(str(gateway.log.parent / "files"))
    ends_s = max(file.expires_at or 0 for file in files)
    remove_expired(redis_server, store, min(file.created_at for file in files) + DAY_S - 1)
    assert len(list(folder.iterdir())) == 2
    remove_expired(redis_server, store, ends_s)
    assert not folder.exists()
    with pytest.raises(openai.NotFoundError):
        api.files.retrieve(done.output_file_id)


@pytest.mark.parametrize("seconds", [3599, 30 * DAY_S + 1, "x", None])
def test_a_wrong_time_to_keep_the_files_of_a_batch_is_refused(
    api: openai.OpenAI, seconds: object
) -> None:
    after = {"anchor": "created_at", "seconds": seconds}
    with pytest.raises(openai.BadRequestError, match=r"output_expires_after\.seconds"):
        begun(api, [line("a")], extra_body={"output_expires_after": after})


@pytest.mark.parametrize(
    ("url", "body"),
    [
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3, "n": 1},
        ),
        ("/v1/responses", {"input": "x", "max_output_tokens": 3, "store": False}),
        ("/v1/completions", {"prompt": ["x", "y"], "max_tokens": 2, "echo": True}),
    ],
)
def test_an_answer_is_that_of_its_endpoint(
    api: openai.OpenAI, http: httpx.Client, url: str, body: dict[str, Any]
) -> None:
    body = {"model": "toy", "seed": 1, "temperature": 0} | body
    fields = {"custom_id": "a", "method": "POST", "url": url, "body": body}
    done = ended(api, begun(api, [json.dumps(fields)], endpoint=url))
    assert done.error_file_id is None, documents(api, done.error_file_id)
    (answer,) = documents(api, done.output_file_id)
    alone = http.post(url, json=body)
    assert alone.status_code == 200, alone.text
    assert without_ids(answer["response"]["body"]) == without_ids(alone.json())


def without_ids(document: Any) -> Any:
    """``document`` without what differs from job to job."""
    if isinstance(document, list):
        return [without_ids(each) for each in document]
    if not isinstance(document, dict):
        return document
    changing = ("id", "created", "created_at", "completed_at")
    return {key: without_ids(each) for key, each in document.items() if key not in changing}


def test_a_line_for_responses_cannot_continue_another(api: openai.OpenAI) -> None:
    fields = [
        {"previous_response_id": "resp_x"},
        {"background": True},
        {"store": True},
        {"stream": True},
    ]
    lines = [
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/responses",
                "body": {"model": "toy", "input": "x"} | each,
            }
        )
        for number, each in enumerate(fields)
    ]
    done = ended(api, begun(api, lines, endpoint="/v1/responses"))
    errors = [e["response"]["body"]["error"] for e in documents(api, done.error_file_id)]
    assert [error["param"] for error in errors] == [next(iter(each)) for each in fields]


def test_the_end_of_a_batch_is_told(
    own_server: RedisServer, own_worker: WorkerProcess, tmp_path: Path
) -> None:
    secret = new_secret()
    with (
        running_receiver() as receiver,
        running_gateway(
            own_server.url, tmp_path, private_callbacks=True, webhook_secret=secret
        ) as gateway,
        api_of(gateway) as api,
    ):
        batch = begun(api, [line("a")], extra_body={"callback_url": receiver.url})
        wait_until(lambda: receiver.deliveries, timeout_s=90)
        (delivery,) = receiver.deliveries
        told = delivery.verified(secret)
        assert told["type"] == "batch.completed"
        assert told["data"] == httpx.get(f"{gateway.url}/v1/batches/{batch.id}").json()
        event = api.webhooks.unwrap(delivery.body, delivery.headers, secret=secret)
        assert type(event) is BatchCompletedWebhookEvent
        # With every field, of its type.
        whole = BatchCompletedWebhookEvent.model_validate(told, strict=True)
        assert (event.id, event.object, event.data.id) == (whole.id, "event", batch.id)
        assert batch.created_at <= event.created_at <= time.time()


def test_bad_lines_go_to_the_error_file_and_the_batch_goes_on(api: openai.OpenAI) -> None:
    lines = [
        line("good"),
        line("much", prompt=[7] * 5_000),
        line("unknown", guided_json={}),
        line("streamed", stream=True),
        line("elsewhere").replace("/v1/completions", "/v1/embeddings"),
        line("other", model="nobodys"),
        "",
        json.dumps({"custom_id": "bare", "prompt": "x"}),
        line("raises", prompt="raise ValueError"),
        line("last"),
    ]
    done = ended(api, begun(api, lines))
    assert done.status == "completed"
    assert done.request_counts is not None
    assert done.request_counts.model_dump() == {"total": 9, "completed": 2, "failed": 7}
    assert [a["custom_id"] for a in documents(api, done.output_file_id)] == ["good", "last"]
    errors = documents(api, done.error_file_id)
    said = [(e["custom_id"], e["response"]["status_code"]) for e in errors]
    assert said == [
        ("much", 400),
        ("unknown", 400),
        ("streamed", 400),
        ("elsewhere", 400),
        ("other", 404),
        ("bare", 400),
        ("raises", 500),
    ]
    details = [e["response"]["body"]["error"] for e in errors]
    assert details[0]["llorch_code"] == "CONTEXT_LENGTH_EXCEEDED"
    assert details[3]["param"] == "url"


def test_broken_lines_and_repeated_ids_fail_the_batch_before_any_line_runs(
    api: openai.OpenAI,
) -> None:
    done = ended(api, begun(api, [line("a"), "not json", line("a", max_tokens=2), "", "[1]"]))
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.errors is not None
    assert [(e.code, e.line, e.param) for e in done.errors.data or ()] == [
        ("invalid_json_line", 2, None),
        ("duplicate_custom_id", 3, "custom_id"),
        ("invalid_json_line", 5, None),
    ]


@pytest.mark.parametrize(
    ("changed", "param"),
    [
        ({"endpoint": "/v1/images/generations"}, "endpoint"),
        ({"completion_window": "30s"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"metadata": {"k": "v" * 513}}, "metadata.k"),
    ],
)
def test_a_batch_that_cannot_be_is_refused(
    api: openai.OpenAI, changed: dict[str, Any], param: str
) -> None:
    file = api.files.create(file=("in.jsonl", line("a").encode()), purpose="batch")
    fields = {
        "input_file_id": file.id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    } | changed
    with pytest.raises(openai.BadRequestError) as refused:
        api.batches.create(**fields)
    assert refused.value.param == param


def test_an_empty_file_fails_the_batch(api: openai.OpenAI) -> None:
    done = ended(api, begun(api, ["", " "]))
    assert done.status == "failed"
    assert done.errors is not None
    assert done.errors.data is not None
    assert done.errors.data[0].code == "empty_file"
    assert done.failed_at
    with pytest.raises(openai.ConflictError):
        api.batches.cancel(done.id)


def test_a_cancelled_batch_keeps_what_has_ended(api: openai.OpenAI, latch: Latch) -> None:
    lines = [
        line("a"),
        line("b"),
        *(line(f"w{n}", prompt=latch.prompt(), max_tokens=2) for n in range(600)),
    ]
    batch = begun(api, lines)

    def two_done() -> bool:
        counts = api.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed == 2

    wait_until(two_done)
    cancelling = api.batches.cancel(batch.id)
    assert (cancelling.status, bool(cancelling.cancelling_at)) == ("cancelling", True)
    done = ended(api, batch)
    assert (done.status, bool(done.cancelled_at)) == ("cancelled", True)
    assert [a["custom_id"] for a in documents(api, done.output_file_id)] == ["a", "b"]
    errors = documents(api, done.error_file_id)
    assert {(e["response"], e["error"]["code"]) for e in errors} == {(None, "batch_cancelled")}
    assert [e["custom_id"] for e in errors] == [f"w{n}" for n in range(600)]
    assert done.request_counts is not None
    assert done.request_counts.failed == 600


def test_other_callers_go_first_and_few_lines_are_in_the_queue(
    own_server: RedisServer, own_worker: WorkerProcess, tmp_path: Path, latch: Latch
) -> None:
    window = 8
    lines = [line(f"{n}", prompt=latch.prompt(), max_tokens=2) for n in range(60)]
    with (
        running_gateway(own_server.url, tmp_path, batch_window=window) as gateway,
        api_of(gateway) as api,
        Client(own_server.url) as client,
    ):

        def waiting() -> int:
            return jobs_that_wait(client.redis)

        batch = begun(api, lines)
        wait_until(lambda: waiting() == window - 2)
        other = client.submit(prompt="x", max_tokens=1)
        assert waiting() == window - 1
        latch.open()
        other.result(60)
        done = ended(api, batch)
        answers = documents(api, done.output_file_id)
        assert len(answers) == 60

        def claimed_ms(job_id: str) -> int:
            return int(record_of(client.redis, job_id).get("first_claim_ms") or 0)

        # The worker had two when the other came; those that waited came after it.
        later = [claimed_ms(a["response"]["request_id"]) >= claimed_ms(other.id) for a in answers]
        assert later.count(True) >= 58


def test_a_batch_that_cannot_be_read_stops_no_other(api: openai.OpenAI, client: Client) -> None:
    unreadable = "batch_of_another_version"
    client.redis.hset(keys.gateway_document(unreadable), "document", "{}")
    client.redis.zadd(keys.BATCH_LEASES, {unreadable: 0})
    wait_until(lambda: client.redis.zscore(keys.BATCH_LEASES, unreadable) > 0, what="a claim")
    assert ended(api, begun(api, [line("a")])).status == "completed"
    client.redis.zrem(keys.BATCH_LEASES, unreadable)
    client.redis.delete(keys.gateway_document(unreadable))


def test_nothing_of_a_batch_is_left_but_its_files(
    api: openai.OpenAI, gateway: GatewayProcess, redis_server: RedisServer
) -> None:
    done = ended(api, begun(api, [line("a"), line("bad", guided_json={})]))
    folder = gateway.log.parent / "files" / "batches" / done.id
    wait_until(lambda: len(list(folder.iterdir())) == 2)
    with connect(redis_server.url) as client:
        assert client.zscore(keys.BATCH_LEASES, done.id) is None
        assert 0 < client.ttl(keys.gateway_document(done.id)) <= 24 * 3600
    assert "prompt" not in gateway.log.read_text()


def test_the_lines_of_a_batch_count_against_the_rates_of_its_key(
    own_server: RedisServer, own_worker: WorkerProcess, tmp_path: Path
) -> None:
    key, entry = new_key("batches")
    file = tmp_path / "keys.toml"
    file.write_text(f"{entry}requests_per_day = 10\ntokens_per_day = 1000\n")
    with (
        running_gateway(own_server.url, tmp_path, keys=file) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=key, max_retries=0) as api,
    ):
        ended(api, begun(api, [line("a", max_tokens=100), line("b")]))
        asked = api.completions.with_raw_response.create(model="toy", prompt="x", max_tokens=2)
        assert asked.headers["x-ratelimit-remaining-requests"] == "7"
        # Two prompts of a token, with 100 and 1 tokens after them, and the guess for this one.
        assert int(asked.headers["x-ratelimit-remaining-tokens"]) in (895, 896)
