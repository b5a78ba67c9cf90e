"""``/v1/responses`` through the ``openai`` package, over a real model whose template has tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel

from llorch_worker.broker import keys
from llorch_worker.broker.connection import connect
from llorch_worker.client import Client
from llorch_worker.gateway.keys import new_key
from tests.gateway.openai_types import check_event, check_response
from tests.gateways import GatewayProcess, running_gateway
from tests.services import REAL_APP, RedisServer, WorkerProcess, running_worker, wait_until

TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}"
    "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
MODEL = "stories"
PATH = "/v1/responses"
ASK = {"model": MODEL, "input": "Lily went", "max_output_tokens": 8, "temperature": 0}
TOOL = {
    "type": "function",
    "name": "go",
    "description": "Goes somewhere.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"to": {"enum": ["park", "home"]}},
        "required": ["to"],
        "additionalProperties": False,
    },
}
MISNAMED = {"type": "function_call", "call_id": "c", "name": "a b", "arguments": "{}"}
TEXT_EVENTS = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
]


class Walk(BaseModel):
    to: Literal["park", "home"]
    happy: bool


@pytest.fixture(scope="module")
def worker(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory, stories260k: Path
) -> Iterator[WorkerProcess]:
    folder = tmp_path_factory.mktemp("model")
    for file in (stories260k / "hf").iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    logs = tmp_path_factory.mktemp("worker")
    with running_worker(
        redis_server.url, logs, app=REAL_APP, model=folder, model_name=MODEL
    ) as process:
        yield process


@pytest.fixture(scope="module")
def api(worker: WorkerProcess, gateway: GatewayProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
def wire(api: OpenAI, http: httpx.Client) -> httpx.Client:
    return http


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Every event, held against OpenAI's types; each stands under its own name."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in answer.text.replace("\r\n", "\n").split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith(":")]
        if lines:
            name, data = lines
            event = json.loads(data.removeprefix("data: "))
            assert name == f"event: {event['type']}"
            check_event(event)
            events.append(event)
    return events


def kinds(events: list[dict[str, Any]]) -> list[str]:
    """The types of events, with neighbours of the same type as one."""
    found: list[str] = []
    for event in events:
        if found[-1:] != [event["type"]]:
            found.append(event["type"])
    return found


def refused(call: Callable[[], object], status: int = 400) -> dict[str, Any]:
    with pytest.raises(openai.APIStatusError) as caught:
        call()
    assert caught.value.status_code == status, caught.value
    error = caught.value.body
    assert isinstance(error, dict)
    return error


# One answer ----------------------------------------------------------------------------------


def test_a_response_has_every_field_of_openai(wire: httpx.Client) -> None:
    document = wire.post(
        PATH, json={**ASK, "instructions": "Tell.", "metadata": {"a": "b"}, "user": "u"}
    ).json()
    response = check_response(document)
    assert (response.status, response.model, response.instructions) == (
        "incomplete",
        MODEL,
        "Tell.",
    )
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert (response.metadata, response.user) == ({"a": "b"}, "u")
    assert response.output_text
    assert response.usage is not None
    assert response.usage.output_tokens == 8
    assert check_response(wire.get(f"{PATH}/{response.id}").json()) == response


def test_it_is_the_answer_of_the_queue(api: OpenAI, client: Client) -> None:
    messages = [{"role": "system", "content": "Tell."}, {"role": "user", "content": "Lily went"}]
    job = client.submit(model=MODEL, messages=messages, max_tokens=8, temperature=0)
    response = api.responses.create(**ASK, instructions="Tell.")
    assert response.output_text == job.result(60).text
    (message,) = response.output
    assert message.id.startswith("msg_")
    assert api.responses.retrieve(response.id).output == response.output


def test_an_answer_that_ends_by_itself_is_completed(api: OpenAI) -> None:
    response = api.responses.create(**ASK, extra_body={"stop": ["a"]})
    assert (response.status, response.incomplete_details) == ("completed", None)
    assert response.completed_at >= response.created_at


def test_our_own_fields_are_the_contracts(api: OpenAI) -> None:
    fields = {**ASK, "temperature": 1.5}
    seeded = [api.responses.create(**fields, extra_body={"seed": 5, "top_k": 3}) for _ in range(2)]
    assert seeded[0].output_text == seeded[1].output_text
    assert seeded[0].seed == 5
    error = refused(lambda: api.responses.create(**ASK, extra_body={"top_k": -1}))
    assert error["param"] == "top_k"


def test_logprobs_come_by_include_and_by_number(api: OpenAI, wire: httpx.Client) -> None:
    response = api.responses.create(**ASK, include=["message.output_text.logprobs"], top_logprobs=2)
    (part,) = response.output[0].content
    assert len(part.logprobs) == 8
    assert all(len(each.top_logprobs) == 2 for each in part.logprobs)
    assert b"".join(bytes(each.bytes) for each in part.logprobs).decode() == part.text
    events = events_of(wire.post(PATH, json={**ASK, "top_logprobs": 2, "stream": True}))
    sent = [each for event in events if "delta" in event for each in event["logprobs"]]
    assert [each["token"] for each in sent] == [each.token for each in part.logprobs]


# Refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning": {"effort": "high"}}, "reasoning.effort"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"truncation": "auto"}, "truncation"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"n": 2}, "n"),
        ({"guided_json": {}}, "guided_json"),
        ({"store": False, "background": True}, "store"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0"),
        ({"instructions": 5}, "instructions"),
        (
            {"instructions": "x", "input": [{"role": "user", "content": "x"}, MISNAMED]},
            "input.1.tool_calls.0.function.name",
        ),
        ({"input": "half a pair: \ud800"}, "input.0"),
        ({"metadata": {"a": "b" * 513}}, "metadata.a"),
    ],
)
def test_what_is_not_supported_is_named(
    wire: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    # httpx would not send half a pair.
    answer = wire.post(PATH, content=json.dumps({**ASK, **fields}))
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)
    assert answer.json()["error"]["code"] == "invalid_request"


def test_fields_that_change_nothing_are_accepted(wire: httpx.Client) -> None:
    fields = {
        "truncation": "disabled",
        "reasoning": {"effort": None},
        "conversation": None,
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "service_tier": "auto",
        "include": ["reasoning.encrypted_content"],
        "max_tool_calls": 3,
        "stream_options": {"include_obfuscation": False},
    }
    assert wire.post(PATH, json={**ASK, **fields}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_before_the_first_token_is_an_answer_of_its_own(
    wire: httpx.Client, stream: bool
) -> None:
    long = {**ASK, "input": "Lily went to the park. " * 200, "stream": stream}
    answer = wire.post(PATH, json=long)
    assert answer.status_code == 400
    assert answer.json()["error"]["llorch_code"] == "CONTEXT_LENGTH_EXCEEDED"


# Streams -------------------------------------------------------------------------------------


def test_a_stream_has_openais_events_in_openais_order(wire: httpx.Client) -> None:
    events = events_of(wire.post(PATH, json={**ASK, "stream": True}))
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
        redis.delete(keys.events(response["id"].removeprefix("resp_")))
    whole = events_of(wire.get(path, params={"stream": True}))
    assert kinds(whole) == kinds(events)
    assert whole[-1]["response"] == response
    gone = wire.get(path, params={"stream": True, "starting_after": 3})
    assert (gone.status_code, gone.json()["error"]["param"]) == (409, "starting_after")


def test_the_helper_for_streams(api: OpenAI) -> None:
    with api.responses.stream(**{**ASK, "max_output_tokens": 60}, text_format=Walk) as stream:
        seen = [event.type for event in stream]
        final = stream.get_final_response()
    assert seen[-1] == "response.completed"
    assert final.output_parsed.to in ("park", "home")


def test_the_helpers_of_the_async_client(worker: WorkerProcess, gateway: GatewayProcess) -> None:
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


def test_json_is_json(api: OpenAI) -> None:
    response = api.responses.create(
        **{**ASK, "max_output_tokens": 40}, text={"format": {"type": "json_object"}}
    )
    assert response.output_text.startswith("{")
    assert response.text.format.type == "json_object"


# Functions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "go"}])
def test_a_function_is_called_and_the_conversation_goes_on(api: OpenAI, choice: Any) -> None:
    fields = {**ASK, "max_output_tokens": 60, "tools": [TOOL], "parallel_tool_calls": False}
    first = api.responses.create(**fields, tool_choice=choice)
    (call,) = first.output
    assert (first.status, call.type, call.name) == ("completed", "function_call", "go")
    assert json.loads(call.arguments)["to"] in ("park", "home")
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "She is there."}
    second = api.responses.create(**{**ASK, "input": [done]}, previous_response_id=first.id)
    whole = [{"role": "user", "content": ASK["input"]}, *first.output, done]
    again = api.responses.create(**{**ASK, "input": whole})
    assert second.output_text == again.output_text
    assert second.usage.input_tokens == again.usage.input_tokens


def test_calls_are_streamed_as_openai_streams_them(wire: httpx.Client) -> None:
    fields = {"max_output_tokens": 60, "tools": [TOOL], "tool_choice": "required", "stream": True}
    events = events_of(wire.post(PATH, json={**ASK, **fields, "parallel_tool_calls": False}))
    assert kinds(events) == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    (call,) = events[-1]["response"]["output"]
    deltas = "".join(event["delta"] for event in events if "delta" in event)
    assert deltas == call["arguments"] == events[4]["arguments"]
    assert events[-2]["item"] == call


def test_the_helper_parses_calls(api: OpenAI) -> None:
    tool = openai.pydantic_function_tool(Walk, name="walk")["function"]
    with api.responses.stream(
        **{**ASK, "max_output_tokens": 80},
        tools=[{"type": "function", **tool}],
        tool_choice="required",
        parallel_tool_calls=False,
    ) as stream:
        final = stream.get_final_response()
    assert Walk.model_validate_json(final.output[0].arguments)


def test_text_is_streamed_although_there_are_tools(wire: httpx.Client) -> None:
    events = events_of(wire.post(PATH, json={**ASK, "tools": [TOOL], "stream": True}))
    assert kinds(events) == [*TEXT_EVENTS, "response.incomplete"]
    assert len([event for event in events if "delta" in event]) > 1


# Conversations -------------------------------------------------------------------------------


def test_a_conversation_goes_on_as_if_it_were_sent_whole(api: OpenAI) -> None:
    first = api.responses.create(**ASK, instructions="Be kind.")
    more = [{"role": "user", "content": "And then?"}]
    second = api.responses.create(
        **{**ASK, "input": more}, previous_response_id=first.id, instructions="Be brief."
    )
    whole = [{"role": "user", "content": ASK["input"]}, *first.output, *more]
    again = api.responses.create(**{**ASK, "input": whole}, instructions="Be brief.")
    assert second.output_text == again.output_text
    # The instructions of the first turn would make it longer.
    assert second.usage.input_tokens == again.usage.input_tokens
    third = api.responses.create(**{**ASK, "input": "So?"}, previous_response_id=second.id)
    items = api.responses.input_items.list(third.id, order="asc").data
    assert [item.role for item in items] == ["user", "assistant", "user", "assistant", "user"]
    assert [items[1], items[3]] == [first.output[0], second.output[0]]


def test_input_items_come_in_pages(api: OpenAI) -> None:
    turns = [{"role": role, "content": role} for role in ("developer", "user", "assistant", "user")]
    response = api.responses.create(**{**ASK, "input": turns})
    pages = api.responses.input_items.list(response.id, order="asc", limit=3)
    assert [len(page.data) for page in pages.iter_pages()] == [3, 1]
    ids = [item.id for item in pages]
    assert ids == [item.id for item in api.responses.input_items.list(response.id)][::-1]
    assert len(set(ids)) == 4


def test_a_response_that_is_not_stored_is_gone(api: OpenAI, redis_server: RedisServer) -> None:
    with connect(redis_server.url) as redis:
        before = set(redis.scan_iter(keys.response("", "*")))
        response = api.responses.create(**ASK, store=False)
        assert set(redis.scan_iter(keys.response("", "*"))) == before
    refused(lambda: api.responses.retrieve(response.id), 404)
    error = refused(lambda: api.responses.create(**ASK, previous_response_id=response.id))
    assert (error["code"], error["param"]) == (
        "previous_response_not_found",
        "previous_response_id",
    )


def test_a_deleted_response_is_gone(api: OpenAI) -> None:
    response = api.responses.create(**ASK)
    api.responses.delete(response.id)
    refused(lambda: api.responses.retrieve(response.id), 404)
    refused(lambda: api.responses.delete(response.id), 404)


def test_responses_are_kept_for_a_stated_time(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    with (
        running_gateway(redis_server.url, tmp_path, response_ttl_s=1) as gateway,
        OpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as api,
    ):
        response = api.responses.create(**ASK)

        def gone() -> bool:
            try:
                return not api.responses.retrieve(response.id)
            except openai.NotFoundError:
                return True

        wait_until(gone)
        with connect(redis_server.url) as redis:
            assert not redis.exists(keys.response("", response.id.removeprefix("resp_")))


def test_a_response_belongs_to_its_key(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path
) -> None:
    (mine, entry), (other, second) = new_key("mine"), new_key("other")
    file = tmp_path / "keys.toml"
    file.write_text(entry + second)
    with running_gateway(redis_server.url, tmp_path, keys=file) as gateway:
        apis = [OpenAI(base_url=f"{gateway.url}/v1", api_key=key) for key in (mine, other)]
        response = apis[0].responses.create(**ASK, background=True)
        theirs = apis[1].responses
        for call in (theirs.retrieve, theirs.delete, theirs.cancel, theirs.input_items.list):
            refused(lambda call=call: call(response.id), 404)
        refused(lambda: theirs.create(**ASK, previous_response_id=response.id))
        assert apis[0].responses.retrieve(response.id).id == response.id


def test_an_idempotency_key_gives_the_first_answer(api: OpenAI) -> None:
    same = [
        api.responses.create(**{**ASK, "temperature": 1}, extra_headers={"Idempotency-Key": "once"})
        for _ in range(2)
    ]
    assert same[0].id == same[1].id
    assert same[0].output == same[1].output


# In the background ---------------------------------------------------------------------------


def ended(api: OpenAI, response_id: str) -> Response:
    def look() -> Response | None:
        found = api.responses.retrieve(response_id)
        return None if found.status in ("queued", "in_progress") else found

    found = wait_until(look)
    assert found is not None
    return found


def test_a_background_response_is_finished_without_its_gateway(
    worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path, api: OpenAI
) -> None:
    with worker.paused(), running_gateway(redis_server.url, tmp_path) as gateway:
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
    worker: WorkerProcess, redis_server: RedisServer, tmp_path: Path, api: OpenAI
) -> None:
    with running_gateway(redis_server.url, tmp_path) as gateway:
        other = OpenAI(base_url=f"{gateway.url}/v1", api_key="none")
        with worker.paused():
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


def test_the_helper_goes_on_with_a_background_stream(api: OpenAI) -> None:
    fields = {**ASK, "max_output_tokens": 60}
    with api.responses.stream(**fields, background=True, text_format=Walk) as stream:
        created = next(stream)
    with api.responses.stream(
        response_id=created.response.id, starting_after=0, text_format=Walk
    ) as stream:
        assert next(stream).sequence_number == 1
        assert isinstance(stream.get_final_response().output_parsed, Walk)


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


def test_a_background_response_can_be_cancelled(api: OpenAI, worker: WorkerProcess) -> None:
    with worker.paused():
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


def test_a_running_response_can_be_cancelled(api: OpenAI, worker: WorkerProcess) -> None:
    fields = {**ASK, "max_output_tokens": 450, "extra_body": {"ignore_eos": True}}
    with api.responses.create(**fields, background=True, stream=True) as stream:
        begun = next(each.response for each in stream if each.type == "response.in_progress")
        with worker.paused():
            # The worker cannot hear of it yet.
            assert api.responses.cancel(begun.id).status == "in_progress"
        assert ended(api, begun.id).status == "cancelled"
        assert list(stream)[-1].response.status == "cancelled"


def test_only_a_background_response_can_be_cancelled(api: OpenAI) -> None:
    response = api.responses.create(**ASK)
    refused(lambda: api.responses.cancel(response.id))


def test_deleting_a_background_response_cancels_it(
    api: OpenAI, worker: WorkerProcess, client: Client
) -> None:
    with worker.paused():
        begun = api.responses.create(**ASK, background=True)
        api.responses.delete(begun.id)
        assert client.job(begun.id.removeprefix("resp_")).status().state == "cancelled"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_cancels_what_it_waits_for(
    api: OpenAI,
    worker: WorkerProcess,
    redis_server: RedisServer,
    client: Client,
    stream: bool,
) -> None:
    with connect(redis_server.url) as redis, worker.paused():
        before = set(redis.scan_iter(keys.response("", "*")))
        with pytest.raises(openai.APITimeoutError):
            api.responses.create(**ASK, stream=stream, timeout=0.5)
        (key,) = set(redis.scan_iter(keys.response("", "*"))) - before
        job = client.job(str(key).rpartition(":")[2])
        wait_until(lambda: job.status().state == "cancelled")
    assert api.responses.retrieve(f"resp_{job.id}").status == "cancelled"
