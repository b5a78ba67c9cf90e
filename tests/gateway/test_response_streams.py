"""The streams of ``/v1/responses``, and the helpers of the ``openai`` package for them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
from openai import AsyncOpenAI, OpenAI

from llorch_worker.broker.connections.connection import connect
from tests.gateway.openai_types import check_event
from tests.gateway.talking import (
    ASK,
    PATH,
    TEXT_EVENTS,
    Walk,
    events_of,
    kinds,
)
from tests.gateways import GatewayProcess, running_gateway
from tests.services import RedisServer, WorkerProcess, running_worker
from tests.store import lose_stream


def test_a_stream_has_openais_events_in_openais_order(wire: httpx.Client) -> None:
    # So long that its tokens do not all go out at once.
    events = events_of(wire.post(PATH, json={**ASK, "max_output_tokens": 100, "stream": True}))
    assert kinds(events) == [*TEXT_EVENTS, "response.incomplete"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    response = events[-1]["response"]
    (item,) = response["output"]
    (part,) = item["content"]
    deltas = [event["delta"] for event in events if "delta" in event]
    assert len(deltas) > 1
    assert "".join(deltas) == part["text"]
    assert {event["item_id"] for event in events if "item_id" in event} == {item["id"]}
    assert {event["response"]["id"] for event in events if "response" in event} == {response["id"]}
    assert wire.get(f"{PATH}/{response['id']}").json() == response


def test_a_stream_can_be_read_again_from_any_event(wire: httpx.Client) -> None:
    events = events_of(wire.post(PATH, json={**ASK, "stream": True}))
    path = f"{PATH}/{events[0]['response']['id']}"
    assert events_of(wire.get(path, params={"stream": True})) == events
    for after in (0, 5, len(events) - 1):
        rest = events_of(wire.get(path, params={"stream": True, "starting_after": after}))
        assert rest == events[after + 1 :]


def test_a_stream_outlives_the_events_of_its_job(
    wire: httpx.Client, redis_server: RedisServer
) -> None:
    events = events_of(wire.post(PATH, json={**ASK, "stream": True}))
    response = events[-1]["response"]
    path = f"{PATH}/{response['id']}"
    with connect(redis_server.url) as redis:
        lose_stream(redis, response["id"].removeprefix("resp_"))
    whole = events_of(wire.get(path, params={"stream": True}))
    assert kinds(whole) == kinds(events)
    assert whole[-1]["response"] == response
    gone = wire.get(path, params={"stream": True, "starting_after": 3})
    assert (gone.status_code, gone.json()["error"]["param"]) == (409, "starting_after")


def test_the_helpers_of_the_async_client(talker: WorkerProcess, gateway: GatewayProcess) -> None:
    async def talk() -> tuple[Any, Any, list[str]]:
        async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as api:
            fields = {**ASK, "max_output_tokens": 60}
            parsed = await api.responses.parse(**fields, text_format=Walk)
            async with api.responses.stream(**fields, text_format=Walk) as stream:
                final = await stream.get_final_response()
            plain = await api.responses.create(**ASK, stream=True)
            return parsed, final, [event.type async for event in plain]

    parsed, final, seen = asyncio.run(talk())
    assert isinstance(parsed.output_parsed, Walk)
    assert parsed.output_parsed == final.output_parsed
    assert seen[0] == "response.created"


def test_a_stream_notices_the_death_of_its_worker_only_as_a_pause(
    own_server: RedisServer, tmp_path: Path
) -> None:
    quick = {"lease_s": 3, "sweep_s": 0.5, "model_name": "toy", "TOY_STEP_MS": 20}
    with (
        ExitStack() as workers,
        running_gateway(own_server.url, tmp_path) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as api,
    ):
        doomed = workers.enter_context(running_worker(own_server.url, tmp_path, **quick))
        seen = []
        asked = {"model": "toy", "input": "x", "max_output_tokens": 200}
        for event in api.responses.create(**asked, stream=True):
            seen.append(event.to_dict())
            check_event(seen[-1])
            if len(seen) == 10:
                doomed.process.kill()
                doomed.process.wait()
                workers.enter_context(running_worker(own_server.url, tmp_path, name="w2", **quick))
    assert kinds(seen) == [*TEXT_EVENTS, "response.incomplete"]
    assert [event["sequence_number"] for event in seen] == list(range(len(seen)))
    text = "".join(event["delta"] for event in seen if "delta" in event)
    assert text == "".join(f"w{i} " for i in range(200))
    assert seen[-1]["response"]["output"][0]["content"][0]["text"] == text
