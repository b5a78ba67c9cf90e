"""Responses in the background, which need no gateway until somebody comes back."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
from openai import OpenAI
from openai.types.responses import Response

from llorch_worker.broker.connections.connection import connect
from llorch_worker.client import AsyncJob, BrokerUnavailable, Client
from llorch_worker.gateway.app import create_app
from llorch_worker.gateway.settings import GatewaySettings
from llorch_worker.gateway.webhook_secret import new_secret
from llorch_worker.settings import Settings
from tests.broker.steps import announce
from tests.gateway.openai_types import check_event, check_response
from tests.gateway.receiver import running_receiver
from tests.gateway.talking import (
    ASK,
    TEXT_EVENTS,
    kinds,
    refused,
)
from tests.gateways import running_gateway
from tests.services import RedisServer, WorkerProcess, wait_until
from tests.store import job_ids, record_of


def ended(api: OpenAI, response_id: str) -> Response:
    def look() -> Response | None:
        found = api.responses.retrieve(response_id)
        return None if found.status in ("queued", "in_progress") else found

    found = wait_until(look)
    assert found is not None
    return found


def test_a_background_response_is_finished_without_its_gateway(
    talker: WorkerProcess, redis_server: RedisServer, tmp_path: Path, api: OpenAI
) -> None:
    with talker.paused(), running_gateway(redis_server.url, tmp_path) as gateway:
        other = OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
        begun = other.responses.create(**ASK, background=True)
        assert (begun.status, begun.background, begun.output) == ("queued", True, [])
        check_response(begun.to_dict())
        gateway.kill()
    response = ended(api, begun.id)
    check_response(response.to_dict())
    assert response.status == "incomplete"
    assert response.output_text == api.responses.create(**ASK).output_text


def test_a_background_stream_goes_on_at_another_gateway(
    talker: WorkerProcess, redis_server: RedisServer, tmp_path: Path, api: OpenAI
) -> None:
    with running_gateway(redis_server.url, tmp_path) as gateway:
        other = OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
        with talker.paused():
            stream = other.responses.create(**ASK, background=True, stream=True)
            first = [next(stream), next(stream)]
            assert [event.type for event in first] == ["response.created", "response.queued"]
            assert first[1].response.status == "queued"
            gateway.kill()
    rest = list(
        api.responses.retrieve(
            first[0].response.id, stream=True, starting_after=first[-1].sequence_number
        )
    )
    events = [event.to_dict() for event in (*first, *rest)]
    for event in events:
        check_event(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    order = [TEXT_EVENTS[0], "response.queued", *TEXT_EVENTS[1:], "response.incomplete"]
    assert kinds(events) == order
    assert rest[-1].response.output_text


def test_a_failure_in_the_background_is_found_later(api: OpenAI) -> None:
    long = {**ASK, "input": "Lily went to the park. " * 200, "background": True}
    response = ended(api, api.responses.create(**long).id)
    check_response(response.to_dict())
    assert (response.status, response.output) == ("failed", [])
    assert response.error is not None
    assert response.error.code == "invalid_prompt"
    events = list(api.responses.retrieve(response.id, stream=True))
    assert events[-1].type == "response.failed"
    error = refused(lambda: api.responses.create(**ASK, previous_response_id=response.id))
    assert error["code"] == "previous_response_failed"


def test_a_background_response_can_be_cancelled(api: OpenAI, talker: WorkerProcess) -> None:
    with talker.paused():
        begun = api.responses.create(**ASK, background=True)
        error = refused(
            lambda: api.responses.create(**ASK, previous_response_id=begun.id),
            409,
        )
        assert error["param"] == "previous_response_id"
        response = api.responses.cancel(begun.id)
    check_response(response.to_dict())
    assert response.status == "cancelled"
    assert api.responses.cancel(begun.id) == response == api.responses.retrieve(begun.id)
    events = list(api.responses.retrieve(begun.id, stream=True))
    assert events[-1].response.status == "cancelled"


def test_a_running_response_can_be_cancelled(api: OpenAI, talker: WorkerProcess) -> None:
    fields = {**ASK, "max_output_tokens": 450, "extra_body": {"ignore_eos": True}}
    with api.responses.create(**fields, background=True, stream=True) as stream:
        begun = next(each.response for each in stream if each.type == "response.in_progress")
        with talker.paused():
            # The worker cannot hear of it yet.
            assert api.responses.cancel(begun.id).status == "in_progress"
        assert ended(api, begun.id).status == "cancelled"
        assert list(stream)[-1].response.status == "cancelled"


def test_only_a_background_response_can_be_cancelled(api: OpenAI) -> None:
    response = api.responses.create(**ASK)
    refused(lambda: api.responses.cancel(response.id))


def test_deleting_a_background_response_cancels_it(
    api: OpenAI, talker: WorkerProcess, client: Client
) -> None:
    with talker.paused():
        begun = api.responses.create(**ASK, background=True)
        api.responses.delete(begun.id)
        assert client.job(begun.id.removeprefix("resp_")).status().forgotten


def test_a_deletion_that_fails_half_way_can_be_sent_again(
    own_server: RedisServer, tmp_path: Path
) -> None:
    app = create_app(Settings(redis_url=own_server.url), GatewaySettings(files=str(tmp_path)))
    gateway = app.state.gateway
    forget = gateway.forget

    async def without_redis(_: AsyncJob) -> None:
        gateway.forget = forget
        raise BrokerUnavailable

    async def delete() -> list[int]:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
            asked = {"model": "toy", "input": "x", "background": True}
            path = f"/v1/responses/{(await http.post('/v1/responses', json=asked)).json()['id']}"
            gateway.forget = without_redis
            return [(await http.delete(path)).status_code for _ in range(3)]

    with connect(own_server.url) as store:
        announce(store)
        assert asyncio.run(delete()) == [503, 200, 404]
        (job_id,) = job_ids(store)
        assert record_of(store, job_id)["state"] == "ended"


def test_a_callback_url_hears_of_the_end(
    talker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    secret = new_secret()
    settings = {"private_callbacks": True, "webhook_secret": secret}
    with (
        running_receiver() as receiver,
        running_gateway(redis_server.url, tmp_path, **settings) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none") as api,
    ):
        body = {"callback_url": receiver.url}
        begun = api.responses.create(**ASK, background=True, extra_body=body)
        wait_until(lambda: receiver.deliveries)
        told = receiver.deliveries[0].verified(secret)
        ended = httpx.get(f"{gateway.url}/v1/responses/{begun.id}").json()
    assert told["type"] == "response.incomplete"
    assert told["data"] == ended
    assert ended["output"][0]["content"][0]["text"]
